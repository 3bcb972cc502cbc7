"""A loop written for the published class runs after changing its import."""

import inspect
from contextlib import nullcontext

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from tests.schedulers.cases import Toy, adamw, exact, hyperparameters, sgd

pytestmark = pytest.mark.filterwarnings("error")

PUBLISHED = [  # after OneCycleLR's own arguments, in this order
    "auto_lr_warmup_steps", "ensemble_lr_spread_ratio", "model_sync_interval", "rank", "world_size",
    "enable_auto_lr", "loss_scale", "lr_of_lr", "momentum_of_lr",
]  # fmt: skip


def test_signature_is_torchs_then_the_published_one_then_keywords():
    ours = list(inspect.signature(hdet.OneCycleAutoLR).parameters.values())
    torchs = list(inspect.signature(OneCycleLR).parameters.values())
    for mine, theirs in zip(ours, torchs, strict=False):
        assert (mine.name, mine.default) == (theirs.name, theirs.default)
    published, rest = ours[len(torchs) :][: len(PUBLISHED)], ours[len(torchs) + len(PUBLISHED) :]
    assert [p.name for p in published] == PUBLISHED
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in published)
    *keywords, further = rest
    assert {p.name for p in keywords} >= {"replicas", "controller", "sync"}
    assert all(p.kind is p.KEYWORD_ONLY for p in keywords)
    assert further.kind is further.VAR_KEYWORD  # the Ensemble's


@pytest.mark.parametrize("enable_auto_lr", [False, True])
def test_published_positional_call(enable_auto_lr):
    toy, plain = Toy(adamw), Toy(adamw)
    with pytest.warns(UserWarning, match="one replica") if enable_auto_lr else nullcontext():
        scheduler = hdet.OneCycleAutoLR(
            toy.optimizer, 0.01, 30, None, None, 0.3, "cos", True, 0.85, 0.95, 25.0, 1e4, False, -1,
            10, 0.2, 5, 0, 1, enable_auto_lr, 0.1, 0.5, 0.9,
        )  # fmt: skip
    reference = OneCycleLR(plain.optimizer, 0.01, 30)
    for _ in range(30):  # one replica has nothing to compare
        plain.step()
        reference.step()
        scheduler.step(toy.step())
        assert hyperparameters(toy.optimizer) == hyperparameters(plain.optimizer)
    assert exact(toy.parameters()) == exact(plain.parameters())
    assert scheduler.ensemble.cycle == 6


def test_loss_may_be_a_number_a_tensor_or_absent(caplog):
    toy = Toy(sgd)
    scheduler = hdet.OneCycleAutoLR(toy.optimizer, 0.01, 30, model_sync_interval=1)
    kinds = [torch.Tensor.item, torch.Tensor.detach, torch.Tensor.double]
    kinds += [lambda loss: loss, lambda loss: loss.reshape(1), lambda loss: 3, lambda loss: None]
    for kind in kinds:
        scheduler.step(kind(toy.step()))
    assert scheduler.last_epoch == 7
    first, *others = caplog.messages
    assert first.startswith("hdet: OneCycleAutoLR: enable_auto_lr is False")
    assert not any("left out" in text for text in others)  # nobody reads losses


ACTS = {"enable_auto_lr": True, "auto_lr_warmup_steps": 0}


@pytest.mark.parametrize(("arguments", "message"), [
    ({"ensemble_lr_spread_ratio": 1.0}, "ensemble_lr_spread_ratio"),
    ({"model_sync_interval": 0}, "model_sync_interval"),
    ({"model_sync_interval": 2.5}, "model_sync_interval"),
    ({"auto_lr_warmup_steps": -1}, "auto_lr_warmup_steps must be"),
    ({"auto_lr_warmup_steps": 500, "search": hdet.AutoLR(torch.nn.Linear(1, 1))},
     "leave out auto_lr_warmup_steps=500"),
    ({"rank": 1, "world_size": 1}, "rank is 1, but without .*init_process_group it is 0"),
    ({"rank": 0, "world_size": 4}, "world_size is 4"),
    ({**ACTS, "loss_scale": 0.0}, "temperature"), ({**ACTS, "momentum_of_lr": 1.0}, "momentum"),
    ({"divergences": None}, "divergences"),
    ({"enable_auto_lr": True}, "total_steps.*20.*100000"),
    *(({"controller": of}, "controller must be an")
        for of in ("AutoLR", hdet.AutoLR, hdet.SoftmaxController)),
])  # fmt: skip
def test_wrong_input_is_refused_by_name_and_changes_nothing(arguments, message):
    toy, plain = Toy(sgd), Toy(sgd)
    before = hyperparameters(toy.optimizer)
    with pytest.raises((ValueError, TypeError), match=message):
        hdet.OneCycleAutoLR(toy.optimizer, 0.01, 20, **arguments)
    assert hyperparameters(toy.optimizer) == before
    # the optimizer is still usable, and by another attempt, with a setting of the Ensemble
    settings = {"divergence": hdet.Divergence(lower=0.25)}
    scheduler = hdet.OneCycleAutoLR(toy.optimizer, 0.01, 20, **settings)
    assert scheduler.ensemble.divergence.lower == 0.25
    reference = OneCycleLR(plain.optimizer, 0.01, 20)
    for _ in range(3):
        scheduler.step(toy.step())
        plain.step()
        reference.step()
    assert exact(toy.parameters()) == exact(plain.parameters())
