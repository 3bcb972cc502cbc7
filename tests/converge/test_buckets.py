"""Buckets: small, and few collectives; what is known of tensors before an average."""

import itertools
import types
from typing import Any

import pytest
import torch

from benchmarks.harness import counted
from hdet.converge import all_finite, average_tensors, buckets, collectives, digest
from hdet.converge.buckets import Buckets, Part
from hdet.replicas import Replicas

from ..distributed import run_ranks


def two_replicas(rank: int, world: int, weights: list[float]) -> Any:
    """Of a tensor that is reduced where it lies, one that goes into a bucket, and a master of
    4 MiB that is reduced where it lies and rounded afterwards."""
    value = float("nan") if weights[rank] == 0 else 2.0 + 2 * rank
    cases = (((1 << 20,), value), ((5,), -value), ((1 << 20,), value + 2**-12))
    *tensors, master = [torch.full(shape, x) for shape, x in cases]
    average_tensors([t.requires_grad_() for t in tensors], Replicas.from_group(), weights)
    part = Part(master.bfloat16(), master)
    ours = Buckets(lambda: [part], in_place=True)
    ours.average(Replicas.from_group(), weights)
    return [t.unique().tolist() for t in (*tensors, master, part.tensor)], ours.extra_bytes


@pytest.mark.parametrize(("weights", "mean"), [([1.0, 0.0], 2.0), ([0.25, 0.75], 3.5)])
def test_weight_zero_contributes_nothing_not_even_nan(weights: list[float], mean: float) -> None:
    expected = [[mean], [-mean], [mean + 2**-12], [mean]]
    assert run_ranks(two_replicas, 2, weights) == [(expected, 0)] * 2


def count_collectives(rank: int, world: int, size: int, count: int, bucket_bytes: int) -> Any:
    tensors = [torch.ones(size) for _ in range(count)]
    ours = Buckets(lambda: list(map(Part, tensors)), bucket_bytes, in_place=True)
    with counted() as sent:
        ours.average(Replicas.from_group())
        ours.average(Replicas.from_group())
    # every element travels exactly once per average
    assert sum(call.sent for call in sent) == 2 * sum(t.nbytes for t in tensors)
    return len(sent) // 2, ours.extra_bytes


@pytest.mark.parametrize(("size", "count", "bucket_bytes", "expected"), [
    # 12 MB of small tensors: one bucket, not 3 000 collectives
    (1000, 3000, 32 << 20, 1),
    # large ones go as they are, without memory
    (1 << 20, 3, 32 << 20, 3),
    # two small buckets are filled again and again
    (1000, 30, 1 << 16, 4),
])  # fmt: skip
def test_collectives_and_extra_memory_are_bounded(size, count, bucket_bytes, expected) -> None:
    for collectives_, extra in run_ranks(count_collectives, 2, size, count, bucket_bytes):
        assert collectives_ <= expected and extra <= (0 if size >= 1 << 18 else bucket_bytes)


