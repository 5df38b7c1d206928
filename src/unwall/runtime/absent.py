"""What a parameter is while no pass shows it: a class that sees every read and every write.

[Note: absent parameters]
In a pass a parameter of a resident group is a plain ``nn.Parameter`` (a ``Near``, which tells of writes), a view of the flat
buffer in the compute dtype. At all other times its class is ``Absent``, whether its group is on the device or not. Torch then
hands every function of it to ``__torch_function__``, and that decides:

- what asks about the object (gradient, hooks, shape, device) is answered by the object;
- what asks about its values as a description (dtype, strides, ``zeros_like``) is answered by a stand-in without memory;
- in a pass (``self.parameters()`` in a forward) the group is made resident, and the parameter is plain from then on;
- everything else gets the whole value instead, in full precision and in the dtype the parameter was given in. What is written
  there, at once or later through a view, goes to the master (runtime/outside.py).

The object, its id, its autograd node and its hooks stay: only ``__class__`` changes. Nothing of this is in the way of what runs
in a pass.
"""

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from unwall.runtime.refusals import refuse_reader
from unwall.runtime.tensor_functions import (
    DESCRIBED,
    GET_DTYPE,
    IN_PLACE_OPERATORS,
    LIKE_ANOTHER,
    OBJECT,
    POINTERS,
    PRODUCTS,
    SHAPED,
)
from unwall.shards.local import distributed_like, is_distributed, local

T = torch.Tensor


class Value(Protocol):
    """A whole value that is lent."""

    tensor: torch.Tensor

    def handed_out(self, result: torch.Tensor, counter: bool = False) -> None:
        """The user has got a tensor that shares its memory, and has a version counter of its own or not."""

    def keep(self) -> None:
        """The user has got something else that shares its memory (an address, an array)."""


