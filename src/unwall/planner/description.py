"""A model as the planner sees it: parameters, FLOPs and activations of each part. No weights are needed.

[Note: what a matrix costs]
Everything is derived from the matrices. Each token that passes one costs 2 FLOPs per element forward, and leaves the input and
the output behind for backward: for a transformer's four matrices that is 16 * hidden numbers per token, as ZeRO-Infinity
counts. A lookup (an embedding) costs no FLOPs. Of experts, only those that a token is sent to count. Attention adds a
term for each pair of tokens.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

from torch import nn

from unwall.planner.formulas import HALF_BYTES
from unwall.runtime.sequence_tiles import candidates as token_wise


class DescriptionError(ValueError):
    """A model that cannot be described: says what was got, what was expected, and what to write instead."""


MAX_BLOCKS, MAX_PARAMS = 10_000, 10**15
"""A model that is larger is a slip of the pen: looking at it would take minutes, or overflow."""


class Piece(NamedTuple):
    """One parameter of a part."""

    numel: int
    active_numel: float
    """Elements that each token passes."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A block of the model, or what is left beside the blocks. Equal neighbours are one part with a count."""

    name: str
    numel: int
    """Parameters of one."""
    count: int = 1
    is_block: bool = True
    """A repeated block: what lies between two activation checkpoints."""
    active_numel: int
    """Elements of the matrices that each token passes."""
    largest_numel: int
    """The largest single parameter: what a device must hold whole unless it is tiled."""
    boundary_numel: int = 0
    """Elements per token that enter the part: what an activation checkpoint holds."""
    token_numel: int = 0
    """Elements per token that stay for backward."""
    inside_numel: int = 0
    """Those of them that lie inside an MLP: with sequence tiles they are computed again, tile by tile."""
    inside_active_numel: int = 0
    """Elements of matrices of those MLPs that each token passes."""
    pair_numel: int = 0
    """Elements for each pair of tokens of a sample that stay for backward: attention scores, unless attention is fused."""
    pair_flops: int = 0
    """FLOPs forward for each pair of tokens of a sample."""
    pieces: tuple[Piece, ...] = field(default=(), repr=False)
    """The parameters of one, in order. None where the part was read from a module, which has them itself."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """A model. ``batch`` is in samples, ``seq`` in tokens per sample; the answers are for whoever has that batch."""

    name: str
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        for what, value, most in (("layers", self.blocks, MAX_BLOCKS), ("parameters", self.params, MAX_PARAMS)):
            if value > most:
                raise DescriptionError(f"{self.name}: {value:.3g} {what}, more than the {most:.0e} that can be planned for")

    @property
    def params(self) -> int:
        """Parameters in all."""
        return sum(part.count * part.numel for part in self.parts)

    @property
    def active_params(self) -> int:
        """Elements of matrices that each token passes."""
        return sum(part.count * part.active_numel for part in self.parts)

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return sum(part.count for part in self.parts if part.is_block)

    @property
    def largest_numel(self) -> int:
        """The largest single parameter."""
        return max(part.largest_numel for part in self.parts)

    @property
    def state_working_bytes(self) -> int:
        """The largest operator, value and gradient, in the compute dtype."""
        return 2 * HALF_BYTES * self.largest_numel

    def flops(self, batch: float, seq: float, recompute: bool = False) -> float:
        """One iteration: forward, backward (twice forward), and forward of the blocks once more when recomputed."""
        total = 0.0
        for part in self.parts:
            forward = batch * seq * (2 * part.active_numel + part.pair_flops * seq)
            total += part.count * forward * (4 if recompute and part.is_block else 3)
        return total

    def activation_bytes(self, batch: float, seq: float) -> float:
        """Everything that forward leaves for backward, nothing recomputed."""
        return sum(part.count * _part_activation_bytes(part, batch, seq) for part in self.parts)

    def checkpoint_bytes(self, batch: float, seq: float, every: int = 1) -> float:
        """The inputs of every ``every``-th block."""
        if every < 1:
            raise DescriptionError(f"every is the number of blocks between checkpoints, at least 1, got {every!r}")
        widths = [part.boundary_numel for part in self.parts if part.is_block for _ in range(part.count)]
        return HALF_BYTES * batch * seq * sum(widths[::every])

    def activation_working_bytes(self, batch: float, seq: float, every: int = 1) -> float:
        """What lies between two activation checkpoints, or beside the blocks, at most."""
        return max(min(every, part.count) * _part_activation_bytes(part, batch, seq) for part in self.parts)


def _part_activation_bytes(part: Part, batch: float, seq: float) -> float:
    return HALF_BYTES * batch * seq * (part.token_numel + part.pair_numel * seq)


_SHAPE = re.compile(r"\s*(\d+)\s*[xX]\s*(\d+)(?:\s*[xX]\s*(\d+))?\s*")


def from_shape(shape: str | tuple[int, int], heads: int | None = None, vocab: int = 0) -> Description:
    """A transformer as ZeRO-Infinity counts it: ``"80x10240"`` or ``"80x10240x128"`` is layers, hidden size, heads.

    The blocks are ``12 * layers * hidden**2`` parameters, no biases and norms; attention scores are kept and their FLOPs not
    counted. With ``vocab`` an embedding and a head of their own are added.
    """
    if isinstance(shape, str):
        match = _SHAPE.fullmatch(shape)
        if match is None:
            raise DescriptionError(f"cannot read the shape {shape!r}; write layers x hidden, such as 80x10240")
        layers, hidden = int(match[1]), int(match[2])
        heads = heads if match[3] is None else int(match[3])
    else:
        layers, hidden = shape
    heads = max(1, hidden // 128) if heads is None else heads
    for what, value in (("layers", layers), ("hidden size", hidden), ("heads", heads)):
        if value < 1:
            raise DescriptionError(f"shape {shape!r}: {what} must be at least 1, got {value}")
    if vocab < 0:
        raise DescriptionError(f"vocab must not be negative, got {vocab}")
    block = block_of("blocks", layers, [(3 * hidden, hidden), (hidden, hidden)], hidden)
    block = replace(feed_forward(block, hidden, 4 * hidden), pair_numel=2 * heads)
    rest = vocab_parts(vocab, hidden, tied=False) if vocab else ()
    return Description(name=f"{layers}x{hidden}", parts=(block, *rest))


def from_module(module: nn.Module, name: str | None = None) -> Description:
    """Reads shapes only: build the model under ``torch.device("meta")`` and it takes no memory.

    Blocks are the children of the outermost ``ModuleList`` and ``Sequential`` containers that have children themselves. See
    [Note: what a matrix costs]; what shapes do not show is not counted: the pairs of attention, and that a convolution uses its
    weight at many places.
    """
    share = chosen_share(module)
    found: list[tuple[str, bool, Part]] = []
    seen: set[int] = set()
    for owner, unit, is_block in units(module):
        part = _module_part(owner, unit, is_block, share, seen)
        if part is not None:
            found.append((owner.rpartition(".")[0] if is_block else owner, is_block, part))
    if not found:
        raise DescriptionError(f"{type(module).__name__} has no parameters")
    parts = []
    for (listed, is_block, _), run in groupby(found, key=lambda item: (item[0], item[1], replace(item[2], name=""))):
        same = [part for _, _, part in run]
        parts.append(replace(same[0], name=(listed or "blocks") if is_block else same[0].name, count=len(same)))
    return Description(name=name or type(module).__name__, parts=tuple(parts))


def units(module: nn.Module, prefix: str = "") -> Iterable[tuple[str, Iterable[tuple[str, nn.Module]], bool]]:
    """(name, its modules, is it a block), in registration order. Blocks are those that the engine recomputes."""
    if module._parameters:
        yield prefix, [("", module)], False
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        listed = isinstance(module, nn.ModuleList | nn.Sequential) and not isinstance(child, nn.ModuleList | nn.Sequential)
        if listed and next(child.children(), None) is not None:
            yield path, child.named_modules(), True
        else:
            yield from units(child, path)


def _module_part(
    name: str, modules: Iterable[tuple[str, nn.Module]], is_block: bool, share: float, seen: set[int]
) -> Part | None:
    numel, active, token, largest = 0, 0.0, 0.0, 0
    widths: Counter[int] = Counter()
    inside, inside_active = 0, 0
    for path, module in modules:
        if not path:
            inside, inside_active = _inside(module)
        for param in module.parameters(recurse=False):
            if id(param) not in seen:  # a tied parameter exists once, but is passed wherever it appears
                seen.add(id(param))
                numel += param.numel()
                largest = max(largest, param.numel())
            if param.dim() < 2 or isinstance(module, nn.Embedding | nn.EmbeddingBag):
                continue
            stacked = param.dim() == 3 and not isinstance(module, nn.modules.conv._ConvNd)  # one matrix for each expert
            rows, columns = param.shape[1:] if stacked else param.shape[:2]
            used = share if "experts" in path.split(".") else 1.0
            active += param.numel() * used
            token += (rows + columns) * (param.shape[0] if stacked else 1) * used
            widths.update((rows, columns))
    if not numel and not active:
        return None
    width = min(widths, key=lambda size: (-widths[size], size)) if widths else 0
    return Part(
        name=name, numel=numel, is_block=is_block, active_numel=round(active), largest_numel=largest,
        boundary_numel=width if is_block else 0, token_numel=round(token), inside_numel=inside,
        inside_active_numel=inside_active,
    )  # fmt: skip


def _inside(block: nn.Module) -> tuple[int, int]:
    """Elements per token between the first and the last matrix of each MLP that can run in sequence tiles, and those of its
    matrices."""
    numel = active = 0
    for mlp in token_wise(block):
        shapes = [param.shape for param in mlp.parameters() if param.dim() == 2]
        if len(shapes) > 1:
            numel += sum(map(sum, shapes)) - shapes[0][1] - shapes[-1][0]
            active += sum(shape.numel() for shape in shapes)
    return numel, active


def chosen_share(module: nn.Module) -> float:
    """The share of a model's experts that a token is sent to, as its ``config`` says."""
    config = getattr(module, "config", None)
    count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    return chosen / count if isinstance(count, int) and isinstance(chosen, int) else 1.0


