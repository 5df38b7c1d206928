"""Which mesh: the model of bytes per link, by hand and against all meshes there are."""

import dataclasses

import pytest
import torch
from typer.testing import CliRunner

from unwall.cli import app
from unwall.planner.description import from_shape
from unwall.planner.hardware import load
from unwall.planner.mesh_cost import SIMPLER, compare_meshes, cost_of, mesh_lines, paste, why
from unwall.planner.meshes import Mesh, meshes

BF16 = torch.bfloat16
NODE = load("8xh100")


def slow(nodes, rate=3e9):
    return dataclasses.replace(NODE.with_nodes(nodes), network_bytes_per_s=rate)


def test_costs_by_hand():
    shape, hardware = from_shape("4x1024x8"), dataclasses.replace(NODE.with_nodes(2), device_bytes=1 << 30)
    psi, tokens = 12 * 4 * 1024**2, 512
    found = cost_of(Mesh(1, 1, 8, 2), shape, hardware, 8, 512, BF16)
    flops = 6 * 8 * tokens * psi / 16 / (0.64 * 700e12)
    assert (found.compute_s, found.recompute, found.on_host) == (pytest.approx(flops), False, False)
    # four all-reduces per layer, of which half goes each way with two ranks, on the node's links
    assert found.tensor_s == pytest.approx(4 * 4 * 2 * (1 / 2) * tokens * 1024 * 2 / 360e9)
    # a group of 8 with 4 in each node; two such groups share the network; gathered once and reduced once, there is room
    assert found.data_s == pytest.approx(2 * (7 / 8) * (psi / 2 * 2) / (380e9 / 2))
    pipe = cost_of(Mesh(2, 1, 8, 1), shape, hardware, 8 * 4, 512, BF16)
    assert pipe.passes == 4
    assert pipe.bubble_s == pytest.approx(pipe.compute_s / 4)
    assert pipe.pipe_s == pytest.approx(2 * 4 * tokens * 1024 * 2 / (380e9 / 8))  # a node is a stage
    assert pipe.data_s == pytest.approx(2 * (7 / 8) * (psi / 2 * 2) / 360e9)
    twice = cost_of(Mesh(1, 2, 8, 1), shape, hardware, 16, 512, BF16)  # shards in a node, replicas over nodes
    assert twice.data_s == pytest.approx(2 * (7 / 8) * psi * 2 / 360e9)
    assert twice.replica_s == pytest.approx(4 * psi / 8 / (380e9 / 8))  # the other one's, in fp32, over the network


def test_what_replicas_exchange_is_waited_for_once_per_step():
    """Each gets the gradients of all others, in fp32, when the step begins: nothing is computed meanwhile."""
    shape, hardware = from_shape("4x1024x8"), dataclasses.replace(slow(4), device_bytes=1 << 30)
    four = cost_of(Mesh(1, 4, 8, 1), shape, hardware, 32, 512, BF16)
    assert four.replica_s == pytest.approx(3 * 4 * shape.params / 8 / (3e9 / 8))
    assert four.step_s == pytest.approx(max(four.compute_s, four.data_s) + four.replica_s)
    assert "between replicas" in four.terms()
    two = cost_of(Mesh(2, 2, 8, 1), shape, hardware, 64, 512, BF16)
    assert (two.passes, two.replica_s) == (4, pytest.approx(4 * shape.params / 2 / 8 / (3e9 / 8)))
    assert cost_of(Mesh(1, 1, 32, 1), shape, hardware, 32, 512, BF16).replica_s == 0


def test_without_room_zero_moves_three_times_the_parameters():
    shape, small = from_shape("16x4096x32"), dataclasses.replace(NODE.with_nodes(2), device_bytes=11 << 30)
    found = cost_of(Mesh(1, 1, 16, 1), shape, small, 16, 512, BF16)
    assert not found.lack
    assert found.data_s == pytest.approx(3 * (15 / 16) * 2 * shape.params / 360e9)


@pytest.mark.parametrize(("nodes", "batch"), [(1, 8), (2, 16), (3, 24), (8, 64), (8, 16)])
def test_the_best_of_all_meshes_is_found(nodes, batch):
    shape, hardware = from_shape("24x4096x32"), slow(nodes) if nodes > 1 else NODE
    found = compare_meshes(shape, hardware, batch, 1024, BF16)
    assert len({cost.mesh for cost in found}) == len(found)
    ranks = hardware.devices
    for tp in (1, 2, 4, 8):  # all of them, without the generator's rules
        for pp in range(1, 25):
            if ranks % (tp * pp) or batch % (ranks // tp // pp) or (pp & (pp - 1) and pp != nodes):
                continue
            dp = ranks // tp // pp
            for shards in {dp, max(1, min(dp, 8 // tp))} if dp % max(1, min(dp, 8 // tp)) == 0 else {dp}:
                cost = cost_of(Mesh(pp, dp // shards, shards, tp), shape, hardware, batch, 1024, BF16)
                assert cost.lack or found[0].step_s <= SIMPLER * cost.step_s
    assert all(mesh.ranks == ranks for mesh in meshes(hardware, 24, batch))


def test_one_node_with_room_wants_zero_alone():
    found = compare_meshes(from_shape("24x2048x16"), NODE, 64, 1024, BF16)
    assert found[0].mesh.is_zero_alone
    assert "hide behind compute" in why(found)
    assert len(mesh_lines(found)) == 1


def test_few_tokens_on_slow_links_want_tensor_ranks_inside_a_node():
    """One sample for every eight ranks: gathers of all parameters over the network would take most of the step."""
    found = compare_meshes(from_shape("24x4096x32"), slow(8, 20e9), 8, 2048, BF16)
    assert found[0].mesh.tp > 1
    assert "ZeRO alone wants a sample for each of 64 ranks" in why(found)
    crowded = compare_meshes(from_shape("24x4096x32"), slow(2), 16, 128, BF16)
    zero = next(cost for cost in crowded if cost.mesh.is_zero_alone)
    assert not crowded[0].mesh.is_zero_alone
    assert crowded[0].step_s < 0.5 * zero.step_s
    assert zero.data_s > zero.compute_s


def test_the_line_to_paste():
    assert Mesh(2, 1, 4, 8).code() == 'mesh = init_device_mesh("cuda", (2, 4, 8), mesh_dim_names=("pp", "dp", "tp"))'
    assert Mesh(1, 4, 8, 1).code() == 'mesh = init_device_mesh("cuda", (4, 8), mesh_dim_names=("dp_replicate", "dp_shard"))'
    assert Mesh(1, 1, 8, 1).code() == 'mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("dp",))'
    assert str(Mesh(1, 1, 8, 1)) == "ZeRO alone (dp 8)"
    piped = paste(cost_of(Mesh(2, 1, 4, 1), from_shape("24x2048x16"), NODE, 64, 1024, BF16))
    assert "microbatches=16, loss=loss" in piped


def test_the_command_says_which_mesh_and_why():
    found = CliRunner().invoke(app, ["plan", "24x2048", "--hardware", "8xh100", "--batch", "64", "--verbose"])
    assert found.exit_code == 0, found.output
    assert "mesh: ZeRO alone (dp 8)" in found.output
    assert "pp 2 x dp 4" in found.output
    few = CliRunner().invoke(app, ["plan", "24x2048", "--hardware", "8xh100", "--nodes", "2", "--batch", "2"])
    assert few.exit_code == 2
    assert 'Another mesh would do: mesh = init_device_mesh("cuda", (2, ' in few.output
