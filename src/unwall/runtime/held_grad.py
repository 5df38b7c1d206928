"""What ``param.grad`` shows while the engine holds the gradient.

[Note: what .grad shows]
Gradients leave ``.grad`` while backward runs, and lie in groups, on any tier, over ranks. When backward has ended, each
parameter with a gradient shows a ``HeldGrad``: a tensor of its shape, without memory, that hands every operation on to the
gradient where it lies. So ``clip_grad_norm_`` and ``clip_grad_value_`` of torch, ``GradScaler``, logging, and changes by hand
work as on a plain model; nothing is fetched, and nothing costs, where nobody looks. ``step`` and ``zero_grad`` take it away.

An operation is served in the cheapest way that gives the same result:
- a view is only noted down, and followed when something is done with it;
- a change of each element by itself (``ELEMENTWISE``, with numbers) is done to this rank's part, where it is;
- a norm is measured where the gradient is, and put together over the ranks, for all gradients at once;
- everything else gets the whole gradient on the parameter's device, and what it writes is put back.

Autograd itself adds to ``.grad`` in a further backward (from C++, not through Python): what it adds is noted as ``incoming``,
for ``Shown.take``.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from unwall.runtime.elements import shape_of
from unwall.runtime.gradients import GradientAccess
from unwall.runtime.places import Place

aten = torch.ops.aten

SCALING = {"aten::mul_", "aten::div_", "aten::neg_", "aten::zero_", "aten::_foreach_mul_", "aten::_foreach_div_"}
"""Changes that are the same with the loss scale still in."""
ELEMENTWISE = SCALING | {
    "aten::add_",
    "aten::sub_",
    "aten::fill_",
    "aten::clamp_",
    "aten::clamp_min_",
    "aten::clamp_max_",
    "aten::nan_to_num_",
    "aten::_foreach_clamp_min_",
    "aten::_foreach_clamp_max_",
    "aten::_foreach_zero_",
}
"""Changes of each element by itself, where all else that they are given is numbers."""

View = Callable[[torch.Tensor], torch.Tensor]


class _Calls(threading.local):
    """Whether Python, and not autograd, calls an operation."""

    from_python = False


_calls = _Calls()


class HeldGrad(torch.Tensor):
    """See [Note: what .grad shows]."""

    access: "weakref.ref[GradientAccess]"
    places: tuple[Place, ...]
    mark: object
    """Of the gradient that it was made for: ``marks`` has another one when that is gone."""
    marks: dict[tuple[Place, ...], object]
    views: tuple[View, ...]
    """How it comes from the whole gradient."""
    incoming: torch.Tensor | None
    """What autograd has added, until the engine takes it."""
    graph: bool
    """Whether it came with a graph of its own (``create_graph=True``), which is not kept."""

    @staticmethod
    def make(access: GradientAccess, places: tuple[Place, ...], marks: dict[Any, object]) -> "HeldGrad":
        """For the parameter that lies there: its shape, compute dtype and device."""
        layout = access.engine.groups[places[0].group].layout
        outline = torch.empty(shape_of(access.engine, places), dtype=layout.dtype, device="meta")
        made = _wrapper(outline, access.engine.device.device)
        made.access, made.places, made.marks, made.views = weakref.ref(access), places, marks, ()
        made.mark, made.incoming, made.graph = marks[places], None, False
        return made

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """fp16 gradients are read in fp32: without the loss scale they would be too small for fp16."""
        kept = _kept_dtype(self)
        return torch.float32 if kept is torch.float16 else kept

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """The gradient lies elsewhere: it is written there."""
        if value.shape != self.shape:
            raise RuntimeError(f".grad.data of shape {tuple(self.shape)} cannot become a tensor of shape {tuple(value.shape)}")
        with torch.no_grad():
            self.copy_(value)

    def open(self) -> GradientAccess:
        """What reads and changes it, ready for that."""
        access = self.access()
        if access is None:
            raise RuntimeError("the model that this gradient belongs to is gone: keep a copy with .grad.clone()")
        if self.marks.get(self.places) is not self.mark:
            raise RuntimeError(
                "this gradient is gone: step() has used it, or zero_grad() has cleared it. Read it before, or keep a copy with "
                ".grad.clone()"
            )
        access.look()
        return access

    def whole(self) -> torch.Tensor:
        """The values, in memory of their own."""
        return self.follow(self.open().whole(self.places))

    def follow(self, whole: torch.Tensor) -> torch.Tensor:
        for view in self.views:
            whole = view(whole)
        return whole

    def viewed(self, like: torch.Tensor, view: View | None) -> "HeldGrad":
        """A view of this one that looks ``like`` this."""
        made = _wrapper(like, self.device)
        made.access, made.places, made.marks, made.mark = self.access, self.places, self.marks, self.mark
        made.views = self.views if view is None else (*self.views, view)
        made.incoming, made.graph = None, self.graph and view is not None
        return made

    def tolist(self) -> Any:
        return self.whole().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.whole().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        values = self.whole().cpu().numpy()
        return values if dtype is None else values.astype(dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        access = self.access()
        if access is None or access.engine.ranks.size > 1 or self.marks.get(self.places) is not self.mark:
            return f"HeldGrad(shape={tuple(self.shape)}, dtype={self.dtype})"  # printing must not wait for another rank
        return repr(self.whole())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.grad:
            raise _without_graph()
        before, _calls.from_python = _calls.from_python, True
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        finally:
            _calls.from_python = before

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs, first = kwargs or {}, args[0] if args else None
        if isinstance(first, HeldGrad):
            if not _calls.from_python and torch._C._current_graph_task_id() != -1:
                if func is aten.add_.Tensor:
                    first.incoming = args[1] if first.incoming is None else first.incoming + args[1]
                    return first
                if func is aten.add.Tensor:  # with create_graph=True. It becomes .grad, where Shown.take finds it
                    first.incoming = args[1] if first.incoming is None else first.incoming + args[1]
                    return first.viewed(first, None)
            if func in (aten.detach.default, aten.alias.default, aten.detach_.default):
                return first if func is aten.detach_.default else first.viewed(first, None)
            if _is_view(func):
                return _view(first, func, args[1:], kwargs)
        return _serve(func, args, kwargs)


def _wrapper(like: torch.Tensor, device: torch.device) -> HeldGrad:
    """Looks ``like`` that, and is said to be on ``device``."""
    made: HeldGrad = torch.Tensor._make_wrapper_subclass(
        HeldGrad, like.shape, strides=like.stride(), dtype=_kept_dtype(like), device=device
    )
    return made


def _kept_dtype(tensor: torch.Tensor) -> torch.dtype:
    kept: torch.dtype = torch.Tensor.dtype.__get__(tensor)  # type: ignore[attr-defined]
    return kept


def _is_view(func: Any) -> bool:
    given = func._schema.arguments[0].alias_info if func._schema.arguments else None
    gives = func._schema.returns[0].alias_info if func._schema.returns else None
    return given is not None and gives is not None and not given.is_write and not gives.is_write


def _view(held: HeldGrad, func: Any, rest: Any, kwargs: Any) -> Any:
    """Notes a view down. What it looks like is found out without values."""
    outline = torch.empty_strided(held.shape, held.stride(), dtype=_kept_dtype(held), device="meta")
    like = func(outline, *rest, **kwargs)
    if isinstance(like, torch.Tensor):
        return held.viewed(like, _Step(func, rest, kwargs))
    return [held.viewed(one, _Step(func, rest, kwargs, number)) for number, one in enumerate(like)]


class _Step:
    """One view, to be taken again of real values."""

    def __init__(self, func: Any, rest: Any, kwargs: Any, number: int | None = None) -> None:
        self._func, self._rest, self._kwargs, self._number = func, rest, kwargs, number

    def __call__(self, whole: torch.Tensor) -> torch.Tensor:
        found = self._func(whole, *self._rest, **self._kwargs)
        taken: torch.Tensor = found if self._number is None else found[self._number]
        return taken


def _without_graph() -> RuntimeError:
    return RuntimeError(
        "backward(create_graph=True) keeps no graph of the gradients that sharded parameters show in .grad, so nothing can be "
        "derived from them. Write grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True) and use "
        "those; for their values alone .grad.detach()"
    )


def _serve(func: Any, args: Any, kwargs: Any) -> Any:
    name = func._schema.name
    if torch.is_grad_enabled() and any(held.graph for held in _held([*args, *kwargs.values()])) and not func._schema.is_mutable:
        raise _without_graph()
    if name == "aten::_amp_foreach_non_finite_check_and_unscale_":
        return _unscale(*args)
    first = list(_held(args[0])) if args else []
    rest = [*args[1:], *kwargs.values()]
    alone = bool(first) and not any(held.views for held in first) and not any(map(_is_large, rest))
    if alone and name in ELEMENTWISE and "rounding_mode" not in kwargs:
        return _change_each(func, name, args, kwargs, first)
    if alone and name in ("aten::linalg_vector_norm", "aten::_foreach_norm") and not kwargs and len(args) <= 2:
        order = float(args[1]) if len(args) > 1 else 2.0
        if order > 0:
            norms = [held.open().norm(held.places, order).to(held.device) for held in first]
            return norms[0] if isinstance(args[0], HeldGrad) else norms
    return _with_whole(func, args, kwargs)


def _change_each(func: Any, name: str, args: Any, kwargs: Any, helds: list[HeldGrad]) -> Any:
    """See ``ELEMENTWISE``."""
    numbers = [arg for arg in args[1:] if isinstance(arg, torch.Tensor)]
    accesses = [held.open() for held in helds]
    given = args[0] if isinstance(args[0], HeldGrad) else None  # of a list nothing is given back
    if name not in SCALING and any(access.engine.loss_scale != 1.0 for access in accesses):
        return _with_whole(func, args, kwargs)
    if "mul_" in name and len(args) > 1 and _is_one(args[1], accesses):
        return given  # torch clips by multiplying with 1, too: nothing is changed, and what ran ahead still holds
    for held, access in zip(helds, accesses, strict=True):
        for part in access.change(held.places):
            rest = [arg.to(part.device) if any(arg is number for number in numbers) else arg for arg in args[1:]]
            func([part] if given is None else part, *rest, **kwargs)
    return given


def _is_one(factor: Any, accesses: list[GradientAccess]) -> bool:
    """Whether that is known without waiting for an accelerator that changes gradients in its own order."""
    if isinstance(factor, torch.Tensor):
        homes = {group.home.tier for access in accesses for group in access.engine.groups}
        return factor.numel() == 1 and (not factor.is_cuda or homes == {"host"}) and float(factor) == 1.0
    return isinstance(factor, int | float) and factor == 1


def _with_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """Every gradient whole, on its parameter's device; what was written is put back."""
    wholes: dict[tuple[Place, ...], torch.Tensor] = {}
    reals: list[tuple[HeldGrad, torch.Tensor]] = []

    def real(held: HeldGrad) -> torch.Tensor:
        if held.places not in wholes:
            wholes[held.places] = held.open().whole(held.places)
        reals.append((held, held.follow(wholes[held.places])))
        return reals[-1][1]

    result = func(*_replace(args, real), **_replace(kwargs, real))
    if func.namespace == "c10d" and func._opname != "send":  # their schemas do not say that they write to what comes first
        for work in result if isinstance(result, tuple) else [result]:
            if isinstance(work, torch.ScriptObject):
                work.wait()  # type: ignore[attr-defined]
        for held in _held(args[0]):
            held.open().put(held.places, wholes[held.places])
    for argument, given in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for held in _held(given):
                held.open().put(held.places, wholes[held.places])
    for argument in func._schema.arguments[len(args) :]:
        if argument.alias_info is not None and argument.alias_info.is_write:
            for held in _held(kwargs.get(argument.name)):
                held.open().put(held.places, wholes[held.places])
    return _replace(result, lambda value: next((held for held, real in reals if real is value), value), torch.Tensor)


