"""Pretended devices: tensors that lie on `meta:0` or `meta:1` for every caller, and compute here.

A machine without accelerators can then check that all tensors of an operation lie on one device, as
CUDA does, and count transfers to the host. The data of a pretended tensor is an ordinary one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

FIRST, SECOND = torch.device("meta:0"), torch.device("meta:1")
INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
HOST = torch.device("cpu")


class Pretended(Tensor):
    """A tensor on a pretended device; `data_here` holds its values."""

    data_here: Tensor
    lacks_float64 = False  # as Apple's GPUs do

    @staticmethod
    def __new__(cls, data: Tensor, device: torch.device) -> Pretended:
        made: Any = Tensor._make_wrapper_subclass(
            cls,
            data.shape,
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=device,
        )
        made.data_here = data
        found: Pretended = made
        return found

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Pretended({self.data_here!r}, {self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {}, Counter())


class PretendDevices(TorchDispatchMode):
    """Runs operations of pretended tensors; counts reads by the host and transfers, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.transfers = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {}, self.transfers)


class _Constructors(TorchFunctionMode):
    """Makes tensors of Python values here first: torch drops the values for the meta device."""

    def __init__(self, transfers: Counter[str]) -> None:
        super().__init__()
        self.transfers = transfers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.tolist and isinstance(args[0], Pretended):
            self.transfers["tolist"] += 1
            return args[0].data_here.tolist()
        if func not in (torch.tensor, torch.as_tensor, Tensor.new_tensor):
            return func(*args, **kwargs)
        own = args[0].device if func is Tensor.new_tensor else HOST
        device = torch.device(kwargs.get("device") or own)
        if device.type != "meta" or isinstance(args[0] if own == HOST else args[1], Tensor):
            return func(*args, **kwargs)
        if func is Tensor.new_tensor:
            kwargs = {"dtype": args[0].dtype, **kwargs}
            args = args[1:]
        return torch.tensor(*args, **{**kwargs, "device": HOST}).to(device)


@contextmanager
def pretend_devices() -> Iterator[PretendDevices]:
    with PretendDevices() as mode, _Constructors(mode.transfers):
        yield mode


def put(module: nn.Module, device: torch.device) -> nn.Module:
    """Put the parameters and buffers of a module on a pretended device, in place."""
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                moved = Pretended(weight.data, device)
                part._parameters[name] = nn.Parameter(moved, requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = Pretended(buffer, device)
    return module


def read_back(value: Any) -> Any:
    """A value with ordinary tensors."""
    return tree_map(_unwrap, value)


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any], transfers: Counter[str]) -> Any:
    name = func._schema.name
    given = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
    own = [one for one in given if isinstance(one, Pretended)]
    wanted = kwargs.get("device")
    if name == "aten::_local_scalar_dense":
        transfers[name] += 1
        return func(*tree_map(_unwrap, args), **tree_map(_unwrap, kwargs))
    is_copy = name in ("aten::_to_copy", "aten::copy_")
    devices = {one.device for one in own}
    plain = [one for one in given if not isinstance(one, Pretended) and one.dim() > 0]
    if not is_copy and (len(devices) > 1 or (devices and plain)):
        is_indexed = name in INDEXING and all(
            one.dtype in (torch.int64, torch.bool) for one in plain
        )
        if len(devices) > 1 or not is_indexed:
            where = sorted({str(one.device) for one in given if one.dim() > 0 or one in own})
            raise RuntimeError(f"{name}: tensors on several devices, {where}")
    if name == "aten::copy_":
        target = args[0].device
    elif wanted is not None:
        target = torch.device(wanted)
    else:
        target = next(iter(devices), HOST)
    if is_copy and own and target.type == "cpu":
        transfers[name] += 1
    if wanted is not None:
        kwargs = {**kwargs, "device": HOST}
    result = func(*tree_map(_unwrap, args), **tree_map(_unwrap, kwargs))
    if target.type != "meta":
        return result
    target = FIRST if target.index is None else target
    by_data = {id(one.data_here): one for one in own}

    def wrap(one: Any) -> Any:
        if not isinstance(one, Tensor) or isinstance(one, Pretended):
            return one
        return by_data[id(one)] if id(one) in by_data else Pretended(one, target)

    return tree_map(wrap, result)


def _unwrap(one: Any) -> Any:
    return one.data_here if isinstance(one, Pretended) else one
