"""Every knob, by the table of what is known of it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

import hdet
from hdet import Temperature, WeightDecay
from hdet.knobs import of_model, of_optimizer

from .helpers import Given, Net, backward, ensemble, given
from .table import DIVERGE, KNOBS, REDUCED, SCORED, VALID, knob_of, probe_of, title

each = pytest.mark.parametrize("name", KNOBS)


def said_by(*flags: str, absent: bool = False) -> Any:
    """All knobs of which the flags are said, or are not."""
    names = [name for name in KNOBS if absent is not ({*flags} <= KNOBS[name].said)]
    return pytest.mark.parametrize("name", names)


@each
def test_a_replicas_value_is_there_where_the_knob_acts_and_only_there(name: str) -> None:
    """Also after an error inside."""
    info, seen, is_broken = KNOBS[name], [], False
    net, knob, settings = knob_of(name)
    run = ensemble(net, [knob], controller=given(1.25), **settings)
    read = lambda: info.cell(net, run.optimizer) if info.cell else run.value(title(name))

    def look(*_: Any) -> None:
        seen.append(read())
        if is_broken:
            raise MemoryError

    run.optimizer.register_step_pre_hook(look if info.acts == "step" else lambda *_: None)
    for is_broken in (True, False):
        with pytest.raises(MemoryError) if is_broken else nullcontext():
            with run.explore():
                backward(net)
                if info.acts == "forward":
                    look()
            run.optimizer.step()
        assert seen.pop() == pytest.approx(info.used, rel=1e-12) and not seen
        assert read() == info.base == run.values()[title(name)]
    with run.explore():
        assert read() == (info.base if info.acts == "step" else info.used)
        assert run.values()[title(name)] == info.base


@each
def test_a_record_says_what_replicas_had_before_the_decision(name: str) -> None:
    net, knob, settings = knob_of(name)
    controller = Given(factors=[1.5], multipliers=(1.25,))
    run = ensemble(net, [knob], controller=controller, every=1, **settings)
    with run.explore():
        loss = backward(net)
    run.optimizer.step()
    run.step(loss)
    [record] = run.history
    assert record["tried"] == {title(name): [pytest.approx(KNOBS[name].used, rel=1e-12)] * 8}
    assert record["corrections"][title(name)] != 1


@each
def test_what_each_knob_says_of_itself(name: str) -> None:
    _, knob, settings = knob_of(name)
    for bound in knob.bind(settings["optimizer"]):
        flags = (VALID, SCORED, REDUCED, DIVERGE)
        assert {flag for flag in flags if getattr(bound.meaning, flag)} == KNOBS[name].said
        assert bound.meaning.acts == KNOBS[name].acts


def test_every_knob_is_in_the_table() -> None:
    listed = {type(info.make(Net())).__name__ for info in KNOBS.values()}
    assert {*of_model.__all__, *of_optimizer.__all__} <= listed


@pytest.mark.parametrize("name", [name for name in KNOBS if "silent" not in name])
def test_every_knob_takes_another_grid(name: str) -> None:
    _, knob, settings = knob_of(name)
    given = {"values": [0.1, 0.2], "multipliers": [1.0, 2.0], "ratio": 2.0}
    for grid, value in given.items():
        for bound in replace(knob, **{grid: value}).bind(settings["optimizer"]):
            assert getattr(bound.grid, grid) in (value, tuple(given["values"]), (1.0, 2.0))
            assert bound.grid.spread == 0
    with pytest.raises(ValueError, match="grids of one knob"):
        replace(knob, spread=0.01, ratio=2.0).bind(settings["optimizer"])


@said_by(VALID, absent=True)
def test_knobs_that_regularise_need_a_held_out_probe(name: str) -> None:
    softmax = hdet.SoftmaxController(decay=None)
    for make in (lambda net: softmax, probe_of):
        net, knob, settings = knob_of(name)
        controller = make(net)
        says = f"prefers less of the knob '{title(name)}'.*'{controller.name}'"
        with pytest.raises(ValueError, match=f"{says}.*held_out=True.*may_move"):
            ensemble(net, [knob], controller=controller, **settings)
        assert "step" not in settings["optimizer"].__dict__
    for make in (lambda net: probe_of(net, held_out=True), lambda net: None):
        net, knob, settings = knob_of(name)
        ensemble(net, [knob], controller=make(net), **settings)


@said_by(VALID)
def test_the_others_may_be_judged_by_training_losses(name: str) -> None:
    net, knob, settings = knob_of(name)
    run = ensemble(net, [knob], controller=hdet.SoftmaxController(decay=None), **settings)
    assert title(name) in run.multipliers


ALIKE = [
    name
    for name, info in KNOBS.items()
    if info.acts == "forward" and not info.said & {SCORED, REDUCED}
]
"""of which an average of gradients makes one"""


@pytest.mark.parametrize("name", ALIKE)
def test_with_shared_gradients_what_acts_in_the_forward_pass_makes_no_difference(name: str) -> None:
    net, knob, _ = knob_of(name)
    says = f"'{title(name)}' acts in the forward pass, but with gradients='shared'"
    with pytest.raises(ValueError, match=f"{says}.*gradients='local'"):
        ensemble(net, [knob], controller=probe_of(net, held_out=True))
    knobs = [Temperature(net), WeightDecay()]  # but a temperature is scored directly
    run = ensemble(net, knobs, controller=probe_of(net, held_out=True))
    assert list(run.multipliers) == ["temperature", "weight_decay"]


@said_by(DIVERGE)
def test_what_makes_moments_diverge_needs_a_choice_of_moments(name: str) -> None:
    says = f"but replicas that differ in '{title(name)}' differ in their moments"
    for moments in (None, "keep", "forget", "average", "reset"):
        net, knob, settings = knob_of(name)
        given = {"optimizer": settings["optimizer"], "moments": moments}
        if moments in ("average", "reset"):
            assert title(name) in ensemble(net, [knob], **given).multipliers
        else:
            with pytest.raises(ValueError, match=f"moments is {moments!r}, {says}"):
                ensemble(net, [knob], **given)


@pytest.mark.parametrize("name", [name for name in KNOBS if name != "lr"])
def test_co_resident_replicas_differ_in_rates_and_in_what_is_scored_directly_only(
    name: str,
) -> None:
    info = KNOBS[name]
    net, knob, settings = knob_of(name)
    replicas = hdet.CoresidentReplicas(net, 4)
    says = "co-resident replicas.*one process per replica|gradients='local'"
    with nullcontext() if SCORED in info.said else pytest.raises(ValueError, match=says):
        hdet.Ensemble(settings["optimizer"], knobs=[knob], replicas=replicas)
