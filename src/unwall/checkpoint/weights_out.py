"""``export_weights``: from shards straight into files that ``transformers`` loads."""

import os
import platform
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from unwall.checkpoint.agree import agree, begin
from unwall.checkpoint.inventory import Held, aliases, inventory, owner_of, plain
from unwall.checkpoint.match import Match, cut
from unwall.checkpoint.model_card import describe_model, write_card
from unwall.checkpoint.naming import to_files
from unwall.checkpoint.out_files import OutFiles, Spec, plan_files
from unwall.checkpoint.patchwork import Patchwork
from unwall.checkpoint.progress import Advance, progress
from unwall.checkpoint.spread import local_matches, writes
from unwall.checkpoint.window import stretches, window
from unwall.runtime.engine import Engine
from unwall.shards.group import Group
from unwall.shards.local import local
from unwall.tiers.sizes import parse_bytes

MAX_SHARD_SIZE = "5GB"
RESERVED = "__metadata__"


def export_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> None:
    """Writes the model's weights, in full precision or as ``dtype``, to a directory that ``transformers`` loads.

    Parameters have the dtype that they had before ``unwall.shard``, unless ``dtype`` is given. Names, experts and packed
    projections are those of ``save_pretrained``, tied weights come once, and the model's config and generation config are
    beside them where it has any. Each rank writes what it owns, through a small buffer, so the directory must be one that all
    ranks share. All ranks call it together.
    """
    engine = owner_of(model)
    if engine is None:
        raise RuntimeError(f"{type(model).__name__} is not sharded: call unwall.shard(model) first")
    limit = parse_bytes(max_shard_size, "max_shard_size")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype is one for weights, such as torch.bfloat16, got {dtype}")
    begin(engine, "unwall.export_weights")
    model = plain(model)
    held = inventory(model)
    made, specs = _planned(engine, model, held, dtype)
    machines = len(set(engine.everyone.every(platform.node())))
    out = OutFiles(Path(path), specs, plan_files(specs, limit), shared_by_machines=machines > 1)
    _write_all(engine, model, held, made, out, main_dtype(specs))


def _planned(
    engine: Engine, model: nn.Module, held: dict[str, Held], dtype: torch.dtype | None
) -> tuple[dict[str, Patchwork], dict[str, Spec]]:
    """What this rank's tensors become, and what is in the files: that of all pipeline stages."""
    error: Exception | None = None
    made: dict[str, Patchwork] = {}
    specs: dict[str, Spec] = {}
    try:
        made = to_files(model, held)
        specs = specs_of(made, {name: entry.dtype for name, entry in held.items()}, dtype)
    except Exception as failure:
        error = failure
    agree(engine.everyone, error, "exporting weights")
    if engine.others.pipeline:
        specs = {name: spec for theirs in engine.everyone.every(specs) for name, spec in theirs.items()}
    return made, specs


def specs_of(made: dict[str, Patchwork], given: dict[str, torch.dtype], dtype: torch.dtype | None) -> dict[str, Spec]:
    """What each tensor of the files is, in the order of ``made``. ValueError for a name that no tensor of a file can have."""
    if RESERVED in made:
        raise ValueError(
            f"a tensor of the model is called {RESERVED}, a name that safetensors files keep for themselves: rename it"
        )
    found = {}
    for name, patchwork in made.items():
        kinds = {given[patch.source] for patch in patchwork.patches} or {given.get(name, torch.float32)}
        kind = kinds.pop() if len(kinds) == 1 else torch.float32
        found[name] = Spec(dtype if dtype is not None and kind.is_floating_point else kind, patchwork.shape)
    return found


def main_dtype(specs: dict[str, Spec]) -> torch.dtype | None:
    """The dtype of the first weight, which is what ``transformers`` calls the model's."""
    return next((spec.dtype for spec in specs.values() if spec.dtype.is_floating_point), None)


def turned(made: dict[str, Patchwork]) -> dict[str, list[Match]]:
    """For each tensor of the model, where its elements go."""
    found: dict[str, list[Match]] = {}
    for name, patchwork in made.items():
        for match in patchwork.matches():
            found.setdefault(match.far, []).append(match.turned(name))
    return found


def _write_all(
    engine: Engine,
    model: nn.Module,
    held: dict[str, Held],
    made: dict[str, Patchwork],
    out: OutFiles,
    dtype: torch.dtype | None,
) -> None:
    """Every step may fail on one rank: then all stop, and nothing is left behind."""
    rank, what = engine.everyone.rank, f"exporting weights to {out.folder}"

    def write() -> None:
        total = sum(file.nbytes for file in out.files) // engine.everyone.size
        with torch.no_grad(), progress("exporting weights", total, rank) as advance:
            _write_owned(engine, held, turned(made), out, advance)
        out.sync()

    def publish() -> None:
        if rank == 0:
            write_card(describe_model(model), out.folder, dtype)
            out.publish()

    try:
        for act in (out.create if rank == 0 else lambda: None, out.check_shared, write, publish):
            error: Exception | None = None
            try:
                act()
            except Exception as found:
                error = found
            agree(engine.everyone, error, what)
    except BaseException:
        if rank == 0:
            out.discard()
        out.close()
        raise


def _write_owned(engine: Engine, held: dict[str, Held], goals: dict[str, list[Match]], out: OutFiles, advance: Advance) -> None:
    """What this rank owns. Of the ranks that hold the same elements the first one writes them."""
    mine: dict[int, list[Match]] = {}
    for key, names in aliases(held).items():
        name = next((name for name in names if name in goals), None)
        if name is not None and writes(held[name].tensor, engine.others):
            mine[key] = local_matches(held[name].tensor, goals[name])
    for group in engine.groups:
        for start, stop, pieces in _owned_pieces(engine, group):
            pieces = [piece for piece in pieces if id(group.params[piece[0]]) in mine]
            if not pieces:
                continue
            with window(engine.tiers, group, start, stop, write=False) as view:
                for slot, run_start, param_start, numel in pieces:
                    values = view.get(run_start, numel).to("cpu")
                    advance(write_range(out, mine[id(group.params[slot])], values, param_start))
    for entry in {id(entry.tensor): entry for entry in held.values()}.values() if engine.ranks.rank == 0 else ():
        if id(entry.tensor) in mine and id(entry.tensor) not in engine.places:
            value = local(entry.tensor).detach().to("cpu").contiguous().view(-1)
            advance(write_range(out, mine[id(entry.tensor)], value, 0))


def write_range(out: OutFiles, matches: list[Match], values: torch.Tensor, start: int) -> int:
    """Elements of a model's tensor from ``start`` on, to wherever they belong. Gives the bytes written."""
    return sum(out.write(part, values, start) for match in matches for part in cut(match, start, start + values.numel()))


def _owned_pieces(engine: Engine, group: Group) -> Iterator[tuple[int, int, list[tuple[int, int, int, int]]]]:
    """Stretches of the owned run with what of each parameter this rank writes: slot, place in the run, place in the
    parameter, elements. Where every rank owns everything, each writes its shard."""
    ranks = engine.ranks
    shared = ranks.size > 1 and group.own_numel == group.layout.padded_numel
    base = ranks.rank * group.layout.shard_numel if shared else 0
    segments = group.layout.segments(ranks.rank) if shared else group.owned_segments()
    for start, stop in stretches(group):
        pieces = []
        for segment in segments:
            at = base + segment.shard_start
            low, high = max(start, at), min(stop, at + segment.numel)
            if low < high:
                pieces.append((segment.slot, low, segment.start + low - at, high - low))
        yield start, stop, pieces
