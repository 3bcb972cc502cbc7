"""Ways of storing a float32 in 16 bits, for every upper half and the lower halves at edges, and
random numbers against known answers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hdet import _C, kernels
from hdet.kernels import numbers, tables

from .cases import BACKENDS, device_of


def all_kinds_of_floats() -> Tensor:
    """Every sign, exponent and upper mantissa, each with lower halves around the ties of bfloat16
    (0x8000) and float16 (0x1000)."""
    lower = torch.tensor(
        [
            0,
            1,
            0xFFF,
            0x1000,
            0x1001,
            0x2FFF,
            0x3000,
            0x3001,
            0x7FFF,
            0x8000,
            0x8001,
            0xF000,
            0xFFFF,
        ]
    )
    bits = (torch.arange(65536)[:, None] << 16) + lower
    return (
        torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).flatten().view(torch.float32)
    )


def copied(values: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    found = torch.empty(len(values), dtype=dtype, device=device_of(backend))
    kernels.copy_plan([values.to(found.device)], [found], backend=backend).copy()
    return found.cpu()


def split(
    values: Tensor, backend: str, lower_dtype: torch.dtype = torch.int16
) -> tuple[Tensor, Tensor]:
    upper, lower = (
        torch.empty(len(values), dtype=dtype, device=device_of(backend))
        for dtype in (torch.bfloat16, lower_dtype)
    )
    kernels.copy_plan([values.to(upper.device)], [upper], masters=[lower], backend=backend).copy()
    return upper, lower


def joined(upper: Tensor, lower: Tensor, backend: str) -> Tensor:
    found = torch.empty(len(upper), device=device_of(backend))
    kernels.copy_plan([upper], [found], source_lowers=[lower], backend=backend).copy()
    return found.cpu()


def equal(a: Tensor, b: Tensor) -> bool:
    """The same bits, or NaN on both sides."""
    number = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return bool(((a.view(number) == b.view(number)) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rounding_to_16_bits_and_widening_are_torchs(backend: str, dtype: torch.dtype) -> None:
    assert equal(copied(all_kinds_of_floats(), dtype, backend), all_kinds_of_floats().to(dtype))
    numbers = torch.arange(-32768, 32768).to(torch.int16).view(dtype)
    assert equal(copied(numbers, torch.float32, backend), numbers.float())


@pytest.mark.parametrize("backend", BACKENDS)
def test_split_is_exact_for_every_number_and_its_upper_half_is_the_nearest(backend: str) -> None:
    values = all_kinds_of_floats()
    values = values[~values.isnan()]
    upper, lower = split(values, backend)
    assert torch.equal(joined(upper, lower, backend).view(torch.int32), values.view(torch.int32))
    finite = values.isfinite() & upper.cpu().isfinite()
    error = (values.double() - upper.cpu().double()).abs()[finite]
    nearest = (values.double() - values.bfloat16().double()).abs()[finite]
    assert torch.equal(error, nearest)


@pytest.mark.parametrize("backend", BACKENDS)
def test_split24_is_the_nearest_number_of_24_bits_and_keeps_that(backend: str) -> None:
    values = all_kinds_of_floats()
    values = values[~values.isnan()]
    unit = 2.0 ** (torch.frexp(values.double()).exponent - 16).clamp(min=-141)
    nearest = torch.where(values.isinf(), values.double(), (values / unit).round() * unit)
    pair = split(values, backend, torch.int8)
    assert torch.equal(joined(*pair, backend), nearest.float())
    again = split(nearest.float(), backend, torch.int8)
    assert all(map(torch.equal, pair, again))


@pytest.mark.parametrize("lower_dtype", numbers.LOWER, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_shows_in_the_upper_half_of_the_split_form(
    backend: str, lower_dtype: torch.dtype
) -> None:
    """Also that of a GPU, 0x7fffffff, which would round to minus zero."""
    values = all_kinds_of_floats()
    values = torch.cat(
        [
            values[values.isnan()],
            torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32),
        ]
    )
    upper, lower = split(values, backend, lower_dtype)
    assert bool(upper.isnan().all()) and bool(joined(upper, lower, backend).isnan().all())
    assert set(upper.view(torch.int16).tolist()) == {0x7FC0} and not lower.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_parameter_that_was_set_to_zero_is_zero_whatever_its_lower_half(backend: str) -> None:
    lower = (
        torch.arange(-32768, 0, dtype=torch.int32, device=device_of(backend))
        .to(torch.int16)
        .repeat(2)
    )
    upper = torch.tensor(
        [0.0, -0.0], dtype=torch.bfloat16, device=device_of(backend)
    ).repeat_interleave(32768)
    assert equal(joined(upper, lower, backend), upper.cpu().float())


# what test_step.py compares the other backends with


def test_stochastic_rounding_goes_up_as_often_as_what_is_cut_off() -> None:
    for value in (1.0, 1.0 + 2**-9, 1.0 + 2**-23, -3.14159, 1e-40, -1e-42, 3.4e38):
        values = torch.full((65536,), value)
        found = numbers.stochastic_bfloat16(values, torch.arange(65536))
        down, up = (
            values.view(torch.int32)[0] & -65536,
            (values.view(torch.int32)[0] & -65536) + 65536,
        )
        bits = found.view(torch.int16).to(torch.int32) << 16
        assert bool(((bits == down) | (bits == up)).all()), value
        assert int((bits == up).sum()) == int(values.view(torch.int32)[0] & 0xFFFF), value


def test_stochastic_rounding_to_24_bits_goes_up_as_often_as_what_is_cut_off() -> None:
    for value in (1.0, 1.0 + 2**-17, 1.0 + 2**-23, -3.14159, 1e-40, -1e-42):
        bits = torch.full((256,), value).view(torch.int32)
        found = numbers.to_24(bits.view(torch.float32), torch.arange(256)).view(torch.int32)
        down = bits & -256
        assert bool(((found == down) | (found == down + 256)).all()), value
        assert int((found != down).sum()) == int(bits[0] & 0xFF), value


def test_stochastic_rounding_leaves_infinities_and_nan() -> None:
    values = torch.tensor(
        [0x7F800000, -0x800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF], dtype=torch.int32
    ).view(torch.float32)
    assert equal(numbers.stochastic_bfloat16(values, torch.full((5,), 0xFFFF)), values.bfloat16())


@pytest.mark.parametrize(
    ("seed", "counter", "expected"),  # Random123's known answers
    [
        (0, [0, 0, 0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (0xFFFFFFFF_FFFFFFFF, [0xFFFFFFFF] * 4, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            0x299F31D0_A4093822,
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_numbers(
    seed: int, counter: list[int], expected: list[int]
) -> None:
    words = numbers.philox(seed, tuple(torch.tensor([c]) for c in counter))
    assert [int(word) for word in words] == expected


def test_formats_that_kernels_are_compiled_for() -> None:
    """They say nothing of moments that are codes: such tensors and others share a kernel.

    One tensor of another format, and none of them fits.
    """
    any_, floats, masters, split = range(4)
    f32, bf16, codes = torch.float32, torch.bfloat16, torch.uint8

    def known(*tensors: tuple[torch.dtype, torch.dtype | None, torch.dtype | None]) -> int:
        """`tensors`: type of parameter and gradient, of the master, of moments."""
        columns = [
            [None if of is None else torch.empty(0, dtype=of) for of in column]
            for column in zip(*tensors, strict=True)
        ]
        params, lowers, moments = columns
        return _C.known_of(tables.formats(len(tensors), params, params, lowers, moments, moments))

    assert [known((f32, None, moment)) for moment in (f32, codes, None, bf16)] == [
        floats,
        floats,
        floats,
        any_,
    ]
    assert [known((bf16, master, codes)) for master in (f32, torch.int16, torch.int8, None)] == [
        masters,
        split,
        any_,
        any_,
    ]
    assert known((f32, None, codes), (f32, None, f32)) == floats
    assert known((f32, None, codes), (bf16, f32, f32)) == any_
    assert known((bf16, torch.int16, f32), (bf16, torch.int16, codes)) == split
