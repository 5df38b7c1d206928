"""Who attends to whom.

[Note: two kinds of pattern]
A mask function takes batch, head, query and key positions (tensors) and says where a query attends to a key: what torch's
``flex_attention`` takes, so patterns combine with its ``and_masks`` and ``or_masks``. ``window`` and ``dilated`` are such.
The others are layouts of blocks of tokens, named and counted as in DeepSpeed's sparsity configs. A layout depends on how
long the sequence is; ``layout.for_tokens(n)`` is its mask function.

``attention="unidirectional"`` leaves out the blocks above the diagonal. Inside the blocks on the diagonal a token still sees
those after it: a causal model has a causal mask besides.
"""

import random
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

MaskFunction: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Direction = Literal["unidirectional", "bidirectional"]
_Draw: TypeAlias = Callable[[torch.Tensor, int], None]
"""Marks the blocks of one head: the layout [blocks, blocks] and the head."""


@dataclass(frozen=True)
class Layout:
    """Blocks of tokens that attend to blocks of tokens."""

    block: int
    """Tokens per block."""
    draw: _Draw
    heads: int = 1
    """How many heads differ. The others repeat them."""

    def blocks(self, count: int) -> torch.Tensor:
        """[heads, count, count]: True where a block of queries attends to a block of keys."""
        found = torch.zeros(self.heads, count, count, dtype=torch.bool)
        for head in range(self.heads):
            self.draw(found[head], head)
        return found

    def for_tokens(self, tokens: int, device: torch.device | str = "cpu") -> MaskFunction:
        """The mask function for sequences of so many tokens."""
        table, block, heads = self.blocks(-(-tokens // self.block)).to(device), self.block, self.heads

        def mask(_: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return table[head % heads if heads > 1 else 0, query // block, key // block]

        return mask


Pattern: TypeAlias = "Layout | MaskFunction"


def mask_function(pattern: Pattern, tokens: int, device: torch.device | str = "cpu") -> MaskFunction:
    """A pattern of either kind as a mask function."""
    if isinstance(pattern, Layout):
        return pattern.for_tokens(tokens, device)
    if not callable(pattern):
        raise TypeError(f"a pattern is made by unwall.sparse, or a function of batch, head, query and key, got {pattern!r}")
    return pattern


_constant: "weakref.WeakSet[MaskFunction]" = weakref.WeakSet()
"""Mask functions that were made here."""


def is_constant(pattern: Pattern) -> bool:
    """Whether a pattern says the same whenever it is asked. A function of the user's may look at tensors that change."""
    return isinstance(pattern, Layout) or pattern in _constant


def window(tokens: int, attention: Direction = "unidirectional") -> MaskFunction:
    """Each token and the ``tokens - 1`` before it; bidirectional: also as many after it."""
    return dilated(tokens, 1, attention)


def dilated(tokens: int, dilation: int, attention: Direction = "unidirectional") -> MaskFunction:
    """As ``window``, but only every ``dilation``-th token, so that it reaches ``dilation`` times as far."""
    _positive(tokens=tokens, dilation=dilation)
    both = _is_both(attention)
    reach = tokens * dilation

    def mask(_: torch.Tensor, __: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        back = query - key
        near = (back < reach) & (back > -reach) if both else (back < reach) & (back >= 0)
        return near if dilation == 1 else near & (back % dilation == 0)

    _constant.add(mask)
    return mask


def fixed(
    *,
    block: int = 16,
    num_local_blocks: int = 4,
    num_global_blocks: int = 1,
    attention: Direction = "bidirectional",
    horizontal_global_attention: bool = False,
    num_different_global_patterns: int = 1,
    different_layout_per_head: bool = False,
) -> Layout:
    """Windows of ``num_local_blocks`` blocks, and the last ``num_global_blocks`` of each window are seen by all that follow.

    With different layouts per head, the next head's global blocks are the ones before those, and so on.
    """
    _positive(block=block, num_local_blocks=num_local_blocks, num_global_blocks=num_global_blocks)
    _positive(num_different_global_patterns=num_different_global_patterns)
    both = _is_both(attention, horizontal_global_attention)
    if num_local_blocks % num_global_blocks:
        raise ValueError(f"num_local_blocks ({num_local_blocks}) must be a multiple of num_global_blocks ({num_global_blocks})")
    if num_different_global_patterns > 1 and not different_layout_per_head:
        raise ValueError("num_different_global_patterns above 1 needs different_layout_per_head=True")
    if num_different_global_patterns > num_local_blocks // num_global_blocks:
        raise ValueError(
            f"num_different_global_patterns is at most num_local_blocks / num_global_blocks "
            f"({num_local_blocks // num_global_blocks}), got {num_different_global_patterns}"
        )

    def draw(layout: torch.Tensor, head: int) -> None:
        count = layout.shape[0]
        for start in range(0, count, num_local_blocks):
            _square(layout, start, start + num_local_blocks, both)
        first = num_local_blocks - (1 + head % num_different_global_patterns) * num_global_blocks
        whole = count - count % num_local_blocks
        starts = list(range(first, whole, num_local_blocks))
        if whole < count:  # a last window that is cut short
            starts.append(max(0, min(whole + first, count - num_global_blocks)))
        for start in starts:
            _global(layout, start, start + num_global_blocks, both, horizontal_global_attention)

    return Layout(block, draw, num_different_global_patterns)


def variable(
    *,
    block: int = 16,
    num_random_blocks: int = 0,
    local_window_blocks: Sequence[int] = (4,),
    global_block_indices: Sequence[int] = (0,),
    global_block_end_indices: Sequence[int] | None = None,
    attention: Direction = "bidirectional",
    horizontal_global_attention: bool = False,
    seed: int = 0,
) -> Layout:
    """Windows of the sizes listed (the last one repeats), chosen global blocks, and random ones in each row."""
    _positive(block=block, **{f"local_window_blocks[{i}]": size for i, size in enumerate(local_window_blocks)})
    both = _is_both(attention, horizontal_global_attention)
    spans = _spans(global_block_indices, global_block_end_indices)

    def draw(layout: torch.Tensor, head: int) -> None:
        _random(layout, num_random_blocks, seed + head, below=False)
        start, sizes = 0, list(local_window_blocks)
        while start < layout.shape[0]:
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            _square(layout, start, start + size, both)
            start += size
        for begin, end in spans:
            _global(layout, begin, end, both, horizontal_global_attention)

    return Layout(block, draw)


def bigbird(
    *,
    block: int = 16,
    num_random_blocks: int = 1,
    num_sliding_window_blocks: int = 3,
    num_global_blocks: int = 1,
    attention: Direction = "bidirectional",
    seed: int = 0,
) -> Layout:
    """A sliding window, the first blocks for all, and random blocks in each row (the same ones on all ranks)."""
    _positive(block=block, num_sliding_window_blocks=num_sliding_window_blocks, num_global_blocks=num_global_blocks)
    both = _is_both(attention)

    def draw(layout: torch.Tensor, head: int) -> None:
        _random(layout, num_random_blocks, seed + head, below=not both)
        _slide(layout, num_sliding_window_blocks)
        _cross(layout, 0, num_global_blocks)
        if not both:
            layout.logical_and_(torch.ones_like(layout).tril())

    return Layout(block, draw)


def longformer(
    *,
    block: int = 16,
    num_sliding_window_blocks: int = 3,
    global_block_indices: Sequence[int] = (0,),
    global_block_end_indices: Sequence[int] | None = None,
    attention: Direction = "bidirectional",
) -> Layout:
    """A sliding window, and chosen blocks that see and are seen by all."""
    _positive(block=block, num_sliding_window_blocks=num_sliding_window_blocks)
    both = _is_both(attention)
    spans = _spans(global_block_indices, global_block_end_indices)

    def draw(layout: torch.Tensor, _: int) -> None:
        _slide(layout, num_sliding_window_blocks)
        for begin, end in spans:
            _cross(layout, begin, end)
        if not both:
            layout.logical_and_(torch.ones_like(layout).tril())

    return Layout(block, draw)


def local_sliding_window(
    *, block: int = 16, num_sliding_window_blocks: int = 3, attention: Direction = "unidirectional"
) -> Layout:
    """A sliding window of blocks."""
    return longformer(
        block=block, num_sliding_window_blocks=num_sliding_window_blocks, global_block_indices=(), attention=attention
    )


_MODES: dict[str, Callable[..., Layout]] = {
    "fixed": fixed,
    "variable": variable,
    "bigbird": bigbird,
    "bslongformer": longformer,
}


def from_deepspeed(section: Mapping[str, Any]) -> Layout:
    """The ``sparse_attention`` section of a DeepSpeed config as a pattern."""
    options = dict(section)
    mode = options.pop("mode", None)
    if mode not in _MODES:
        raise ValueError(f"sparse_attention: mode is one of {', '.join(_MODES)}, got {mode!r}")
    if mode != "fixed":
        options.pop("different_layout_per_head", None)  # random blocks aside, DeepSpeed gives all heads one layout there, too
    try:
        return _MODES[mode](**options)
    except TypeError as error:
        raise ValueError(f"sparse_attention, mode {mode}: {error}") from error


def _positive(**values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is a whole number above 0, got {value!r}")


def _is_both(attention: str, horizontal: bool = False) -> bool:
    if attention not in ("unidirectional", "bidirectional"):
        raise ValueError(f"attention is unidirectional or bidirectional, got {attention!r}")
    if horizontal and attention != "bidirectional":
        raise ValueError("horizontal_global_attention needs attention='bidirectional'")
    return attention == "bidirectional"


def _spans(starts: Sequence[int], ends: Sequence[int] | None) -> list[tuple[int, int]]:
    if ends is None:
        return [(start, start + 1) for start in starts]
    if len(starts) != len(ends) or any(start >= end for start, end in zip(starts, ends, strict=False)):
        raise ValueError(
            f"global_block_end_indices has one end, above the start, for each of global_block_indices: "
            f"got {list(starts)} and {list(ends)}"
        )
    return list(zip(starts, ends, strict=True))


def _square(layout: torch.Tensor, start: int, end: int, both: bool) -> None:
    """A window of blocks that see each other."""
    part = layout[start:end, start:end]
    part |= torch.ones_like(part) if both else torch.ones_like(part).tril()


def _global(layout: torch.Tensor, start: int, end: int, both: bool, horizontal: bool) -> None:
    """Blocks that all others see: in a unidirectional layout those from the first of them on."""
    if start < layout.shape[0]:
        layout[0 if both else start :, start:end] = True
        if horizontal:
            layout[start:end] = True


def _cross(layout: torch.Tensor, start: int, end: int) -> None:
    """Blocks that see all others and are seen by them."""
    layout[start:end] = True
    layout[:, start:end] = True


def _slide(layout: torch.Tensor, width: int) -> None:
    """Each block sees half a window to either side."""
    rows = torch.arange(layout.shape[0])
    layout |= (rows[:, None] - rows).abs() <= width // 2


def _random(layout: torch.Tensor, many: int, seed: int, below: bool) -> None:
    """Random blocks in each row; ``below``: not above the diagonal."""
    choose = random.Random(seed)
    if many > layout.shape[0]:
        raise ValueError(f"num_random_blocks is at most the number of blocks in the sequence ({layout.shape[0]}), got {many}")
    for row in range(layout.shape[0]):
        room = row + 1 if below else layout.shape[0]
        layout[row, choose.sample(range(room), min(many, room))] = True
