"""The local part of a parameter that tensor parallelism has spread over the ranks."""

import pytest
import torch
from torch import nn

import unwall
from unwall.shards.build import plan_groups
from unwall.shards.local import local, local_gradient, show


def spread_over_two():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6))
    return parallelize_module(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), {"0": ColwiseParallel()})


def look(world):
    model = spread_over_two()
    weight, plain = model[0].weight, model[1].weight
    shapes = [slot.shape for _, layout in plan_groups(model, unwall.Plan(), 1) for slot in layout.slots]
    shown = torch.zeros(3, 8)
    show(weight, shown)
    same = local(weight).data_ptr() == shown.data_ptr() and weight.shape == (6, 8)
    show(plain, torch.ones(6))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    show(weight, torch.ones(3, 8))
    model[0](x).sum().backward()
    grad = local_gradient(weight, weight.grad)
    try:
        unwall.shard(model)
        refused = ""
    except ValueError as error:
        refused = str(error)
    return {
        "shapes": [tuple(shape) for shape in shapes],
        "same": same,
        "plain": plain.sum().item(),
        "gradient": torch.equal(grad, x.sum(0).expand(3, 8)),
        "refused": refused,
    }


def test_what_lies_in_a_slot_is_the_local_part(ranks):
    for found in ranks(2).run(look, 2):
        assert (3, 8) in found["shapes"]  # half of the rows, not all six
        assert found["same"]
        assert found["plain"] == 6.0
        assert found["gradient"]
        assert "give the mesh" in found["refused"]


@pytest.mark.parametrize("tensor", [torch.randn(3), nn.Parameter(torch.randn(3))])
def test_a_plain_tensor_is_its_own_local_part(tensor):
    assert local(tensor) is tensor