def _unscale(grads: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """``torch.amp.GradScaler``: the scale is not taken out here, where fp16 would lose small values, but in ``step``."""
    by_engine: dict[int, list[HeldGrad]] = {}
    for held in _held(grads):
        by_engine.setdefault(id(held.access()), []).append(held)
    for helds in by_engine.values():
        access = helds[0].open()
        if access.not_finite(held.places for held in helds):
            found_inf.fill_(1.0)
        if float(inv_scale) != 1.0:
            access.take_scale_out(1.0 / float(inv_scale))
    others = [grad for grad in grads if not isinstance(grad, HeldGrad)]
    if others:
        torch._amp_foreach_non_finite_check_and_unscale_(others, found_inf, inv_scale)


def _held(value: Any) -> Iterator[HeldGrad]:
    if isinstance(value, HeldGrad):
        yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _held(entry)


def _is_large(value: Any) -> bool:
    """Not a number, nor a tensor that stands for one."""
    return value.dim() > 0 if isinstance(value, torch.Tensor) else isinstance(value, list | tuple)


def _replace(value: Any, by: Callable[[Any], Any], kind: type = HeldGrad) -> Any:
    if isinstance(value, kind):
        return by(value)
    if isinstance(value, list | tuple):
        return type(value)(_replace(entry, by, kind) for entry in value)
    if isinstance(value, dict):
        return {key: _replace(entry, by, kind) for key, entry in value.items()}
    return value
