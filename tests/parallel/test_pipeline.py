"""Pipeline parallelism, alone and with tensor parallelism, is plain PyTorch, and does not reduce once per microbatch."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from parallel_tools import ADAMW, CLIP, VOCABULARY, WIDTH, Block, batch, loss_of, mesh_of, norms_apart, train_plain
from torch import nn

import unwall
from unwall.parallel.batches import FLAGS, Batches

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


def granite():
    """A decoder that multiplies embeddings and logits outside of its layers, of which there is an odd number."""
    from transformers import GraniteConfig, GraniteForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False}
    scales = {"embedding_multiplier": 3.0, "logits_scaling": 2.0}
    return GraniteForCausalLM(GraniteConfig(**sizes, **heads, **scales, tie_word_embeddings=False)).train()


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
    for far, norm, counted in ranks(4).run(trained, layers, "ZBVZeroBubble", TIGHT, {"pp": 2, "dp": 2}):
        assert max(far, norm) < 1e-6
        assert counted[1:] == [1.0, 0]


def test_a_decoder_over_pipeline_and_tensor_ranks(ranks):
    for far, norm, _ in ranks(4).run(trained, llama, "1F1B", {}, {"pp": 2, "tp": 2}):
        assert max(far, norm) < 1e-6


def test_what_a_decoder_does_beside_its_layers(ranks):
    for far, norm, _ in ranks(4).run(trained, granite, "1F1B", {}, {"pp": 2, "dp": 2}):
        assert max(far, norm) < 5e-6


def cut_model(schedule, options, loss=loss_of, microbatches=4, model=None, split=None):
    """Part, optimizer and two functions: a step of the schedule, and one without gradients. Both take a batch."""
    mesh = mesh_of(pp=2, dp=2)
    plan = unwall.Plan(**{"compute_dtype": torch.float32, **options})
    given = {"mesh": mesh, "microbatches": microbatches, "loss": loss, "schedule": schedule, "split": split}
    part, runs = unwall.pipeline(layers() if model is None else model, plan, **given)
    stages = getattr(runs, "_stages", None) or [runs._stage]
    first, last = (any(getattr(stage, end) for stage in stages) for end in ("is_first", "is_last"))

    def call(run, tokens, target):
        losses = []
        output = run(*([tokens] if first else []), **({"target": target, "losses": losses} if last else {}))
        return output, [value.item() for value in losses]

    return mesh.get_local_rank("dp"), part, lambda *rows: call(runs.step, *rows), lambda *rows: call(runs.eval, *rows)


def accumulated(schedule):
    """Two batches of different sizes to a step, and evaluations in between: how far from plain PyTorch."""
    replica, part, step, evaluate = cut_model(schedule, {})
    optimizer, plain, far = unwall.AdamW(part.parameters(), **ADAMW), layers(), 0.0
    theirs = torch.optim.AdamW(plain.parameters(), **ADAMW)
    for number in range(3):
        part.eval()
        with torch.no_grad():
            tokens, target = batch(50, replica)
            output, losses = evaluate(tokens, target)
            if output is not None:
                expected = plain(tokens)
                far = max(far, float((output - expected).abs().max()), abs(sum(losses) / 4 - loss_of(expected, target).item()))
        part.train()
        for rows, width in ((4, 8), (8, 5)):
            for rank in range(2):
                tokens, target = (given.repeat(2, 1)[:rows, :width] for given in batch(number, rank))
                (loss_of(plain(tokens), target) / 2).backward()
                if rank == replica:
                    step(tokens, target)
        for its in (optimizer, theirs):
            its.step()
            its.zero_grad()
    whole = plain.state_dict()
    return max([far, *(float((value - whole[name]).abs().max()) for name, value in part.state_dict().items())])


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_batches_add_up_whatever_their_sizes(ranks, schedule):
    assert max(ranks(4).run(accumulated, schedule)) < 1e-5  # outputs among them


def test_what_stages_of_older_versions_of_torch_have_measured_is_forgotten():
    stage = SimpleNamespace(inputs_meta="of 2 rows", _outputs_meta="of 2 rows")
    schedule = SimpleNamespace(_stage=stage, **dict.fromkeys(FLAGS, True))
    batches = Batches(SimpleNamespace(others=SimpleNamespace(pipeline=[])), 2)
    for rows, kept in ((2, True), (2, True), (4, False)):
        batches.begin(schedule, (torch.zeros(rows, 3),), {})
        assert [bool(value) for value in (*vars(stage).values(), *(getattr(schedule, flag) for flag in FLAGS))] == [kept] * 4


def uneven():
    """What is said of a batch that cannot be cut, and whether the next one can be trained with."""
    replica, part, step, _ = cut_model("1F1B", {})
    tokens, target = batch(0, replica)
    with pytest.raises(ValueError) as error:
        step(tokens[:3], target[:3])
    step(tokens, target)
    unwall.AdamW(part.parameters(), **ADAMW).step()
    return str(error.value)


def test_a_batch_that_cannot_be_cut_is_refused_on_every_rank(ranks):
    for said in ranks(4).run(uneven):
        assert "a batch of 3 rows on pipeline rank 0, which cannot be cut into 4 equal microbatches" in said


def scaled():
    """fp16: the norms of this rank, beside those of plain PyTorch in fp32, and an optimizer that does not clip."""
    held = []
    options = {"compute_dtype": torch.float16}
    replica, part, step, _ = cut_model("1F1B", options, lambda output, target: held[0].scale(loss_of(output.float(), target)))
    held.append(unwall.AdamW(part.parameters(), **ADAMW))
    norms = []
    for number in range(3):
        step(*batch(number, replica))
        norms.append(float(held[0].clip_grad_norm_(CLIP)))
        held[0].step()
    step(*batch(3, replica))
    held[0].step()  # nothing measures but the look for overflows
    return norms, train_plain(layers(), 3, 2)[1]


def test_every_stage_takes_the_loss_scale_out(ranks):
    for norms, expected in ranks(4).run(scaled):
        assert norms == pytest.approx(expected, rel=1e-2)


def half_frozen():
    """fp16 with nothing to train in the first stage, and a scale that changes: the norms of one batch, again and again."""
    held, norms, model = [], [], layers()
    model[:4].requires_grad_(False)
    options = {"compute_dtype": torch.float16}
    loss = lambda output, target: held[0].scale(loss_of(output.float(), target))  # noqa: E731
    replica, part, step, _ = cut_model("1F1B", options, loss, model=model, split=[4, 4])
    held.append(unwall.AdamW(part.parameters(), lr=0.0))
    for _ in range(3):
        step(*batch(0, replica))
        norms.append(float(held[0].clip_grad_norm_(CLIP)))
        held[0].step()
        held[0].zero_grad()
        held[0].scaler.scale /= 2
    return norms


def test_a_stage_without_gradients_does_not_keep_an_old_loss_scale(ranks):
    for first, *others in ranks(4).run(half_frozen):
        assert others == pytest.approx([first] * 2, rel=1e-2)


def by_hand(schedule):
    """torch's own stages, over modules that were sharded by hand: how far from plain PyTorch."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    mesh, plain = mesh_of(pp=2, dp=2), list(layers())
    at, group = mesh.get_local_rank("pp"), mesh["pp"].get_group()
    numbers = [at] if schedule == "1F1B" else [at, at + 2]
    count = 2 * len(numbers)
    size = len(plain) // count
    mine = nn.ModuleList(nn.Sequential(*plain[number * size : (number + 1) * size]) for number in numbers)
    unwall.shard(mine, unwall.Plan(compute_dtype=torch.float32), mesh)
    stages = [PipelineStage(mine[at], number, count, torch.device("cpu"), group=group) for at, number in enumerate(numbers)]
    runs = get_schedule_class(schedule)(stages if len(stages) > 1 else stages[0], n_microbatches=4, loss_fn=loss_of)
    optimizer, norms = unwall.AdamW(mine.parameters(), **ADAMW, max_grad_norm=CLIP), []
    for step in range(3):
        tokens, target = batch(step, mesh.get_local_rank("dp"))
        runs.step(*([tokens] if at == 0 else []), **({"target": target, "losses": []} if at == 1 else {}))
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm.item())
    reference, expected = train_plain(layers(), 3, 2)
    whole, far = reference.state_dict(), norms_apart(norms, expected)
    for name, value in mine.state_dict().items():
        stage, layer, rest = name.split(".", 2)
        far = max(far, float((value - whole[f"{numbers[int(stage)] * size + int(layer)}.{rest}"]).abs().max()))
    return far


