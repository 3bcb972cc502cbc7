"""What the backend would launch on an H100, compiled without one: memory accesses, registers, and
when it compiles again."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="Triton is not installed; there are wheels for Linux")
if triton.knobs.runtime.interpret:
    pytest.skip("nothing is compiled under TRITON_INTERPRET=1", allow_module_level=True)

from hdet.kernels import StepOptions, StepSettings, StepTensors
from hdet.kernels import triton as backend
from hdet.kernels.ema import WeightAverage
from hdet.kernels.interface import PLAIN
from hdet.kernels.triton import launch
from hdet.kernels.triton import step as triton_step
from hdet.kernels.triton import symmetric_products as symmetric
from hdet.rules import RULES

from .compiler import Binary, Compiling, Driver

F32, BF16, F16, I16, U8 = torch.float32, torch.bfloat16, torch.float16, torch.int16, torch.uint8


@pytest.fixture(autouse=True, scope="module")
def without_a_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setenv("TRITON_CACHE_DIR", os.fspath(tmp_path_factory.mktemp("cache")))
    patch.setattr(triton.runtime.driver, "_active", Driver())
    for module in (backend, triton_step):
        patch.setattr(module, "Memory", Compiling)
    yield
    patch.undo()


@pytest.fixture(autouse=True)
def launches() -> list[tuple[str, Any]]:
    Compiling.launches.clear()
    return Compiling.launches


@dataclass(frozen=True)
class Stored:
    """A model whose tensors are all stored in one way."""

    rule: str = "adamw"
    param: torch.dtype = F32
    master: torch.dtype | None = None
    gradient: torch.dtype = F32
    first: torch.dtype | None = F32
    second: torch.dtype | None = F32
    replicas: int = 1
    stochastic: int | None = None
    options: StepOptions = PLAIN
    averages: int = 0

    def moments(self) -> list[torch.dtype | None]:
        rule = RULES[self.rule]
        kinds = zip(rule.moments, rule.signed, strict=True)
        return [
            F32 if name in rule.exact else self.first if signed else self.second
            for name, signed in kinds
        ]

    def streams(self) -> tuple[list[torch.dtype], list[torch.dtype]]:
        """dtypes of what an element reads and writes."""
        moments = [d for d in self.moments() if d is not None]
        each = [d for d in (self.param, self.master) if d is not None] * self.replicas
        kept = [self.master] * self.replicas if self.master == F32 else each
        zeroed = [self.gradient] if self.options.zero_gradients else []
        emas = [F32] * self.averages * self.replicas
        return [self.gradient, *moments, *kept, *emas], [*moments, *each, *zeroed, *emas]


def tensors(dtype: torch.dtype | None, sizes: list[int]) -> list[Tensor] | None:
    return None if dtype is None else [torch.zeros(n, dtype=dtype) for n in sizes]


def sets(dtype: torch.dtype | None, sizes: list[int], count: int) -> list[Any] | None:
    return None if dtype is None else [tensors(dtype, sizes) for _ in range(count)]


def settings(replicas: int, **changed: Any) -> list[StepSettings]:
    return [
        StepSettings(1e-3, tuple(1.0 + k for k in range(replicas)), 0.9, 0.999, 1e-8)._replace(
            **changed
        )
    ]


def plan_of(s: Stored, sizes: list[int]) -> Any:
    kinds, nothing = s.moments(), [None] * len(sizes)
    return backend.TritonBackend().step_plan(
        StepTensors(
            s.rule,
            sets(s.param, sizes, s.replicas),  # type: ignore[arg-type]
            [0] * len(sizes),
            [torch.zeros(()) for _ in sizes],
            [tensors(kind, sizes) or nothing for kind in kinds],
            sets(s.master, sizes, s.replicas),
            stochastic=s.stochastic,
            scales=[
                tensors(F32 if kind == U8 else None, [-(-n // 256) for n in sizes]) or nothing
                for kind in kinds
            ],
            averages=[WeightAverage(0.9)] * s.averages,
            emas=[sets(F32, sizes, s.replicas) or [] for _ in range(s.averages)],
            ema_steps=[torch.zeros(()) for _ in sizes] if s.averages else (),
        )
    )


MIXED = {"param": BF16, "gradient": BF16}
# three moments need the most registers; of fewer two and one have one rule each, and one that gives
# the parameter
STEPS = {
    **{name: Stored(name) for name in ("adamw", "ademamix", "schedule_free_adamw", "sgd")},
    "adamw, 5 replicas": Stored(replicas=5),
    "adamw, averaged": Stored(averages=1),
    "stochastic, averaged": Stored(**MIXED, first=BF16, second=BF16, stochastic=7, averages=2),
    "adamw, 3 replicas, averaged": Stored(replicas=3, averages=1),
    "adamw, zeroed": Stored(options=StepOptions(zero_gradients=True)),
    "master": Stored(**MIXED, master=F32),
    "split": Stored(**MIXED, master=I16),
    "split24": Stored(**MIXED, master=torch.int8, stochastic=7),
    "split, 16 bits throughout": Stored(**MIXED, master=I16, first=BF16, second=BF16),
    "float16": Stored(param=F16, gradient=F16),
    "stochastic": Stored(**MIXED, first=BF16, second=BF16, stochastic=7),
}


def check_code(
    compiled: Any, folder: Path, float64: bool = False, shared: bool = False, fused: bool = False
) -> Binary:
    """``fused``: the kernel asks for fused multiply-adds itself."""
    binary = Binary(compiled, folder)
    if float64 and triton.__version__.startswith(
        "3.6."
    ):  # its ptxas keeps 8 bytes of a double's power there, once a step
        assert binary.usage["STACK"] <= 8
    else:
        assert (
            binary.usage["STACK"]
            == binary.usage["LOCAL"]
            == 0
            == binary.instructions("(?:LDL|STL)")
        ), "registers are spilled to local memory"
    assert float64 or (".f64" not in binary.ptx and binary.instructions("D(?:ADD|MUL|FMA)") == 0), (
        "float64 arithmetic in a main loop"
    )
    assert fused or "fma.rn.f32" not in binary.ptx, "contracted: other bits than the native kernels"
    assert ".ftz" not in binary.ptx and ".approx" not in binary.ptx, (
        "subnormal numbers are lost, or results are approximate"
    )
    assert shared or binary.usage["SHARED"] == 0, "values change threads between accesses"
    return binary


def check_accesses(binary: Binary, read: list[torch.dtype], written: list[torch.dtype]) -> None:
    """Eight elements a thread at a time, float32 in 16 bytes; 16 bits in 16 bytes where nothing is
    wider, else in 8; 8 bits in 4. Then the tail."""
    for kind, streams in (("ld", read), ("st", written)):
        wide, narrow, bytes_ = ([d for d in streams if d.itemsize == size] for size in (4, 2, 1))
        all_narrow = not any(d.itemsize == 4 for d in (*read, *written))
        assert binary.accesses(kind, "v4.b32") == 2 * len(wide) + len(narrow) * all_narrow
        assert binary.accesses(kind, "v2.b32") == 2 * len(narrow) * (not all_narrow)
        assert (binary.accesses(kind, "b32"), binary.accesses(kind, "b16")) == (
            len(wide) + 2 * len(bytes_),
            len(narrow),
        ), "the tail alone goes by elements"


derived: list[Any] = []  # one for each rule, whatever the update


@pytest.mark.parametrize("stored", STEPS.values(), ids=STEPS)
def test_steps(stored: Stored, launches: list[tuple[str, Any]], tmp_path: Path) -> None:
    plan, sizes = plan_of(stored, [40000, 3, 0]), [40000, 3, 0]
    plan.step(tensors(stored.gradient, sizes), settings(stored.replicas), stored.options)
    assert [name for name, _ in launches] == ["derive", "update"]
    if launches[0][1] not in derived:
        derived.append(launches[0][1])
        check_code(launches[0][1], tmp_path, float64=True, shared=True)
    check_accesses(check_code(launches[1][1], tmp_path), *stored.streams())


@pytest.mark.parametrize("replicas", [1, 5])
def test_moments_in_8_bits(replicas: int, launches: list[tuple[str, Any]], tmp_path: Path) -> None:
    """One launch; parameters and gradient in vectors of 16 bytes, codes in those of 4.

    The largest of a block passes between threads.
    """
    stored = Stored(first=U8, second=U8, replicas=replicas)
    plan, sizes = plan_of(stored, [40000, 3, 0]), [40000, 3, 0]
    plan.step(tensors(F32, sizes), settings(replicas))
    assert [name for name, _ in launches] == ["derive", "update"]
    binary = check_code(launches[1][1], tmp_path, shared=True)
    assert (
        binary.accesses("ld", "v4.b32") >= 2 + 2 * replicas
        and binary.accesses("st", "v4.b32") >= 2 * replicas
    )


def test_addresses_that_are_not_aligned_are_read_by_elements(
    launches: list[tuple[str, Any]], tmp_path: Path
) -> None:
    plan = plan_of(Stored(), [1000])
    plan.step([torch.zeros(1001)[1:]], settings(1), StepOptions(max_norm=1.0))
    assert [name for name, _ in launches] == ["squares", "derive", "update"]
    update = check_code(launches[2][1], tmp_path)
    assert (
        update.accesses("ld", "v4.b32")
        == update.accesses("st", "v4.b32")
        == 0
        < update.accesses("ld", "b32")
    )


def test_launches_of_a_mixed_model(launches: list[tuple[str, Any]], tmp_path: Path) -> None:
    """Two formats, with a norm: four."""
    params = [torch.zeros(100, dtype=dtype) for dtype in (BF16, F32, BF16)]
    masters = [torch.zeros(100), None, torch.zeros(100)]
    moments = [[torch.zeros(100) for _ in params] for _ in range(2)]
    plan = backend.TritonBackend().step_plan(
        StepTensors(
            "adamw",
            [params],
            [0] * 3,
            [torch.zeros(()) for _ in params],
            moments,
            masters=[masters],
        )
    )
    plan.step([torch.zeros_like(p) for p in params], settings(1), StepOptions(max_norm=1.0))
    assert [name for name, _ in launches] == ["squares", "derive", "update", "update"]
    check_code(launches[0][1], tmp_path, float64=True, shared=True, fused=True)


@pytest.mark.parametrize(("param", "master"), [(F32, None), (BF16, I16)])
def test_averages(
    param: torch.dtype, master: torch.dtype | None, launches: list[tuple[str, Any]], tmp_path: Path
) -> None:
    stored = Stored(param=param, master=master, replicas=8)
    backend.TritonBackend().average_plan(sets(param, [40000], 8), sets(master, [40000], 8)).average(
        [0.125] * 8
    )  # type: ignore[arg-type]
    read, written = stored.streams()
    check_accesses(check_code(launches[0][1], tmp_path), read[3:], written[2:])


def test_nothing_that_changes_between_steps_compiles_again(launches: list[tuple[str, Any]]) -> None:
    stored, sizes = Stored(replicas=2), [4096, 17]
    plan = plan_of(stored, sizes)
    odd = torch.zeros(3)[1:2]  # at an address that is no multiple of 16
    several = [
        ({}, {}),
        ({"lr": 1.0}, {}),
        (
            {
                "lr": 0.0,
                "beta1": 0.0,
                "beta2": 0.5,
                "eps": 1.0,
                "weight_decay": 0.5,
                "maximize": True,
                "decay_at_base": True,
            },
            {},
        ),
        ({"lr": torch.zeros(1)}, {"max_norm": 1.0}),
        ({"lr": odd, "multipliers": (0.0, 1.0)}, {"max_norm": 16.0}),
        ({}, {"max_norm": float("inf"), "grad_scale": torch.ones(1), "found_inf": odd}),
        ({}, {"grad_scale": odd}),
    ]
    for changed, options in several:
        plan.step(tensors(F32, sizes), settings(2, **changed), StepOptions(**options))
    larger = [5, 1 << 20, *[100] * 30]
    other = plan_of(stored, larger)
    other.step(tensors(F32, larger), settings(2), StepOptions(max_norm=1.0))
    compiled: dict[str, set[int]] = {}
    for name, kernel in launches:
        compiled.setdefault(name, set()).add(id(kernel))
    assert {name: len(kernels) for name, kernels in compiled.items()} == {
        "squares": 1,
        "derive": 1,
        "update": 1,
    }

    plan.step(tensors(F32, sizes), settings(2), replace(StepOptions(), zero_gradients=True))
    assert id(launches[-1][1]) not in compiled["update"]  # so the count can see a compilation


def test_tensors_on_another_device_are_refused() -> None:
    with pytest.raises(
        ValueError, match='backend="triton" does not work on tensors on cpu; use backend="auto"'
    ):
        launch.Memory(torch.device("cpu"))


@pytest.mark.parametrize(
    ("m", "length", "added", "dtype"),
    [(768, 3072, False, BF16), (192, 100, True, F16)],
)
def test_symmetric_products(
    m: int,
    length: int,
    added: bool,
    dtype: torch.dtype,
    launches: list[tuple[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On tensor cores, fed by copies that pass by the registers where rows begin at multiples of 16
    bytes; nothing is spilled."""
    monkeypatch.setattr(symmetric, "_memory", Compiling)
    x, square = (
        torch.empty(2, m, length, dtype=dtype, device="meta"),
        torch.empty(2, m, m, dtype=dtype, device="meta"),
    )
    monkeypatch.setattr(Tensor, "data_ptr", lambda _: 1 << 20)
    symmetric.product(x, x, square if added else None, 0.5, -1.0)
    symmetric.product(x, x, square if added else None, 1.0, 0.0)
    assert launches[0][1] is launches[1][1], "coefficients are not part of what is compiled"
    binary = Binary(launches[0][1], tmp_path)
    assert (
        binary.usage["STACK"] == binary.usage["LOCAL"] == 0 == binary.instructions("(?:LDL|STL)")
    ), "registers are spilled to local memory"
    assert binary.instructions("HGMMA") > 0
    assert ("cp.async" in binary.ptx) == (length % 8 == 0)
    # those of the tile's number alone: with 2^31 elements in a matrix their places need 64 bits
    assert len(re.findall(r"m(?:ul|ad)\.lo\.s32", binary.ptx)) < 8
