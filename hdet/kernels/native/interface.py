"""Where the torch that runs keeps what a step asks for (csrc/tensors.h), found and tried on tensors
of which Python knows everything."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_Word = ctypes.c_size_t
_FUNCTIONS = {  # names, and what they return
    "_ZNK3c1010TensorImpl4gradEv": ctypes.c_void_p,
    "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE": None,
    "aoti_torch_get_data_ptr": ctypes.c_int32,
    "aoti_torch_assign_tensors": ctypes.c_int32,
}
_NUMBERS = {torch.float32: 6, torch.bfloat16: 15, torch.float16: 5}
_CPU = 0x01FF00
"""a device as it is stored: type 0, index -1, and that there is one"""


def _words(address: int, count: int) -> list[int]:
    return list((_Word * count).from_address(address))


def _place(numbers: Sequence[int], words: Sequence[int]) -> int:
    """Where these numbers stand among the words."""
    count = len(numbers)
    place, *_ = [i for i in range(len(words)) if list(words[i : i + count]) == list(numbers)]
    return place


def _viewed(tensor: Tensor, first: int) -> list[object]:
    """As Torch::view."""
    dim, *lie, _, numel, kind, keys = _words(tensor._cdata + 8 * first, 15)
    if dim > 5:
        lie = _words(lie[0], 2 * dim)
    return [lie[:dim], lie[max(5, dim) :][:dim], numel, kind & (1 << 40) - 1, keys]


def _known(tensor: Tensor) -> list[object]:
    kind, keys = _CPU << 16 | _NUMBERS[tensor.dtype], torch._C._dispatch_keys(tensor).raw_repr()
    return [list(tensor.shape), list(tensor.stride()), tensor.numel(), kind, keys]


def _check(is_right: bool) -> None:
    if not is_right:
        raise ValueError("this torch keeps tensors in another way")


@torch.inference_mode(False)
def find_interface() -> list[int]:
    """The members of csrc/tensors.h, Torch. Raises where this torch is not known."""
    library = ctypes.CDLL(torch._C.__file__)  # finds what torch's libraries have, too
    grad, bump_version, get_data, assign = functions = [getattr(library, f) for f in _FUNCTIONS]
    for function, result in zip(functions, _FUNCTIONS.values(), strict=True):
        function.restype = result
    numbers = torch.arange(9999.0, device="cpu")
    probe = numbers.as_strided((2, 3, 5, 7, 4), (4001, 1009, 211, 29, 6), 11)
    sizes = _place([5, *probe.shape], _words(probe._cdata, 26))
    word = _place([probe._cdata], _words(id(probe), torch.Tensor.__basicsize__ // 8))
    param = torch.nn.Parameter(numbers[:6].view(2, 3).t())
    others = [numbers[5], numbers[:64].view([2] * 6), torch._neg_view(numbers), param]
    others += [numbers[:0], numbers.bfloat16(), numbers.half()[3:]]
    _check(all(_viewed(x, sizes) == _known(x) for x in (probe, *others)))

    one: Any = numbers[7:]
    of = lambda tensor: ctypes.c_void_p(id(tensor) + 8 * word)
    (undefined,) = _words(grad(ctypes.c_void_p(param._cdata)), 1)
    param.grad = torch.ones_like(param)
    _check(_words(grad(ctypes.c_void_p(param._cdata)), 1) == [param.grad._cdata])
    address, held, version, count = (
        ctypes.c_void_p(),
        _Word(undefined),
        one._version,
        one._use_count(),
    )
    bump_version(of(one))
    _check(get_data(of(one), ctypes.byref(address)) == 0 and address.value == one.data_ptr())
    _check(one._version == version + 1)
    private: Any = torch._C
    _check(private._wrap_tensor_impl(private._tensor_impl_raw_handle(one)) is one)
    for source, more in ((of(one), 1), (ctypes.byref(_Word(undefined)), 0)):
        _check(assign(source, ctypes.byref(held)) == 0 and one._use_count() == count + more)
    addresses = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions]
    return [word, sizes, undefined, id(Tensor), id(torch.nn.Parameter), *addresses]