def test_stages_of_torch_over_modules_sharded_by_hand(ranks):
    for schedule in ("1F1B", "Interleaved1F1B"):
        assert max(ranks(4).run(by_hand, schedule)) < 5e-6, schedule


def test_zero_bubbles_by_hand_are_refused():
    from torch.distributed.pipelining._backward import stage_backward_input

    model = unwall.shard(nn.Linear(4, 4), unwall.Plan(compute_dtype=torch.float32))
    inputs = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"zero-bubble schedule .* Use unwall.pipeline\(..., schedule=...\)"):
        stage_backward_input([model(inputs)], [torch.ones(2, 4)], [inputs], model.parameters())


@pytest.mark.drill
@pytest.mark.parametrize("kind", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV"])
def test_every_schedule_stage_and_tier(ranks, kind):
    for stage in (1, 3):
        for where in ({}, HOST, TIGHT):
            options = {"stage": stage, **where}
            for far, norm, counted in ranks(4).run(trained, layers, kind, options, {"pp": 2, "dp": 2}):
                assert max(far, norm) < 1e-6, options
                assert counted[1:] == [1.0, 0], options
                assert where is TIGHT or counted[0] == 1.0, options


@pytest.mark.drill
@pytest.mark.parametrize("options", [{}, {"stage": 1}, TIGHT], ids=["device", "stage-1", "tight"])
def test_three_dimensions(ranks, options):
    for far, norm, _ in ranks(8).run(trained, llama, "1F1B", options, {"pp": 2, "dp": 2, "tp": 2}):
        assert max(far, norm) < 1e-6


class Averaged(nn.Sequential):
    def forward(self, x):
        return super().forward(x).mean()


def refused():
    mesh, said = mesh_of(pp=2, dp=2), []
    two = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    more, averaged = llama(), Averaged(*layers())
    more.model.gate = nn.Linear(2, 2)
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
        (layers(), {"microbatches": 1}),
        (averaged, {}),
        (more, {}),
    ):
        with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
            unwall.pipeline(model, **{"mesh": mesh, "microbatches": 4, "loss": F.mse_loss, **options})
        said.append(str(error.value))
    return said


def test_bad_input_is_refused(ranks):
    expected = ["4 stages, but", "are one parameter", "cannot be cut", "add up to", "schedule='2F2B'", "expected one"]
    expected += ["split=[1.5, 1.5]: expected 2 whole", "split=2: expected", "schedule=None", "loss is a function"]
    expected += ["takes an nn.Module, got str", "already sharded", "Number of microbatches (1)"]
    expected += ["with a forward of its own", "its parameter model.gate.weight belongs to none of its layers"]
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
