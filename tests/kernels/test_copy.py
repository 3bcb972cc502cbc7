"""A scaled copy of one set of tensors to another: into a bucket and out of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from hdet import kernels

from . import reference
from .cases import BACKENDS, SIZES, Guarded, check_same_bits, device_of
from .problem import assert_kept, value_of
from .reference import Bounded, exactly
from .table import BF16, F16, F32, I8, I16, STORAGE

Kind = tuple[torch.dtype, torch.dtype | None]
KINDS: list[Kind] = [*(kind for name in STORAGE if name != "mixed" for kind in STORAGE[name])]
SOURCES: list[Kind] = [(F32, None), (BF16, None), (BF16, I16), (BF16, I8), (F16, None)]


class Copy:
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
        self.plan = kernels.copy_plan(
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


@pytest.mark.parametrize("destination", KINDS, ids=str)
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_all_kinds_of_sources_and_destinations(source: Kind, destination: Kind) -> None:
    """On the CPU, whose bits all backends have."""
    for scale in (1.0, 0.3):
        check_copy(Copy([5, 0, 2057, 33, 1], [source], [destination], "cpu"), scale)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_sets(backend: str, sizes: list[int]) -> None:
    check_copy(Copy(sizes, SOURCES, [*KINDS, (F32, None)], backend), 0.3)


def check_copy(copy: Copy, scale: float) -> None:
    sources, _ = copy.values()
    copy.plan.copy(scale)
    exact = [exactly(x) if scale == 1 else reference.scaled(exactly(x), scale) for x in sources]
    copy.assert_written(exact)
    copy.assert_sources_untouched(sources)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_scale_zero_reads_nothing(backend: str, kind: Kind) -> None:
    copy = Copy([100], [(F32, None)], [kind], backend)
    copy.sources[0].fill_(float("nan"))
    copy.plan.copy(0.0)
    assert copy.values()[1][0].tolist() == [0.0] * 100


@pytest.mark.parametrize(
    "shifts",
    [(0, 0, 0, 0), (1, 1, 1, 1), (0, 0, 2, 0), (4, 4, 12, 4), (0, 1, 0, 0), (0, 0, 0, 1)],
    ids=str,
)
@pytest.mark.parametrize("destination", KINDS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_backends_and_instruction_sets_give_the_same_bits(
    backend: str, destination: Kind, shifts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def left_by(name: str) -> list[Tensor]:
        left = []
        for source in SOURCES:
            copy = Copy([5, 0, 2051, 1, 17, 40], [source], [destination], name, shifts)
            for scale in (0.3, 0.0, 1 / 7):
                copy.plan.copy(scale)
                left += [guarded.buffer.cpu().clone() for guarded in copy.memory]
        return left

    check_same_bits(left_by, monkeypatch, backend)


def test_torch_takes_any_dtype_and_layout() -> None:
    source, destination = torch.randn(4, 3, dtype=torch.float64).t(), torch.zeros(3, 8)[:, ::2]
    kernels.copy_plan([source], [destination], backend="torch").copy(0.5)
    assert torch.equal(destination, (source * 0.5).float())
    wide = torch.zeros(3, 4, dtype=torch.float64)
    kernels.copy_plan([source], [wide], backend="torch").copy(1 / 3)
    assert torch.equal(wide, source * (1 / 3))


ONES, LOW, HALF = ([torch.ones(2, dtype=dtype)] for dtype in (F32, BF16, F16))
REFUSED: list[tuple[list[Tensor], list[Tensor], dict[str, list[Tensor]], str]] = [
    ([], [], {}, "at least one"),
    (ONES, [], {}, "as many"),
    (LOW, ONES, {"source_lowers": ONES}, "lower half of source 0 has the dtype torch.float32"),
    (LOW, ONES, {"source_lowers": []}, "lower halves. has 0 entries, but there are 1"),
    (ONES, ONES, {"masters": ONES}, "own master"),
    (ONES, LOW, {"masters": [torch.ones(3)]}, "has the shape"),
    (ONES, HALF, {"masters": [ONES[0].to(I16)]}, "dtype torch.int16; it must be torch.float32"),
]


@pytest.mark.parametrize(("sources", "destinations", "options", "message"), REFUSED)
def test_refusals(
    sources: list[Tensor],
    destinations: list[Tensor],
    options: dict[str, list[Tensor]],
    message: str,
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        kernels.copy_plan(sources, destinations, **options)  # type: ignore[arg-type]


def test_a_source_that_overlaps_a_destination_is_refused() -> None:
    memory = torch.zeros(100)
    for source, destination in (
        (memory[:60], memory[40:]),
        (memory[40:], memory[:60]),
        (memory[10:20], memory[10:20]),
    ):
        with pytest.raises(ValueError, match="overlap in memory"):
            kernels.copy_plan([source], [destination[: source.numel()]])
    with pytest.raises(ValueError, match="overlap in memory"):
        kernels.copy_plan([memory[:50], memory[60:70]], [torch.zeros(50), memory[40:50]])
    kernels.copy_plan(
        [memory[:50], memory[:50]], [memory[50:], torch.zeros(50)]
    )  # sources may be the same
