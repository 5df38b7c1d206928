"""What a user asks for: stage, tiers, budgets, precision."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from unwall.tiers.sizes import format_bytes, parse_bytes

Placement = Literal["auto", "device", "host", "disk"]
Gradients = Literal["auto", "device", "host", "disk", "transient"]
Activations = Literal["auto", "keep", "recompute", "host", "disk"]
Packed = Literal["int8", "int4"]

_PLACEMENTS = ("auto", "device", "host", "disk")
_GRADIENTS = (*_PLACEMENTS, "transient")
_ACTIVATIONS = ("auto", "keep", "recompute", "host", "disk")
_PACKED: dict[str, int] = {"int8": 8, "int4": 4}
_COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class PlanError(ValueError):
    """A plan that cannot be carried out: says which field, what was expected, and what to write instead."""

    lack: tuple[int, int] = (0, 0)
    """Where a tier is too small: which one (0 the device, 1 the host, 2 the disk), and how many bytes would do."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a model is trained. ``Plan()`` leaves every choice to unwall."""

    stage: int = 3
    """Of which states each rank keeps 1/N: 0 none, 1 the optimizer's, 2 also gradients, 3 also parameters."""
    params: Placement = "auto"
    """The tier parameters live on. ``"auto"`` fills the fastest tier first and spills to the next one."""
    grads: Gradients = "auto"
    """The tier gradients land on. It is that of the optimizer state, which is what ``"auto"`` means. ``"transient"``: they are
    not kept. ``AdamW(update_in_backward=True)`` uses each one as soon as it is there, and what held it is free for the next
    one. A model may then be a seventh larger. For one rank."""
    optimizer: Placement = "auto"
    """The tier optimizer state lives on, and where it is updated."""
    activations: Activations = "auto"
    """Between forward and backward: ``"keep"``; ``"recompute"`` the repeated blocks; ``"host"``: the same, and their inputs
    wait on the host. ``"auto"`` measures, and decides for each block so that a step is fastest on this card."""
    sequence_tiles: int | None = None
    """In how many parts of the sequence MLPs and norms run, each computed again in backward: for very long samples. None: as
    they are, unless ``activations="auto"`` finds a block that would not fit otherwise."""
    partition_activations: bool = False
    """Over a mesh with a tensor-parallel dimension of T ranks: of the input of a recomputed block that is the same on all of
    them, each keeps 1/T, and they gather it before the block's backward."""
    arenas: bool = False
    """On an accelerator: what unwall holds for long (states, gathered groups, gradients, the inputs of recomputed blocks) lies
    in memory pools of its own, so that it does not break up the memory that comes and goes. See docs/activations.md."""
    disk: str | Path | tuple[str | Path, ...] | None = None
    """One directory, or several (one per drive), for the disk tier: the engine stripes over them."""
    device_bytes: int | str | None = None
    """What unwall may hold on the device. With ``activations="auto"`` activations are part of it, as far as recomputing them
    helps; otherwise they come on top. None: all of the card."""
    host_bytes: int | str | None = None
    """What unwall may hold in host memory. None: all of it."""
    disk_bytes: int | str | None = None
    """What unwall may hold on disk. None: what the drive has free."""
    passes: int = 1
    """How many backward calls add up before a step. More than one sets room aside for their sum in fp32."""
    compute_dtype: torch.dtype = torch.bfloat16
    """The dtype that forward and backward compute in. The master copy is always fp32."""
    reduce_dtype: torch.dtype | Packed | None = None
    """The dtype in which gradients are kept, and summed over the ranks. None: ``compute_dtype``. ``"int8"``, ``"int4"``: they
    travel as small integers, rounded stochastically, with a scale for each 256 of them, and are summed in fp32."""
    reduce_feedback: bool = False
    """With such a ``reduce_dtype``: each rank keeps what the rounding has left, and adds it to its next gradient. That takes as
    much memory on the device as the whole gradient, whatever the stage."""
    gather_dtype: Literal["int8"] | None = None
    """``"int8"``: parameters that compute in 16 bits travel to the other ranks as small integers. All ranks compute with what
    arrives; shards, master and all that is saved stay as they are. See docs/compressed.md."""
    replica: Literal["node"] | None = None
    """``"node"``: the ranks of each node keep the parameters once more among them, so that after the first gather of a step
    further ones (backward, recomputation, more passes) stay inside the node. That takes 1/R of the parameters on each of its R
    ranks, on the device or, where that has no room, on the host. See docs/compressed.md."""
    node_ranks: int | None = None
    """How many ranks of a node share the model. None: as the mesh says that has a dimension ``node``, otherwise as torchrun
    says it (``LOCAL_WORLD_SIZE``). Packed gradients are summed inside a node before they travel, where nodes are known."""
    reduce_op: Literal["mean", "sum"] = "mean"
    """What becomes of the ranks' gradients: their average, or their sum (for a loss that each rank divides by the whole
    batch)."""
    keep_fp32: Callable[[str, nn.Parameter], bool] | None = None
    """Given a parameter's name and the parameter: True to compute with it in fp32 (norms, routers)."""

    states: Literal["exact", "lean"] = "exact"
    """What AdamW keeps: an fp32 master and moments, or 5 bytes per bf16 parameter instead of 12 (docs/lean.md). What fits is
    judged by it, and ``AdamW`` does as it says."""
    ignore: Callable[[str, nn.Parameter], bool] | None = None
    """Given a parameter's name and the parameter: True to leave it alone. It stays whole on every rank, its gradient stays in
    ``.grad`` and is not averaged, and an optimizer of your own updates it."""
    tiles: int | Callable[[str, nn.Parameter], int | None] | None = None
    """Into how many tiles the weights of linear layers, embeddings and stacked experts are cut: fetched, used and dropped, and
    their gradients reduced, one after the other. A number for all of them, or a function of a parameter's name and the
    parameter (1 or None: it stays whole). None: those that do not fit ``device_bytes`` whole are cut, into as many as
    needed."""
    output_dtype: torch.dtype | Callable[[str, nn.Module], torch.dtype | None] | None = None
    """What the floating-point outputs of the model are cast to. Or a function of a module's name and the module ("" is the
    model itself), for the outputs of any module; None leaves them as they are."""

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3) or isinstance(self.stage, bool):
            raise PlanError(f"stage is 0, 1, 2 or 3, got {self.stage!r}")
        for name, allowed in (("params", _PLACEMENTS), ("grads", _GRADIENTS), ("optimizer", _PLACEMENTS)):
            value = getattr(self, name)
            if value not in allowed:
                raise PlanError(f"{name} is one of {', '.join(allowed)}, got {value!r}")
        if self.activations not in _ACTIVATIONS:
            raise PlanError(f"activations is one of {', '.join(_ACTIVATIONS)}, got {self.activations!r}")
        for name in ("device_bytes", "host_bytes", "disk_bytes"):
            value = getattr(self, name)
            if value is not None:
                try:
                    object.__setattr__(self, name, parse_bytes(value, name))
                except ValueError as error:
                    raise PlanError(str(error)) from error
        if not isinstance(self.passes, int) or isinstance(self.passes, bool) or self.passes < 1:
            raise PlanError(f"passes is a whole number, 1 or more, got {self.passes!r}")
        tiles = self.sequence_tiles
        if tiles is not None and (not isinstance(tiles, int) or isinstance(tiles, bool) or tiles < 1):
            raise PlanError(f"sequence_tiles is a whole number, 1 or more, or None, got {tiles!r}")
        if self.transient:
            self._check_transient()
        if self.states not in ("exact", "lean"):
            raise PlanError(f"states is 'exact' or 'lean', got {self.states!r}")
        if self.lean and self.compute_dtype is not torch.bfloat16:
            raise PlanError(
                f"states='lean' is for compute_dtype=torch.bfloat16, got {self.compute_dtype}: lean states are bf16 parameters "
                "with one byte more. Write compute_dtype=torch.bfloat16 or states='exact'"
            )
        if self.partition_activations and self.activations == "keep":
            raise PlanError(
                "partition_activations=True with activations='keep': parts are kept of the inputs of recomputed blocks. Use "
                "activations='auto', 'recompute', 'host' or 'disk'"
            )
        if self.compute_dtype not in _COMPUTE_DTYPES:
            raise PlanError(f"compute_dtype is torch.bfloat16, torch.float16 or torch.float32, got {self.compute_dtype!r}")
        self._check_communication()
        if self.reduce_op not in ("mean", "sum"):
            raise PlanError(f"reduce_op is 'mean' or 'sum', got {self.reduce_op!r}")
        if self.keep_fp32 is not None and not callable(self.keep_fp32):
            raise PlanError(f"keep_fp32 is a function of a parameter's name and the parameter, got {self.keep_fp32!r}")
        if self.ignore is not None and not callable(self.ignore):
            raise PlanError(f"ignore is a function of a parameter's name and the parameter, got {self.ignore!r}")
        if not (self.output_dtype is None or isinstance(self.output_dtype, torch.dtype) or callable(self.output_dtype)):
            raise PlanError(f"output_dtype is a dtype, a function of a name and a module, or None, got {self.output_dtype!r}")
        if isinstance(self.tiles, bool) or not (self.tiles is None or callable(self.tiles) or _is_count(self.tiles)):
            raise PlanError(
                f"tiles is a whole number, 1 or more, a function of a parameter's name and the parameter, or None, got "
                f"{self.tiles!r}"
            )
        for folder in self.disk if isinstance(self.disk, tuple | list) else (self.disk,) * (self.disk is not None):
            if not isinstance(folder, str | Path) or not str(folder) or "\0" in str(folder):
                raise PlanError(
                    f"disk is a directory, or a tuple of several, got {self.disk!r}: Plan(disk='/path/on/a/fast/drive')"
                )
        uses_disk = "disk" in (self.params, self.grads, self.optimizer, self.activations)
        if uses_disk and not self.directories:
            raise PlanError("a state is placed on disk, but no directory is given: Plan(disk='/path/on/a/fast/drive')")

    def _check_transient(self) -> None:
        if self.passes > 1:
            raise PlanError(
                f"grads='transient' with passes={self.passes}: gradients that are not kept cannot add up. Write grads='auto' "
                "or passes=1"
            )
        if self.compute_dtype is torch.float16:
            raise PlanError(
                "grads='transient' with compute_dtype=torch.float16: with a loss scale gradients are used when all of them are "
                "known. Write compute_dtype=torch.bfloat16 or grads='auto'"
            )

    def _check_communication(self) -> None:
        if self.reduce_dtype is not None and self.reduce_dtype not in (*_COMPUTE_DTYPES, *_PACKED):
            raise PlanError(
                "reduce_dtype is torch.bfloat16, torch.float16, torch.float32, 'int8', 'int4' or None, got "
                f"{self.reduce_dtype!r}"
            )
        if self.gather_dtype not in (None, "int8"):
            raise PlanError(f"gather_dtype is 'int8' or None, got {self.gather_dtype!r}")
        if not isinstance(self.reduce_feedback, bool):
            raise PlanError(f"reduce_feedback is True or False, got {self.reduce_feedback!r}")
        if self.reduce_feedback and self.reduce_bits is None:
            raise PlanError(
                f"reduce_feedback adds what rounding has left to the next gradient, but reduce_dtype={self.reduce_dtype!r} "
                "leaves nothing: write reduce_dtype='int4' or 'int8' with it"
            )
        if self.reduce_feedback and self.compute_dtype is torch.float16:
            raise PlanError(
                "reduce_feedback keeps parts of gradients from step to step, but in torch.float16 the loss scale changes "
                "between: use compute_dtype=torch.bfloat16, or leave reduce_feedback out"
            )
        packs = [name for name in ("gather_dtype", "reduce_dtype") if getattr(self, name) in _PACKED]
        if packs and self.compute_dtype is torch.float32:
            raise PlanError(
                f"{packs[0]}={getattr(self, packs[0])!r} is for what computes in 16 bits, but compute_dtype is torch.float32: "
                "use torch.bfloat16 or torch.float16, or leave it out"
            )
        if self.replica not in (None, "node"):
            raise PlanError(f"replica is 'node' or None, got {self.replica!r}")
        if self.node_ranks is not None and not _is_count(self.node_ranks):
            raise PlanError(f"node_ranks is a whole number, 1 or more, or None, got {self.node_ranks!r}")
        if self.replica is not None and self.stage == 0:
            raise PlanError("replica='node' is for parameters that are gathered, which stage 0 never does: leave it out")
        if self.gather_dtype is not None and self.stage == 0:
            raise PlanError("gather_dtype='int8' is for parameters that are gathered, which stage 0 never does: leave it out")

    @classmethod
    def from_deepspeed(cls, config: str | Path | Mapping[str, object]) -> "Plan":
        """What a DeepSpeed config (the path of its JSON file, or the dict) asks for, as a plan.

        One warning lists all that a plan does not hold: keys without a counterpart, unknown keys, and what belongs to the
        optimizer or the loop. ``unwall.deepspeed.translate`` says of every key what it became, without a warning.
        """
        from unwall.deepspeed import plan_of  # reads into a Plan, so it imports this file

        return plan_of(config)

    def tiles_of(self, name: str, param: nn.Parameter) -> int | None:
        """Into how many tiles the plan wants a parameter to be cut. None: it does not say."""
        wanted = self.tiles(name, param) if callable(self.tiles) else self.tiles
        if wanted is not None and not _is_count(wanted):
            raise PlanError(f"tiles gives a whole number, 1 or more, or None, got {wanted!r} for {name}")
        return wanted

    @property
    def lean(self) -> bool:
        """Whether ``states`` is ``"lean"``."""
        return self.states == "lean"

    @property
    def transient(self) -> bool:
        """Whether ``grads`` is ``"transient"``."""
        return self.grads == "transient"

    @property
    def reduce_bits(self) -> int | None:
        """Bits of a gradient's element on its way, where that is less than a dtype has."""
        return _PACKED.get(self.reduce_dtype) if isinstance(self.reduce_dtype, str) else None

    @property
    def gather_bits(self) -> int | None:
        """The same for parameters."""
        return None if self.gather_dtype is None else _PACKED[self.gather_dtype]

    @property
    def sum_dtype(self) -> torch.dtype | None:
        """The dtype in which gradients are kept. None: that of the parameters."""
        return self.reduce_dtype if isinstance(self.reduce_dtype, torch.dtype) else None

    @property
    def directories(self) -> tuple[Path, ...]:
        """The disk directories, none or more."""
        if self.disk is None:
            return ()
        return tuple(Path(entry) for entry in (self.disk if isinstance(self.disk, tuple | list) else (self.disk,)))

    @property
    def budget_device_bytes(self) -> int | None:
        """``device_bytes`` as a number."""
        return self.device_bytes if not isinstance(self.device_bytes, str) else parse_bytes(self.device_bytes)

    @property
    def budget_host_bytes(self) -> int | None:
        """``host_bytes`` as a number."""
        return self.host_bytes if not isinstance(self.host_bytes, str) else parse_bytes(self.host_bytes)

    @property
    def budget_disk_bytes(self) -> int | None:
        """``disk_bytes`` as a number."""
        return self.disk_bytes if not isinstance(self.disk_bytes, str) else parse_bytes(self.disk_bytes)

    def __str__(self) -> str:
        shown = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            shown.append(f"{field.name}={format_bytes(value) if field.name.endswith('_bytes') else value}")
        return f"Plan({', '.join(shown)})"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
