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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from unwall.native.memory import HostMemory
from unwall.runtime.load_check import digest_of
from unwall.shards.collectives import Ranks
from unwall.shards.control import DivergedError
from unwall.shards.local import local
from unwall.tiers.disk import DiskTier
from unwall.tiers.sizes import align_up

RESIDENT_BYTES = 4 << 20
"""How much may stay in memory of what was touched last (two parameters may, however large)."""
TRIM_BYTES = 8 << 20

_active = False
_pages = WeakIdKeyDictionary()  # parameter -> Page, once its model was built


class Shelf:
    """Where the parts that were taken out wait: in host memory up to ``limit_bytes``, beyond that on disk."""

    def __init__(self, directories: Sequence[Path] = (), limit_bytes: int | None = None, rank: int = 0) -> None:
        self._directories = directories
        self._limit_bytes = limit_bytes
        self._rank = rank
        self._held_bytes = 0
        self._disk: DiskTier | None = None

    def put(self, part: torch.Tensor) -> "torch.Tensor | Shelved":
        if self._limit_bytes is None or not self._directories or self._held_bytes + part.nbytes <= self._limit_bytes:
            self._held_bytes += part.nbytes
            weakref.finalize(part, self._forget, part.nbytes).atexit = False
            return part
        if self._disk is None:
            self._disk = DiskTier(self._directories, rank=self._rank)
        return Shelved(part, self._disk)

    def _forget(self, nbytes: int) -> None:
        self._held_bytes -= nbytes


class Shelved:
    """Bytes that went to disk."""

    def __init__(self, part: torch.Tensor, disk: DiskTier) -> None:
        self._disk = disk
        self._block = disk.allocate(part.nbytes, "a parameter under construction")
        memory = self._memory()
        memory.copy_(part)
        for ticket in disk.write(self._block, 0, memory.data_ptr(), part.nbytes, keep=memory):
            ticket.wait()
        weakref.finalize(self, disk.free, self._block).atexit = False

    def get(self) -> torch.Tensor:
        memory = self._memory()
        for ticket in self._disk.read(self._block, 0, memory.data_ptr(), self._block.nbytes, keep=memory):
            ticket.wait()
        return memory

    def _memory(self) -> torch.Tensor:
        """Page-aligned, with room for whole sectors."""
        memory = HostMemory(align_up(self._block.nbytes))
        return torch.frombuffer(memory.buffer(), dtype=torch.uint8)[: self._block.nbytes]


