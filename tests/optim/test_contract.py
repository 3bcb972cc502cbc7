"""hdet's own optimizers keep the contract, and it notices those that do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

import hdet
from hdet.testing import RuleContract
from hdet.testing.rules import BACKENDS, device_of

from .common import BY_NAME, FREE, MUON, OURS, Rule, groups, names


class TestEach(RuleContract):
    """`rule.peer` is the reference."""

    rule: Rule
    backends = tuple(
        pytest.param(name, marks=pytest.mark.gpu if device_of(name) == "cuda" else ())
        for name in BACKENDS
    )

    @pytest.fixture(autouse=True, params=OURS, ids=names)
    def _take(self, request: pytest.FixtureRequest) -> None:
        self.rule = request.param
        self.optimizer, self.groups = self.rule.fused, self.rule.groups

    def split(self, params: Sequence[Parameter]) -> list[Any]:
        return [group["params"] for group in groups(params, self.rule)]

    def reference(self, groups: list[dict[str, Any]]) -> Optimizer | None:
        return None if self.rule in (MUON, FREE) else self.rule.peer(groups)  # of their own tests


class Faulty(hdet.FusedAdamW):
    """``fault``: what is wrong with it."""

    fault = ""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if self.fault == "step":
            self.param_groups[0]["params"][0].data.mul_(1 + 2**-17)
        if self.fault == "replicas" and self.num_replicas > 1:
            self.replica_parameters(1)[0].mul_(1 + 2**-7)
        if self.fault == "masters":
            for state in self.state.values():
                if "master_param" in state:
                    state["master_param"].mul_(1 + 2**-20)
        return loss

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        if self.fault == "state":
            for state in self.state.values():
                state["step"] += 1


@pytest.mark.parametrize(
    ("fault", "test", "args"),
    [
        ("step", "each_backend_takes_the_steps_of_the_reference_in_float64", ("torch",)),
        ("replicas", "replicas_step_as_separate_runs_would", ("float32", "torch")),
        ("masters", "masters_step_as_float32_parameters_would", ("fp32", torch.half, "torch")),
        ("state", "a_state_resumes_bitwise", ("float32", 1, True)),
    ],
)
def test_a_fault_is_found(fault: str, test: str, args: Any) -> None:
    for optimizer in (hdet.FusedAdamW, type("Broken", (Faulty,), {"fault": fault})):
        contract: Any = RuleContract()
        contract.optimizer = optimizer
        contract.reference = BY_NAME["adamw"].peer
        if optimizer is hdet.FusedAdamW:
            getattr(contract, f"test_{test}")(*args)
        else:
            with pytest.raises(AssertionError):
                getattr(contract, f"test_{test}")(*args)
