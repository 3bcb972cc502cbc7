"""Operations between two sets of tensors: into a bucket and out of it, a running average, an
exchange."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from hdet import kernels

from . import reference
from .cases import BACKENDS, CHUNK, SIZES, Guarded, check_same_bits, device_of
from .problem import assert_kept, value_of
from .reference import Bounded, exactly
from .table import BF16, F16, F32, I16, STORAGE

Kind = tuple[torch.dtype, torch.dtype | None]
KINDS: list[Kind] = [*(kind for name in STORAGE if name != "mixed" for kind in STORAGE[name])]
SOURCES: list[Kind] = [(F32, None), (BF16, None), (BF16, I16), (F16, None)]


class Pair:
    """Sources and destinations in guarded memory; `kinds` are cycled over the tensors."""

    def __init__(
        self,
        sizes: list[int],
        sources: list[Kind],
        destinations: list[Kind],
        backend: str,
        shifts: Sequence[int] = (0, 1, 2, 3),
    ) -> None:
        device = device_of(backend)
        cycled = [
            [kinds[i % len(kinds)] for i in range(len(sizes))] for kinds in (sources, destinations)
        ]
        self.memory = [
            Guarded(sizes, shifts[place], place, device, [kind[j] for kind in kinds])
            for place, (kinds, j) in enumerate(itertools.product(cycled, (0, 1)))
        ]
        self.sources, self.lowers, self.destinations, self.masters = (
            guarded.tensors for guarded in self.memory
        )
        self.plan = kernels.pair_plan(
            self.sources,
            self.destinations,
            source_lowers=self.lowers if self.memory[1].given() else None,
            masters=self.masters if self.memory[3].given() else None,
            backend=backend,
        )

    def values(self) -> tuple[list[Tensor], list[Tensor]]:
        """What sources and destinations stand for, in float64."""
        pairs = [
            zip(*columns, strict=True)
            for columns in ((self.sources, self.lowers), (self.destinations, self.masters))
        ]
        sources, destinations = [
            [value_of(p.cpu(), None if m is None else m.cpu()).clone() for p, m in pair]
            for pair in pairs
        ]
        return sources, destinations

    def assert_written(self, exact: list[Bounded]) -> None:
        for i, (expected, destination, master) in enumerate(
            zip(exact, self.destinations, self.masters, strict=True)
        ):
            assert_kept(destination, master, expected, f"destination {i}")

    def assert_sources_untouched(self, before: list[Tensor]) -> None:
        for source, old in zip(self.values()[0], before, strict=True):
            assert torch.equal(source, old)
        for guarded in self.memory:
            guarded.assert_guards()


@pytest.mark.parametrize("operation", ["copy", "scaled copy", "lerp", "lerp to the end"])
@pytest.mark.parametrize("destination", KINDS, ids=str)
@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_kinds_of_sources_and_destinations(
    backend: str, source: Kind, destination: Kind, operation: str
) -> None:
    pair = Pair([5, 0, CHUNK + 9, 33, 1], [source], [destination], backend)
    check_operation(pair, operation)


@pytest.mark.parametrize("operation", ["copy", "scaled copy", "lerp", "lerp to the end"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_sets(backend: str, sizes: list[int], operation: str) -> None:
    check_operation(Pair(sizes, SOURCES, [*KINDS, (F32, None)], backend), operation)


def check_operation(pair: Pair, operation: str) -> None:
    sources, old = pair.values()
    if operation == "copy":
        pair.plan.copy()
        exact = [exactly(source) for source in sources]
    elif operation == "scaled copy":
        pair.plan.copy(0.3)
        exact = [reference.scaled(exactly(source), 0.3) for source in sources]
    else:
        weight = 0.3 if operation == "lerp" else 0.75
        pair.plan.lerp(weight)
        exact = [
            reference.running_average(average, exactly(source), weight)
            for average, source in zip(old, sources, strict=True)
        ]
    pair.assert_written(exact)
    pair.assert_sources_untouched(sources)


@pytest.mark.parametrize(
    "kinds", [[kind] for kind in SOURCES] + [SOURCES], ids=[*map(str, SOURCES), "mixed"]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_swap_exchanges_bits_and_back(backend: str, kinds: list[Kind]) -> None:
    pair = Pair([5, 0, CHUNK + 9, 33, 1, 16], kinds, kinds, backend)
    before = [
        [None if t is None else t.clone() for t in guarded.tensors] for guarded in pair.memory
    ]
    for order in ((2, 3, 0, 1), (0, 1, 2, 3)):
        pair.plan.swap()
        for guarded, place in zip(pair.memory, order, strict=True):
            guarded.assert_guards()
            for tensor, expected in zip(guarded.tensors, before[place], strict=True):
                assert tensor is None or torch.equal(tensor, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_swap_keeps_every_bit_pattern_of_nan(backend: str) -> None:
    patterns = torch.tensor(
        [0x7F800001, 0x7FFFFFFF, -1, 0x7FC00000, -(1 << 31)],
        dtype=torch.int32,
        device=device_of(backend),
    )
    x, y = patterns.view(F32), torch.zeros(5, device=patterns.device)
    expected = patterns.clone()
    kernels.pair_plan([x], [y], backend=backend).swap()
    assert torch.equal(y.view(torch.int32), expected) and x.tolist() == [0.0] * 5


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_scale_zero_reads_nothing_and_lerp_to_the_end_copies(backend: str, kind: Kind) -> None:
    pair = Pair([100], [(F32, None)], [kind], backend)
    pair.sources[0].fill_(float("nan"))
    pair.plan.copy(0.0)
    assert pair.values()[1][0].tolist() == [0.0] * 100
    pair.sources[0].fill_(0.5)
    pair.destinations[0].fill_(float("nan"))
    if pair.masters[0] is not None and pair.masters[0].dtype == F32:
        pair.masters[0].fill_(float("nan"))
    pair.plan.lerp(1.0)
    assert pair.values()[1][0].tolist() == [0.5] * 100


@pytest.mark.parametrize(
    "shifts", [(0, 0, 0, 0), (1, 1, 1, 1), (0, 0, 2, 0), (4, 4, 12, 4)], ids=str
)
@pytest.mark.parametrize("destination", KINDS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_backends_and_instruction_sets_give_the_same_bits(
    backend: str, destination: Kind, shifts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def left_by(name: str) -> list[Tensor]:
        left = []
        for source in SOURCES:
            pair = Pair([5, 0, CHUNK + 3, 1, 17, 40], [source], [destination], name, shifts)
            for turn, number in enumerate((0.3, 0.25, 0.0, 1.0, 1 / 7, 1 / 7)):
                (pair.plan.copy, pair.plan.lerp)[turn % 2](number)
                left += [guarded.buffer.cpu().clone() for guarded in pair.memory]
        return left

    check_same_bits(left_by, monkeypatch, backend)


def test_torch_takes_any_dtype_and_layout() -> None:
    source, destination = torch.randn(4, 3, dtype=torch.float64).t(), torch.zeros(3, 8)[:, ::2]
    kernels.pair_plan([source], [destination], backend="torch").copy(0.5)
    assert torch.equal(destination, (source * 0.5).float())
    wide = torch.zeros(3, 4, dtype=torch.float64)
    kernels.pair_plan([source], [wide], backend="torch").copy(1 / 3)
    assert torch.equal(wide, source * (1 / 3))


LOW = torch.ones(2, dtype=BF16)


@pytest.mark.parametrize(
    ("sources", "destinations", "options", "message"),
    [
        ([], [], {}, "at least one"),
        ([torch.ones(2)], [], {}, "as many"),
        (
            [LOW],
            [torch.ones(2)],
            {"source_lowers": [torch.ones(2)]},
            "lower half of source 0 has the dtype torch.float32",
        ),
        (
            [LOW],
            [torch.ones(2)],
            {"source_lowers": []},
            "lower halves. has 0 entries, but there are 1",
        ),
        ([torch.ones(2)], [torch.ones(2)], {"masters": [torch.ones(2)]}, "own master"),
        ([torch.ones(2)], [LOW], {"masters": [torch.ones(3)]}, "has the shape"),
        (
            [torch.ones(2)],
            [LOW.half()],
            {"masters": [torch.ones(2, dtype=I16)]},
            "has the dtype torch.int16; it must be torch.float32",
        ),
    ],
)
def test_refusals(
    sources: list[Tensor],
    destinations: list[Tensor],
    options: dict[str, list[Tensor]],
    message: str,
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        kernels.pair_plan(sources, destinations, **options)  # type: ignore[arg-type]


def test_a_source_that_overlaps_a_destination_is_refused() -> None:
    memory = torch.zeros(100)
    for source, destination in (
        (memory[:60], memory[40:]),
        (memory[40:], memory[:60]),
        (memory[10:20], memory[10:20]),
    ):
        with pytest.raises(ValueError, match="overlap in memory"):
            kernels.pair_plan([source], [destination[: source.numel()]])
    with pytest.raises(ValueError, match="overlap in memory"):
        kernels.pair_plan([memory[:50], memory[60:70]], [torch.zeros(50), memory[40:50]])
    kernels.pair_plan(
        [memory[:50], memory[:50]], [memory[50:], torch.zeros(50)]
    )  # sources may be the same


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_refused_operations_change_nothing(backend: str) -> None:
    x, y = torch.ones(5), torch.zeros(5, dtype=BF16)
    plan = kernels.pair_plan([x], [y], backend=backend)
    with pytest.raises(TypeError, match="cannot change places"):
        plan.swap()
    for weight in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"weight=.* must be in \[0, 1\]"):
            plan.lerp(weight)
    assert x.tolist() == [1.0] * 5 and y.tolist() == [0.0] * 5