class Page:
    """The storage of a parameter under construction (or of several that share it), or this rank's part of its bytes."""

    def __init__(self, param: nn.Parameter, ranks: Ranks, shelf: Shelf, number: int = 0, name: str = "") -> None:
        self._params = [weakref.ref(param)]
        self._storage = param.untyped_storage()
        self._number = number
        self._name = name
        self.key = self._storage._cdata
        self.nbytes = self._storage.nbytes()
        self._ranks = ranks
        self._shelf = shelf
        self._part: torch.Tensor | Shelved | None = None

    def add(self, param: nn.Parameter) -> None:
        """Another parameter lies in the same storage (``Parameter(weight.data)``)."""
        if all(known() is not param for known in self._params):
            self._params.append(weakref.ref(param))

    @property
    def host_bytes(self) -> int:
        """What its part takes of the host's memory."""
        return self._part.nbytes if isinstance(self._part, torch.Tensor) else 0

    @property
    def is_out(self) -> bool:
        return self._part is not None

    def out(self) -> None:
        """Puts this rank's part on the shelf and gives the storage's memory back. All ranks do it together."""
        part_bytes = -(-self.nbytes // self._ranks.size)
        low = min(self._ranks.rank * part_bytes, self.nbytes)
        high = min(low + part_bytes, self.nbytes)
        whole = torch.empty(0, dtype=torch.uint8, device=self._storage.device).set_(self._storage)
        if self._ranks.size > 1:
            digests = self._meet(0, digest_of(whole))
            if any(digest != digests[0] for digest in digests):
                whole = self._from_rank_0(whole)
        part = torch.zeros(part_bytes, dtype=torch.uint8)
        part[: high - low] = whole[low:high]
        self._part = self._shelf.put(part)
        self._storage.resize_(0)

    def bring_back(self) -> None:
        """Gives the storage its memory and its bytes again."""
        assert self._part is not None
        whole = self._gather()
        self._storage.resize_(self.nbytes)
        torch.empty(0, dtype=torch.uint8, device=self._storage.device).set_(self._storage).copy_(whole)
        self._part = None

    def value(self, like: "Geometry") -> torch.Tensor:
        """A whole parameter, on the host, as it was initialised."""
        return self._gather().view(like.dtype).as_strided(like.shape, like.stride, like.offset)

    def _gather(self) -> torch.Tensor:
        assert self._part is not None
        part = self._part.get() if isinstance(self._part, Shelved) else self._part
        if self._ranks.size == 1:
            return part
        self._meet(1, 0)
        whole = torch.empty(part.numel() * self._ranks.size, dtype=torch.uint8)
        self._ranks.all_gather_on_host(whole, part)
        return whole[: self.nbytes]

    def _meet(self, what: int, digest: int) -> list[int]:
        """Every rank's digest. DivergedError where another rank is at another page."""
        mine = [what, self._number, self.nbytes, digest]
        rows = self._ranks.control.exchange("a page", mine, f"building {self._name} inside unwall.init")
        for rank, row in enumerate(rows):
            if row[:3] != mine[:3]:
                raise DivergedError(
                    f"inside unwall.init, rank {self._ranks.rank} is at parameter {self._number} ({self._name}, {self.nbytes} "
                    f"bytes) and rank {rank} at parameter {row[1]} ({row[2]} bytes): all ranks build the same model, and write "
                    "its parameters in the same order. Load into it on every rank, or after unwall.shard"
                )
        return [row[3] for row in rows]

    def _from_rank_0(self, whole: torch.Tensor) -> torch.Tensor:
        """The ranks drew other values."""
        every = self._ranks.broadcast_object(whole.cpu() if self._ranks.rank == 0 else None)
        assert isinstance(every, torch.Tensor)
        return every

    def holds(self, param: nn.Parameter) -> bool:
        """Whether a parameter still lies here: ``param.data = ...`` gives it another storage."""
        return bool(param.untyped_storage()._cdata == self.key)

    def moved_away(self) -> list[nn.Parameter]:
        """Parameters that were given another storage since. They do not belong here any more."""
        alive = [param for param in (known() for known in self._params) if param is not None]
        gone = [param for param in alive if not self.holds(param)]
        self._params = [weakref.ref(param) for param in alive if self.holds(param)]
        return gone

    def seal(self) -> bool:
        """The model is built: its parameters show NaN until ``shard`` takes their values from here. False where no parameter
        is left: then whatever else uses the storage needs its bytes."""
        alive = [param for param in (known() for known in self._params) if param is not None]
        for param in alive:
            like = Geometry(param.shape, param.stride(), int(param.storage_offset()), param.dtype)
            fill = float("nan") if like.dtype.is_floating_point else 0
            param.data = torch.full((), fill, dtype=like.dtype, device=self._storage.device).expand(like.shape)
            _pages[param] = (self, like)
        return bool(alive)


class Geometry(NamedTuple):
    """Where a parameter lies in its storage."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


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
        if param is None or param.is_meta or param.numel() == 0 or param in _pages:
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
        for page in touched:
            if page.key not in self._resident:
                page.bring_back()
                self._resident[page.key] = page
            self._resident.move_to_end(page.key)
        result = func(*args, **kwargs)
        if touched:
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
                self._out_bytes += page.nbytes
                if self._out_bytes > TRIM_BYTES:
                    self._trim()
        finally:
            self._paging = False
        for param in moved:  # given other data since: that is paged from now on
            self._registered(self._owner(param), "", param)


def building() -> bool:
    """Whether this is inside ``unwall.init``."""
    return _active


def is_paged(param: nn.Parameter) -> bool:
    """Whether its value waits here for ``shard``."""
    return param in _pages


def paged_bytes(model: nn.Module) -> int:
    """Host memory of this rank that ``shard`` gives back as it takes the values of a model from here."""
    pages = {id(found[0]): found[0] for found in (_pages.get(param) for param in model.parameters()) if found is not None}
    return sum(page.host_bytes for page in pages.values())


def whole_value(param: nn.Parameter) -> torch.Tensor | None:
    """What ``shard`` starts from: the value from ``init``, the parameter itself, or None for a meta parameter."""
    found = _pages.pop(param, None)
    if found is not None:
        page, like = found
        value = page.value(like)
        assert isinstance(value, torch.Tensor)
        return value
    return None if param.is_meta else local(param.data)
