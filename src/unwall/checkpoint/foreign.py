"""Checkpoints of other programs: recognised by their files, and refused with the command that converts them."""

from pathlib import Path


def foreign(folder: Path) -> str | None:
    """One sentence about a directory that torch's DCP or DeepSpeed wrote: what it is, and how its weights get out of it."""
    if (folder / ".metadata").is_file():
        return (
            f"{folder} is a torch.distributed.checkpoint (DCP) directory, whose index is a pickle: convert it with `python -m "
            f"torch.distributed.checkpoint.format_utils dcp_to_torch {folder} weights.pt` and give load_weights that file"
        )
    inside = [folder, *(child for child in folder.glob("global_step*") if child.is_dir())]
    if any(next(place.glob(pattern), None) for place in inside for pattern in ("*_model_states.pt", "*_optim_states.pt")):
        root = folder.parent if folder.name.startswith("global_step") else folder
        return (
            f"{folder} is a DeepSpeed ZeRO checkpoint: convert it with the script that DeepSpeed put there, `python "
            f"{root}/zero_to_fp32.py {root} OUT --safe_serialization`, and give load_weights OUT"
        )
    return None
