"""Building a model that never exists whole.

[Note: paging]
Constructors and initialisers run unchanged, operation by operation. A dispatch mode watches them: the storage of a parameter
that was not touched lately is taken out (this rank keeps its 1/N on host or disk) and brought back when an operation needs it,
also one that comes much later, as when transformers rewrites all weights after construction. What identifies a parameter is
its storage object, so views and ``.data`` work like the parameter itself. Every rank runs the same operations, so every rank
pages the same parameters in the same order; the ranks check that by a few words for each page. Where they have drawn other
values for it, rank 0's count.
"""

import ctypes
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unwall.runtime.page import Page, waiting
from unwall.runtime.shelf import Shelf
from unwall.shards.collectives import Ranks
from unwall.shards.local import local

RESIDENT_BYTES = 4 << 20
"""How much may stay in memory of what was touched last (two parameters may, however large)."""
TRIM_BYTES = 8 << 20
_aten = torch.ops.aten
_OVERWRITES = {
    _aten.normal_.default, _aten.uniform_.default, _aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor,
    _aten.copy_.default,
}  # fmt: skip
"""What writes all of its first argument, and reads nothing of it. See [Note: nothing to move] in
runtime/page.py."""

_active = False


class Pager(TorchDispatchMode):
    """See [Note: paging]."""

    def __init__(self, ranks: Ranks, shelf: Shelf | None = None) -> None:
        super().__init__()
        self._ranks = ranks
        self._shelf = Shelf() if shelf is None else shelf
        self._known: dict[int, Page] = {}
        self._resident: OrderedDict[int, Page] = OrderedDict()  # least lately touched first
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._paging = False  # our own copies are operations, too
        self._out_bytes = 0
        self._count = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """Pages every parameter that is registered inside."""
        global _active
        handle = register_module_parameter_registration_hook(self._registered)
        _active = True
        try:
            with self:
                yield
            self._follow_moves()
            self._shrink(0, 0)
            self._paging = True
            self._seal()
        except BaseException:
            for page in self._known.values():
                if page.is_out:  # nothing must read a storage without memory
                    page.seal()
            raise
        finally:
            _active = False
            handle.remove()

    def _seal(self) -> None:
        """The model is built."""
        viewed = {
            buffer.untyped_storage()._cdata
            for module in self._modules
            for buffer in module._buffers.values()
            if buffer is not None
        }
        for page in self._known.values():
            if page.key in viewed or not page.seal():
                page.bring_back()

    def _registered(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        self._modules.add(module)
        if param is None or param.is_meta or param.numel() == 0 or param in waiting:
            return
        key = param.untyped_storage()._cdata
        if key in self._known:
            self._known[key].add(param)
            return
        if not param.untyped_storage().resizable():  # memory of a file: a copy can be taken out and brought back
            param.data = param.data.clone(memory_format=torch.contiguous_format)
            key = param.untyped_storage()._cdata
        if param.is_contiguous() and param.untyped_storage().nbytes() == param.numel() * param.element_size():
            self._count += 1
            page = Page(param, self._ranks, self._shelf, self._count, f"{type(module).__name__}.{name}")
            self._known[key] = self._resident[key] = page
            self._shrink(RESIDENT_BYTES, 2)

    def _follow_moves(self) -> None:
        """``param.data = ...`` is no operation and shows nowhere: parameters with another storage get a page of that."""
        for page in list(self._known.values()):
            for param in page.moved_away():
                self._registered(self._owner(param), "", param)

    def _owner(self, param: nn.Parameter) -> nn.Module:
        found = (module for module in self._modules if any(own is param for own in module._parameters.values()))
        return next(found, nn.Module())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paging:
            return func(*args, **kwargs)
        touched = []
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                page = self._known.get(leaf.untyped_storage()._cdata)
                if page is not None:
                    touched.append(page)
        if not touched:
            return func(*args, **kwargs)
        unread = _overwritten(func, args, touched)
        unread = None if unread is None or unread.key in self._resident else unread
        for page in touched:
            if page.key not in self._resident:
                page.make_room() if page is unread else page.bring_back()
                self._resident[page.key] = page
            self._resident.move_to_end(page.key)
        try:
            result = func(*args, **kwargs)
        except BaseException:
            if unread is not None:
                unread.bring_back()
            raise
        if unread is not None:
            unread.forget()
        self._shrink(RESIDENT_BYTES, max(2, len(touched)))
        return result

    def _trim(self) -> None:
        """glibc keeps freed blocks of a parameter's size for itself; with many of them that would be the model again."""
        self._out_bytes = 0
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL("libc.so.6").malloc_trim(0)

    def _shrink(self, limit_bytes: int, keep: int) -> None:
        total = sum(page.nbytes for page in self._resident.values())
        moved: list[nn.Parameter] = []
        self._paging = True
        try:
            while len(self._resident) > keep and total > limit_bytes:
                _, page = self._resident.popitem(last=False)
                moved += page.moved_away()
                page.out()
                total -= page.nbytes
                self._out_bytes += page.nbytes if page.gave_back else 0
                if self._out_bytes > TRIM_BYTES:
                    self._trim()
        finally:
            self._paging = False
        for param in moved:  # given other data since: that is paged from now on
            self._registered(self._owner(param), "", param)


def _overwritten(func: Any, args: Any, touched: list[Page]) -> Page | None:
    """The page that an operation writes all of and reads nothing of, if there is one."""
    if func not in _OVERWRITES or not isinstance(args[0], torch.Tensor) or not args[0].is_contiguous():
        return None
    target, page = args[0], touched[0]  # the first of its arguments, if that is paged at all
    if target.untyped_storage()._cdata != page.key or target.numel() * target.element_size() != page.nbytes:
        return None
    return page if all(other is not page for other in touched[1:]) else None


def building() -> bool:
    """Whether this is inside ``unwall.init``."""
    return _active


def is_paged(param: nn.Parameter) -> bool:
    """Whether its value waits here for ``shard``."""
    return param in waiting


def paged_bytes(model: nn.Module) -> int:
    """Host memory of this rank that ``shard`` gives back as it takes the values of a model from here."""
    pages = {id(found[0]): found[0] for found in (waiting.get(param) for param in model.parameters()) if found is not None}
    return sum(page.host_bytes for page in pages.values())


def whole_value(param: nn.Parameter) -> torch.Tensor | None:
    """What ``shard`` starts from: the value from ``init``, the parameter itself, or None for a meta parameter."""
    found = waiting.pop(param, None)
    if found is not None:
        page, like = found
        value = page.value(like)
        assert isinstance(value, torch.Tensor)
        return value
    return None if param.is_meta else local(param.data)