def block_of(
    name: str, count: int, matrices: Sequence[tuple[int, int]], hidden: int, extra: int = 0, apart: Sequence[int] = ()
) -> Part:
    """From matrices as (rows, columns), and ``extra`` elements of norms and biases.

    ``apart``: sizes of the parameters where a matrix is kept in several (queries, keys and values).
    """
    sizes = [rows * columns for rows, columns in matrices]
    pieces = [Piece(size, size) for size in apart or sizes] + ([Piece(extra, 0)] if extra else [])
    return Part(
        name=name, count=count, numel=sum(sizes) + extra, active_numel=sum(sizes), largest_numel=max(apart or sizes),
        boundary_numel=hidden, token_numel=sum(map(sum, matrices)), pieces=tuple(pieces),
    )  # fmt: skip


def feed_forward(
    block: Part, hidden: int, inner: int, *, gated: bool = False, bias: bool = False, experts: int = 1, chosen: int = 1
) -> Part:
    """Adds the two matrices, or three when gated, or the experts (stacked in one parameter) and their router."""
    matrices = 3 if gated else 2
    router = hidden * experts if experts > 1 else 0
    each = matrices * hidden * inner
    kept = 2 * hidden + 2 * (matrices - 1) * inner  # gated: both projections, the activation, the product
    biases = hidden + inner if bias else 0
    if experts == 1:
        pieces = [Piece(hidden * inner, hidden * inner)] * matrices
    else:
        sizes = ((matrices - 1) * hidden * inner, hidden * inner)
        pieces = [Piece(router, router), *(Piece(experts * size, chosen * size) for size in sizes)]
    return replace(
        block,
        numel=block.numel + router + experts * each + biases,
        active_numel=block.active_numel + router + chosen * each,
        largest_numel=max(block.largest_numel, hidden * inner * (1 if experts == 1 else experts * (matrices - 1))),
        token_numel=block.token_numel + experts * (experts > 1) + chosen * kept,
        inside_numel=kept - 2 * hidden if experts == 1 else 0,  # stacked experts are not token-wise modules
        inside_active_numel=each if experts == 1 else 0,
        pieces=(*block.pieces, *pieces, *([Piece(biases, 0)] if biases else [])),
    )


def vocab_parts(vocab: int, hidden: int, tied: bool, norm: int = 0, lookups: int = 0) -> tuple[Part, Part]:
    """The embedding with other lookups, and the head with the last norm. A tied head has no parameters of its own."""
    table = vocab * hidden
    embedding = Part(
        name="embedding", numel=table + lookups, is_block=False, active_numel=0, largest_numel=max(table, lookups),
        pieces=(Piece(table, 0), *([Piece(lookups, 0)] if lookups else [])),
    )  # fmt: skip
    head = Part(
        name="head", numel=norm + (0 if tied else table), is_block=False, active_numel=table, largest_numel=table,
        token_numel=hidden + vocab,
        pieces=(*([Piece(norm, 0)] if norm else []), *([] if tied else [Piece(table, table)])),
    )  # fmt: skip
    return embedding, head