class Keeper(Protocol):
    """Who knows the values of absent parameters."""

    @property
    def running(self) -> bool:
        """Whether a pass runs."""

    def bring(self, param: nn.Parameter) -> None:
        """In a pass: the parameter is plain from now on."""

    def read_data(self, param: nn.Parameter, data: torch.Tensor) -> None:
        """In a pass: ``param.data`` was read."""

    def about_to_write(self, param: nn.Parameter) -> None:
        """In a pass: a method of the parameter changes it in place."""

    def is_tiled(self, param: nn.Parameter) -> bool:
        """Whether it is never whole on the device."""

    def in_tiles(self, func: Any, args: Any, kwargs: Any) -> Any:
        """In a pass: a function of a parameter that lies in tiles."""

    def lend(self, param: nn.Parameter) -> Value:
        """Outside: its whole value."""

    def put(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Outside: ``param.data = value``."""

    def dtype_of(self, param: nn.Parameter) -> torch.dtype:
        """What it was given in."""

    def in_compute_dtype(self, param: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
        """The whole value as a pass would show it."""


_keepers = WeakIdKeyDictionary()  # parameter -> weak reference to its keeper


def keep(param: nn.Parameter, keeper: Keeper) -> None:
    """From now on ``keeper`` is asked when the parameter is read while it is absent."""
    _keepers[param] = weakref.ref(keeper)


def keeper_of(param: nn.Parameter) -> Keeper | None:
    found = _keepers.get(param)
    keeper: Keeper | None = found() if found is not None else None
    if keeper is None:
        if is_absent(param):
            _refuse_lost(param)
        param.__class__ = _ABSENT.get(type(param), type(param))
    return keeper


def _refuse_lost(param: nn.Parameter) -> None:
    """Its model is gone. Unless it was a view of a buffer that stays, so are its values: there is one NaN for all elements."""
    with torch._C.DisableTorchFunctionSubclass():
        part = local(param)
        lost = part.numel() > 0 and part.untyped_storage().nbytes() <= part.itemsize
        shape = tuple(param.shape)
    if lost:
        raise RuntimeError(
            f"a parameter of shape {shape} outlives the sharded model that it belonged to, and its values went with the model: "
            "keep the model, or take parameter.detach().clone() before"
        )


class Absent(nn.Parameter):
    """The class of a parameter that no pass shows now. See [Note: absent parameters]."""

    knows_chunk_by_chunk = True
    """See nn/linear_cross_entropy.py."""

    def __new__(cls, *args: Any, **kwargs: Any) -> nn.Parameter:  # type: ignore[misc]
        """Code that builds another parameter of the same type gets a plain one."""
        return nn.Parameter(*args, **kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in OBJECT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        refuse_reader(caller)
        if caller == nn.Parameter.__module__ and func is T.detach:
            raise RuntimeError(
                "nn.Parameter(p) of a sharded parameter: a new parameter cannot share its memory. Write "
                "nn.Parameter(p.detach().clone()), and apply weight_norm and the like before unwall.shard"
            )
        return _call(func, args, kwargs)

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> Any:
        """unwall takes gradients out of ``.grad`` in such a hook, which must stay the last one."""
        with torch._C.DisableTorchFunctionSubclass():
            handle = super().register_post_accumulate_grad_hook(hook)
            hooks = self._post_accumulate_grad_hooks
            for key in [key for key, known in hooks.items() if getattr(known, "comes_last", False)]:
                hooks[key] = hooks.pop(key)
        return handle

    @property
    def data(self) -> torch.Tensor:
        refuse_reader(sys._getframe(1).f_globals.get("__name__", ""))
        keeper = keeper_of(self)
        if keeper is not None and keeper.running:
            keeper.bring(self)
        if keeper is None or not is_absent(self):
            return T.data.__get__(self)  # type: ignore[attr-defined, no-any-return]
        value = keeper.lend(self)
        result = value.tensor.data
        value.handed_out(result, counter=True)
        return result

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        keeper = keeper_of(self)
        if keeper is not None and keeper.running:
            keeper.bring(self)
        if keeper is None or not is_absent(self):
            T.data.__set__(self, value)  # type: ignore[attr-defined]
        else:
            keeper.put(self, value)

    def set_(self, *args: Any, **kwargs: Any) -> nn.Parameter:
        """Another memory, as ``data = tensor`` gives it (``parametrize`` does it). torch would ask nobody."""
        keeper = keeper_of(self)
        if keeper is not None and keeper.running:
            keeper.bring(self)
        if keeper is None or not is_absent(self):
            T.set_(self, *args, **kwargs)
        else:
            whole = len(args) == 1 and isinstance(args[0], T)
            keeper.put(self, args[0].detach() if whole else torch.empty(0, dtype=_dtype(self)).set_(*args, **kwargs))
        return self


_ABSENT: dict[type, type] = {Absent: nn.Parameter}
"""The classes of absent parameters, and what they are of otherwise."""


def is_absent(value: Any) -> bool:
    """Whether it is a parameter that no pass shows now."""
    return type(value) in _ABSENT


def plain_class_of(param: nn.Parameter) -> type:
    """What an absent parameter's class is otherwise."""
    return _ABSENT[type(param)]


def absent_class_of(param: nn.Parameter) -> type[nn.Parameter]:
    """What a parameter's class is while no pass shows it."""
    return _absent_dtensor() if is_distributed(param) else Absent


@functools.cache
def _absent_dtensor() -> Any:
    """``Absent`` for parameters that tensor parallelism has spread. Made where there are any: see ``is_distributed``."""
    from torch.distributed.tensor import DTensor

    def asking(method: Any) -> Any:
        """DTensor's own methods read the local part past torch's functions."""
        return functools.wraps(method)(lambda self, *args, **kwargs: _call(method, (self, *args), kwargs))

    own = ("to_local", "full_tensor", "redistribute", "__repr__")
    members: dict[str, Any] = {name: asking(getattr(DTensor, name)) for name in own}
    members |= {name: Absent.__dict__[name] for name in ("__torch_function__", "data", "set_")}
    made = type("AbsentDTensor", (DTensor,), {"__slots__": (), "__doc__": Absent.__doc__, **members})
    _ABSENT[made] = DTensor
    return made


_describing = threading.local()


def describe_only(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """``module._save_to_state_dict``: what it detaches of absent parameters are stand-ins. Whole values take their place."""
    before = getattr(_describing, "now", False)
    _describing.now = True
    try:
        type(module)._save_to_state_dict(module, *args, **kwargs)
    finally:
        _describing.now = before


class _Bring(torch.autograd.Function):
    """The whole value as a function of the parameter: gradients find the way back."""

    @staticmethod
    def forward(ctx: Any, param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # noqa: ARG004
        return grad, None


def _dtype(param: nn.Parameter) -> torch.dtype:
    """In a pass what it computes in, otherwise what it was given in."""
    keeper = keeper_of(param)
    if keeper is not None and not keeper.running:
        return keeper.dtype_of(param)
    with torch._C.DisableTorchFunctionSubclass():
        return param.dtype


def _described(param: nn.Parameter, shaped: bool) -> torch.Tensor:
    """A tensor without memory of its own that looks as the parameter does."""
    dtype = _dtype(param)
    with torch._C.DisableTorchFunctionSubclass():
        if shaped:
            return torch.empty(param.shape, dtype=dtype, device="meta")
        return distributed_like(param, torch.empty((), dtype=dtype, device=param.device).expand(local(param).shape))


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    """A function of absent parameters, among other things."""
    if func == GET_DTYPE:
        return _dtype(args[0])
    if func in SHAPED or func in DESCRIBED or (func is T.detach and getattr(_describing, "now", False)):
        shaped = func in SHAPED
        args, kwargs = tree_map_only(is_absent, lambda param: _described(param, shaped), (args, kwargs))
        return func(*args, **kwargs)
    if func in LIKE_ANOTHER:
        rest, kwargs = tree_map_only(is_absent, lambda param: _described(param, shaped=False), (args[1:], kwargs))
        args = (args[0], *rest)
    found = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if is_absent(leaf)}
    lent: dict[int, tuple[nn.Parameter, Value]] = {}
    used: list[torch.Tensor] = []  # so that one value is not taken back when the next one is lent
    for param in found.values():
        keeper = keeper_of(param)
        if keeper is not None and keeper.running:
            if keeper.is_tiled(param):
                return keeper.in_tiles(func, args, kwargs)
            keeper.bring(param)
        elif keeper is not None:
            lent[id(param)] = param, keeper.lend(param)
            used.append(lent[id(param)][1].tensor.detach())
    if not lent:
        return func(*args, **kwargs)
    _refuse_leaf_in_place(func, args, lent)
    return _with_values(func, args, kwargs, lent)


def _with_values(func: Any, args: Any, kwargs: Any, lent: dict[int, tuple[nn.Parameter, Value]]) -> Any:
    """Calls with whole values in the place of the parameters, and notes what the result shares with them."""
    given: dict[int, torch.Tensor] = {}
    narrow = func in PRODUCTS and _compute_dtypes(args, kwargs)
    link = torch.is_grad_enabled() and func is not T.detach
    for key, (param, value) in lent.items():
        tensor = value.tensor
        if narrow:
            keeper = keeper_of(param)
            assert keeper is not None
            tensor = keeper.in_compute_dtype(param, tensor)
        with torch._C.DisableTorchFunctionSubclass():
            given[key] = _Bring.apply(param, tensor) if link and param.requires_grad else tensor
    args, kwargs = tree_map_only(is_absent, lambda param: given.get(id(param), param), (args, kwargs))
    result = func(*args, **kwargs)
    back: dict[int, nn.Parameter] = {id(given[key]): param for key, (param, _) in lent.items()}
    if func in POINTERS:
        for _, value in lent.values():
            value.keep()

    def returned(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in back:
            return back[id(tensor)]
        for _, value in lent.values():
            if shares(tensor, value.tensor):
                value.handed_out(tensor)
        return tensor

    return tree_map_only(torch.Tensor, returned, result) if not isinstance(result, (int, float, bool, str)) else result


def shares(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie in the same storage."""
    if tensor.layout is not torch.strided or is_absent(tensor):
        return False
    return bool(local(tensor).untyped_storage()._cdata == local(other).untyped_storage()._cdata)


def _compute_dtypes(args: Any, kwargs: Any) -> bool:
    """Whether another operand is in a narrow dtype."""
    return any(
        isinstance(leaf, torch.Tensor) and not is_absent(leaf) and leaf.dtype in (torch.bfloat16, torch.float16)
        for leaf in tree_leaves((args, kwargs))
    )


def _refuse_leaf_in_place(func: Callable[..., Any], args: Any, lent: dict[int, tuple[nn.Parameter, Value]]) -> None:
    """What autograd says of leaves. It sees the whole value, which is none."""
    name = getattr(func, "__name__", "")
    in_place = name in IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))
    module = getattr(func, "__module__", None)
    if not in_place or module == "torch.nn.init" or not torch.is_grad_enabled() or not args:
        return
    targets = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
    for target in targets:
        if id(target) in lent and lent[id(target)][0].requires_grad:
            raise RuntimeError(
                "a leaf Variable that requires grad is being used in an in-place operation. (use torch.no_grad())"
            )