def test_the_end_of_a_filling_is_zeros_whatever_was_in_the_bucket() -> None:
    """Else what is there would be in the scale of an int8 block."""
    parts = [Part(torch.arange(250.0)), Part(torch.ones(7))]
    first, second = Buckets(lambda: parts, 2048, multiple=8).plan()
    first.flat.fill_(torch.nan)
    assert first.pack().tolist() == [*range(250), *[0.0] * 6]
    assert second.pack(0.5).tolist() == [0.5] * 7 + [0.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_all_finite_sees_a_single_bad_element(value: float) -> None:
    tensors = [torch.zeros(0), torch.full((5,), 3e38), torch.randn(100, 100)]
    assert all_finite(tensors) == 1.0
    tensors[2][57, 3] = value
    assert all_finite(tensors) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_digest_tells_single_bits_and_exchanges(dtype: torch.dtype) -> None:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    a, b = (torch.randn(1003).mul(50).to(dtype) for _ in range(2))
    a[0], a[1] = 1, 2  # whatever was drawn, an exchange of the two is one
    same = digest([a.clone(), b.clone()])
    assert torch.equal(digest([torch.cat([b[:1], a])[1:], b]), same), "whatever the alignment"
    assert not torch.equal(digest([b, a]), same)
    assert not torch.equal(digest([a[[1, 0, *range(2, 1003)]], b]), same)
    for bit, place in itertools.product(range(8 * a.element_size() - 1), (3, 1002)):
        flipped = a.clone()
        flipped.view(bits)[place] ^= 1 << bit
        assert bool((digest([flipped, b]) != same).any())


def test_digest_sees_every_one_of_many_tensors_and_any_number_of_flipped_signs() -> None:
    dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.float64] * 15
    sizes = [1, 300, 20_000, 70_000, 5] * 12
    tensors = [torch.zeros(size, dtype=d) for size, d in zip(sizes, dtypes, strict=True)]
    seen = {tuple(digest(tensors).tolist())}
    for tensor in tensors:
        tensor[-1] = 1.0
        seen.add(tuple(digest(tensors).tolist()))
        tensor[-1] = 0.0
    assert len(seen) == 1 + len(tensors)
    signs = torch.zeros(1 << 12)
    for count in (1, 2, 3, 4, 16, 1 << 11):
        signs[1::2][:count] = -0.0  # the highest bit of 64
        seen.add(tuple(digest([signs]).tolist()))
    assert len(seen) == 7 + len(tensors)
    # whole numbers below 2^40, so that 8192 members can add theirs in float64
    assert all(x == round(x) < 2**40 for both in seen for x in both)


class OnDevice(list[float]):
    """Numbers in the place of a tensor, on a GPU or not."""

    is_cuda = True

    def zero_(self) -> None:
        self[:] = [0.0] * len(self)

    def mul_(self, weight: float) -> None:
        self[:] = [weight * x for x in self]


@pytest.mark.parametrize(("cuda", "config", "multiplies"), [
    (True, "cpu:gloo,cuda:nccl", True), (True, "cpu:gloo,cuda:gloo", False),
    (False, "cuda:nccl", False),
])  # fmt: skip
def test_nccl_multiplies_on_the_way_but_not_by_zero(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, config: str, multiplies: bool
) -> None:
    """With stand-ins: what a collective is given, and what it is asked to do with it."""
    calls: list[tuple[list[float], Any]] = []
    noted = lambda tensor, op, group, async_op: calls.append((list(tensor), op))
    dist = collectives.dist
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(dist, "all_reduce", noted)
    monkeypatch.setattr(dist, "_make_nccl_premul_sum", lambda w: f"times {w}", raising=False)
    for weight in (0.25, 0.0):
        tensor = OnDevice([4.0, 8.0 if weight else float("nan")])
        tensor.is_cuda = cuda
        collectives.start_weighted_sum(tensor, weight, None)  # type: ignore[arg-type]
    first = ([4.0, 8.0], "times 0.25") if multiplies else ([1.0, 2.0], dist.ReduceOp.SUM)
    assert calls == [first, ([0.0, 0.0], dist.ReduceOp.SUM)]


def test_a_filling_is_packed_while_the_one_before_is_reduced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    travelling: list[int] = []
    most = [0]

    class Work:
        def __init__(self, flat: torch.Tensor, **_: Any) -> None:
            self.address = flat.data_ptr()
            assert self.address not in travelling, "packed over what is being reduced"
            travelling.append(self.address)
            most[0] = max(most[0], len(travelling))

        def wait(self) -> None:
            travelling.remove(self.address)

    monkeypatch.setattr(buckets.dist, "all_reduce", Work)
    tensors = [torch.full((128,), float(i)) for i in range(7)]
    replicas: Any = types.SimpleNamespace(peer_group=object(), count=2)
    Buckets(lambda: list(map(Part, tensors)), 1024).average(replicas)
    assert most == [2] and travelling == []
    assert [t.unique().tolist() for t in tensors] == [[i / 2] for i in range(7)]
