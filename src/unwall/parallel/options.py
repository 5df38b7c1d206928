"""What ``unwall.from_pretrained`` is told of a pipeline."""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from unwall.parallel.mesh import describe, roles_of, sizes_of


def pipeline_options(mesh: DeviceMesh | None, microbatches: int | None, given: dict[str, Any]) -> dict[str, Any] | None:
    """What ``pipeline`` is called with, taken out of ``given``. None: the model is not cut into stages."""
    cuts: dict[str, Any] = {name: given.pop(name) for name in ("loss", "schedule", "split") if name in given}
    staged = mesh is not None and sizes_of(mesh, "pipeline")
    where = "without a mesh" if mesh is None else f"over {describe(mesh)}"
    if microbatches is None and staged:
        raise ValueError(
            f"from_pretrained {where}: say how it is trained, part, schedule = unwall.from_pretrained(path, plan, mesh, "
            "microbatches=8, loss=loss)"
        )
    if microbatches is None and cuts:
        raise ValueError(f"from_pretrained with {', '.join(cuts)}, which are for a pipeline: give microbatches=..., too")
    if microbatches is None:
        return None
    if mesh is None or "pipeline" not in roles_of(mesh).values():
        raise ValueError(f"from_pretrained with microbatches={microbatches!r} {where}: expected a mesh with a dimension 'pp'")
    return {"mesh": mesh, "microbatches": microbatches, **cuts}
