"""Pipeline parallelism, alone and with tensor parallelism, is plain PyTorch, and does not reduce once per microbatch."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from parallel_tools import ADAMW, CLIP, VOCABULARY, WIDTH, Block, batch, loss_of, mesh_of, norms_apart, train_plain
from torch import nn

import unwall

HOST = {"params": "host", "optimizer": "host"}
TIGHT = {**HOST, "device_bytes": 300 << 10}


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(6)), nn.Linear(WIDTH, VOCABULARY))


def llama(tied=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=64, use_cache=False))


def trained(build, kind, options, sizes, microbatches=4, steps=5):
    """How far a rank's part is from plain PyTorch, in parameters, norm and loss; how often the last step gathered
    and reduced each element, and how often the trace was wrong there."""
    mesh = mesh_of(**sizes)
    model = build()
    if "tp" in sizes:
        unwall.parallelize(model, mesh)
    plan = unwall.Plan(**{"compute_dtype": torch.float32, **options})
    part, schedule = unwall.pipeline(model, plan, mesh=mesh, microbatches=microbatches, loss=loss_of, schedule=kind)
    optimizer = unwall.AdamW(part.parameters(), **ADAMW, max_grad_norm=CLIP)
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    replica = mesh.get_local_rank("dp") if "dp" in sizes else 0
    norms, engine = [], unwall.api.engine(part)
    for step in range(steps):
        mispredicted = engine.executor.trace.mismatches
        unwall.stats(part).reset()
        tokens, target = batch(step, replica)
        given = {"target": target, "losses": []} if any(stage.is_last for stage in stages) else {}
        schedule.step(*([tokens] if any(stage.is_first for stage in stages) else []), **given)
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm.item())
    moved, total = unwall.stats(part).collectives, sum(group.gathered_numel for group in engine.groups)
    counted = [moved[kind].elements / total for kind in ("all_gather", "reduce_scatter")]
    counted.append(engine.executor.trace.mismatches - mispredicted)
    reference, expected = train_plain(build(), steps, sizes.get("dp", 1))
    state, whole = part.state_dict(), reference.state_dict()
    names = [None] * dist.get_world_size()
    dist.all_gather_object(names, list(state))
    assert sorted(name for listed in names for name in listed) == sorted(whole)
    far = max((float((state[name] - whole[name]).abs().max()) for name in state), default=0.0)
    return far, norms_apart(norms, expected), counted


def test_a_schedule_trains_as_one_process_does(ranks):
    for far, norm, counted in ranks(4).run(trained, layers, "1F1B", {}, {"pp": 2, "dp": 2}):
        assert max(far, norm) < 1e-6
        assert counted == [1.0, 1.0, 0]  # elements gathered and reduced once each in four microbatches


def test_zero_bubbles_on_the_host(ranks):
    for far, norm, _ in ranks(4).run(trained, layers, "ZBVZeroBubble", TIGHT, {"pp": 2, "dp": 2}):
        assert max(far, norm) < 1e-6


def test_a_decoder_over_pipeline_and_tensor_ranks(ranks):
    for far, norm, _ in ranks(4).run(trained, llama, "1F1B", {}, {"pp": 2, "tp": 2}):
        assert max(far, norm) < 1e-6


@pytest.mark.drill
@pytest.mark.parametrize("kind", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV"])
def test_every_schedule_stage_and_tier(ranks, kind):
    for stage in (1, 3):
        for where in ({}, HOST, TIGHT):
            options = {"stage": stage, **where}
            for far, norm, _ in ranks(4).run(trained, layers, kind, options, {"pp": 2, "dp": 2}):
                assert max(far, norm) < 1e-6, options


@pytest.mark.drill
@pytest.mark.parametrize("options", [{}, {"stage": 1}, TIGHT], ids=["device", "stage-1", "tight"])
def test_three_dimensions(ranks, options):
    for far, norm, _ in ranks(8).run(trained, llama, "1F1B", options, {"pp": 2, "dp": 2, "tp": 2}):
        assert max(far, norm) < 1e-6


def refused():
    mesh, said = mesh_of(pp=2, dp=2), []
    two = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for model, options in (
        (two, {"schedule": "Interleaved1F1B"}),
        (llama(tied=True), {}),
        (nn.Linear(4, 4), {}),
        (layers(), {"split": [4, 5]}),
        (layers(), {"schedule": "2F2B"}),
        (layers(), {"mesh": mesh_of(dp=4)}),
        (layers(), {"split": [1.5] * 2}),
        (layers(), {"split": 2}),
        (layers(), {"schedule": None}),
        (layers(), {"loss": "mse"}),
        ("layers", {}),
        (unwall.shard(layers(), None, mesh_of(dp=4)), {}),
    ):
        with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
            unwall.pipeline(model, **{"mesh": mesh, "microbatches": 4, "loss": F.mse_loss, **options})
        said.append(str(error.value))
    return said


def test_bad_input_is_refused(ranks):
    expected = ["4 stages, but", "are one parameter", "cannot be cut", "add up to", "schedule='2F2B'", "expected one"]
    expected += ["split=[1.5, 1.5]: expected 2 whole", "split=2: expected", "schedule=None", "loss is a function"]
    expected += ["takes an nn.Module, got str", "already sharded"]
    for said in ranks(4).run(refused):
        for part, text in zip(expected, said, strict=True):
            assert part in text, text


def tried_again():
    """A plan that does not fit, and then one that does, with the same model."""
    mesh, model = mesh_of(pp=2, dp=2), layers()
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(unwall.PlanError):
        unwall.pipeline(model, unwall.Plan(device_bytes=1), mesh=mesh, microbatches=4, loss=F.mse_loss)
    assert [name for name, _ in model.named_parameters()] == names
    part, _ = unwall.pipeline(model, unwall.Plan(), mesh=mesh, microbatches=4, loss=F.mse_loss)
    return len(list(part.parameters())), len(names)


def test_a_refused_plan_leaves_the_model_whole(ranks):
    results = ranks(4).run(tried_again)
    assert results[0][0] + results[2][0] == results[0][1]
