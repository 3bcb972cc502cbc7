"""csrc/core/numbers.h and philox.h against torch and known answers, for every upper half of a float32 and the lower halves at edges."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hdet.kernels.spec import rounding

from ..build.tools import ROOT, compiler

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.skipif(compiler() is None or not (ROOT / "csrc").exists(), reason="needs a C++ compiler and hdet's sources")
TYPES = {torch.bfloat16: 2, torch.float16: 3}  # DType


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("numbers") / "numbers.so"
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-shared", "-fPIC", "-fsanitize=undefined"]
    # undefined behaviour ends the process instead of needing a runtime library
    command = [str(compiler()), *flags, "-fsanitize-undefined-trap-on-error", str(HERE / "numbers.cpp"), "-o", str(library)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return ctypes.CDLL(str(library))


def address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def all_kinds_of_floats() -> Tensor:
    """Every sign, exponent and upper mantissa, each with lower halves around the ties of bfloat16 (0x8000) and float16 (0x1000)."""
    lower = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFF])
    bits = (torch.arange(65536)[:, None] << 16) + lower
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).flatten().view(torch.float32)


def equal(a: Tensor, b: Tensor) -> bool:
    """The same bits, or NaN on both sides."""
    number = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return bool(((a.view(number) == b.view(number)) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_to_16_bits_is_torchs(numbers: ctypes.CDLL, dtype: torch.dtype) -> None:
    values = all_kinds_of_floats()
    found = torch.empty(len(values), dtype=dtype)
    numbers.to_16_bits(TYPES[dtype], address(values), address(found), ctypes.c_int64(len(values)))
    assert equal(found, values.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_16_bits_widens_as_in_torch(numbers: ctypes.CDLL, dtype: torch.dtype) -> None:
    values = torch.arange(-32768, 32768).to(torch.int16).view(dtype)
    found = torch.empty(len(values))
    numbers.from_16_bits(TYPES[dtype], address(values), address(found), ctypes.c_int64(len(values)))
    assert equal(found, values.float())


def test_split_is_exact_for_every_number_and_its_upper_half_is_the_nearest(numbers: ctypes.CDLL) -> None:
    values = all_kinds_of_floats()
    values = values[~values.isnan()]
    upper, lower = torch.empty(len(values), dtype=torch.bfloat16), torch.empty(len(values), dtype=torch.int16)
    joined = torch.empty(len(values))
    numbers.split(address(values), address(upper), address(lower), address(joined), ctypes.c_int64(len(values)))
    assert torch.equal(joined.view(torch.int32), values.view(torch.int32))
    finite = values.isfinite() & upper.isfinite()
    error = (values.double() - upper.double()).abs()[finite]
    nearest = (values.double() - values.bfloat16().double()).abs()[finite]
    assert torch.equal(error, nearest)


def test_a_nan_shows_in_the_upper_half_of_the_split_form(numbers: ctypes.CDLL) -> None:
    """Also that of a GPU, 0x7fffffff, which would round to minus zero."""
    values = all_kinds_of_floats()
    values = torch.cat([values[values.isnan()], torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)])
    upper, lower = torch.empty(len(values), dtype=torch.bfloat16), torch.empty(len(values), dtype=torch.int16)
    joined = torch.empty(len(values))
    numbers.split(address(values), address(upper), address(lower), address(joined), ctypes.c_int64(len(values)))
    assert bool(upper.isnan().all()) and bool(joined.isnan().all())
    for mine, other in zip((upper, lower), rounding.split(values), strict=True):
        assert torch.equal(mine.view(torch.int16), other.view(torch.int16))


def test_a_parameter_that_was_set_to_zero_is_zero_whatever_its_lower_half(numbers: ctypes.CDLL) -> None:
    lower = torch.arange(-32768, 0, dtype=torch.int32).to(torch.int16).repeat(2)
    upper = torch.tensor([0.0, -0.0], dtype=torch.bfloat16).repeat_interleave(32768)
    joined = torch.empty(len(lower))
    numbers.join_halves(address(upper), address(lower), address(joined), ctypes.c_int64(len(lower)))
    assert equal(joined, upper.float()) and equal(rounding.join(upper, lower), upper.float())


def test_stochastic_rounding_goes_up_as_often_as_what_is_cut_off(numbers: ctypes.CDLL) -> None:
    random = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    for value in (1.0, 1.0 + 2**-9, 1.0 + 2**-23, -3.14159, 1e-40, -1e-42, 3.4e38):
        values = torch.full((65536,), value)
        found = torch.empty(65536, dtype=torch.bfloat16)
        numbers.round_stochastically(address(values), address(random), address(found), ctypes.c_int64(65536))
        down, up = values.view(torch.int32)[0] & -65536, (values.view(torch.int32)[0] & -65536) + 65536
        bits = found.view(torch.int16).to(torch.int32) << 16
        assert bool(((bits == down) | (bits == up)).all()), value
        assert int((bits == up).sum()) == int(values.view(torch.int32)[0] & 0xFFFF), value


def test_stochastic_rounding_leaves_infinities_and_nan(numbers: ctypes.CDLL) -> None:
    values = torch.tensor([float("inf"), float("-inf"), float("nan")]).repeat(2)
    values = torch.cat([values, torch.tensor([0x7F800001, 0x7FFFFFFF], dtype=torch.int64).to(torch.int32).view(torch.float32)])
    random = torch.full((len(values),), -1, dtype=torch.int16)  # 0xffff
    found = torch.empty(len(values), dtype=torch.bfloat16)
    numbers.round_stochastically(address(values), address(random), address(found), ctypes.c_int64(len(values)))
    assert equal(found, values.bfloat16())


@pytest.mark.parametrize(
    ("seed", "counter", "expected"),  # Random123's known answers
    [
        (0, [0, 0, 0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (0xFFFFFFFF_FFFFFFFF, [0xFFFFFFFF] * 4, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (0x299F31D0_A4093822, [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ],
)
def test_philox_gives_the_published_numbers(numbers: ctypes.CDLL, seed: int, counter: list[int], expected: list[int]) -> None:
    out = (ctypes.c_uint32 * 4)()
    numbers.philox_words(ctypes.c_uint64(seed), (ctypes.c_uint32 * 4)(*counter), out)
    assert list(out) == expected
    words = rounding.philox(seed, tuple(torch.tensor([c]) for c in counter))  # type: ignore[arg-type]
    assert [int(word) for word in words] == expected


def test_every_part_of_a_place_is_in_the_random_numbers(numbers: ctypes.CDLL) -> None:
    def words(seed: int = 3, step: int = 4, replica: int = 5, identity: int = 6, quad: int = 7) -> tuple[int, ...]:
        out = (ctypes.c_uint32 * 4)()
        numbers.element_bits(ctypes.c_uint64(seed), step, replica, identity, ctypes.c_int64(quad), out)
        return tuple(out)

    def philox(seed: int, counter: list[int]) -> tuple[int, ...]:
        out = (ctypes.c_uint32 * 4)()
        numbers.philox_words(ctypes.c_uint64(seed), (ctypes.c_uint32 * 4)(*counter), out)
        return tuple(out)

    assert words() == philox(3, [7, 5 << 16, 6, 4])
    assert words(quad=(9 << 32) + 7) == philox(3, [7, 5 << 16 | 9, 6, 4])
    changed = [
        words(seed=4),
        words(step=5),
        words(replica=6),
        words(identity=7),
        words(quad=8),
        words(quad=7 + 2**32),
        words(seed=3 + 2**32),
    ]
    assert len({words(), *changed}) == 8
