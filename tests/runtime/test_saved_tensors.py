"""Hooks on saved tensors (``save_on_cpu`` and the like) around and inside a sharded model: they see what they see in plain
PyTorch, as often, and the gradients are the same, wherever the parameters live."""

import contextlib
import warnings

import pytest
import torch
from offload import DEVICE, DISK, HOST, smallest
from reference import assert_close, whole_state
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import unwall
from unwall.plans import Plan
from unwall.shards import default_hooks

# The model below does keep a view, of the last block's weight; nobody keeps any other.
pytestmark = [
    pytest.mark.filterwarnings("error:.*is kept by your code"),
    pytest.mark.filterwarnings("ignore:.*group blocks.7.other is kept by your code"),
]
WIDTH = 32
top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
PLACEMENTS = {"device": DEVICE, "host": HOST, "disk": DISK}


class Counting:
    """Hooks that note the shape of all they see. ``Counting()()`` is a context, as often as it is called."""

    def __init__(self):
        self.packed, self.unpacked = [], []

    def __call__(self):
        context = self.make()
        pack, unpack = context.pack_hook, context.unpack_hook
        context.pack_hook = lambda tensor: self.packed.append(tuple(tensor.shape)) or pack(tensor)

        def counted(packed):
            tensor = unpack(packed)
            self.unpacked.append(tuple(tensor.shape))
            return tensor

        context.unpack_hook = counted
        return context

    def make(self):
        raise NotImplementedError


class Same(Counting):
    """Gives back the very tensor it got."""

    def make(self):
        return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


class OnCpu(Counting):
    """``save_on_cpu``: without an accelerator it keeps the tensor it got."""

    def make(self):
        return save_on_cpu()


class Copied(Counting):
    def make(self):
        return saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor)


class ReadLate(Counting):
    """Looks at what it was given only when it is asked for it, and hides it until then."""

    def make(self):
        return saved_tensors_hooks(lambda tensor: lambda: tensor.detach(), lambda packed: packed().clone())


KINDS = [Same, OnCpu, Copied, ReadLate]


class Block(nn.Module):
    """``kept``: a view of another block's weight. Backward reads it when that block's group has gone, and no hook on an output
    announces that."""

    kept = None

    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.other = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = torch.tanh(self.linear(self.norm(x)))
        return x + (y if self.kept is None else y @ self.kept) + self.other(x)


class Net(nn.Module):
    """``inside``: a context around the blocks in the middle, and around something that the model computes itself."""

    def __init__(self, inside=contextlib.nullcontext):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.inside = inside

    def forward(self, x):
        self.blocks[1].kept = self.blocks[3].kept = self.blocks[-1].other.weight.detach()
        x = self.run(self.blocks[:2], x)
        with self.inside():
            x = self.run(self.blocks[2:4], x) * self.scale
        return self.run(self.blocks[4:], x)

    def run(self, blocks, x):
        for block in blocks:
            x = block(x)
        return x


class Checkpointed(Net):
    """``inside`` is inside the checkpoint. Half of the blocks are checkpointed, the others are not."""

    reentrant = False
    nested = False

    def run(self, blocks, x):
        first, *rest = blocks
        x = checkpoint(self.one, first, x, use_reentrant=self.reentrant)
        return super().run(rest, x)

    def one(self, block, x):
        with self.inside():
            return checkpoint(block, x, use_reentrant=self.reentrant) + x if self.nested else block(x) * self.scale


class Reentrant(Checkpointed):
    reentrant = True


class Nested(Checkpointed):
    nested = True


class NestedReentrant(Reentrant):
    nested = True


def sharded(model, placement, folder):
    """On a device that holds some of the groups, so that they come and go (unless all of them live there). Activations are kept:
    what a block saves that "auto" computes again for want of room, hooks see at another time, and another number of times."""
    fields = {"compute_dtype": torch.float32, "disk": folder, "activations": "keep", **PLACEMENTS[placement]}
    unwall.shard(model, Plan(device_bytes=2 * smallest(model, "device_bytes", **fields), **fields))
    return model, unwall.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def plain(model):
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def train(model, optimizer, outside=contextlib.nullcontext, around_backward=False, steps=2, backwards=1):
    """Input gradients of each step, and the parameters at the end."""
    grads = {}
    for step in range(steps):
        torch.manual_seed(step)
        inputs = torch.randn(4, WIDTH, requires_grad=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(outside())
            loss = model(inputs).square().mean()
            if not around_backward:
                stack.close()
            for number in range(backwards):
                loss.backward(retain_graph=number < backwards - 1)
        grads[f"inputs {step}"] = inputs.grad
        optimizer.step()
        optimizer.zero_grad()
    assert top_hooks(True) is None, "hooks were left behind"
    return {**grads, **whole_state(model)}


def compare(build, placement, folder, outside=None, inside=None, **options):
    """The same training with plain PyTorch and with unwall: same results, same calls of the hooks."""
    runs = []
    for start in (plain, lambda model: sharded(model, placement, folder)):
        around, within = (kind() if kind else contextlib.nullcontext for kind in (outside, inside))
        result = train(*start(build(within)), around, **options)
        runs.append((result, [(hooks.packed, hooks.unpacked) for hooks in (around, within) if isinstance(hooks, Counting)]))
    (expected, calls), (got, seen) = runs
    assert_close(expected, got)
    assert seen == calls
    assert all(packed for packed, _ in calls), "the hooks have seen nothing: this tests nothing"


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_around_the_model(kind, placement, tmp_path):
    compare(Net, placement, tmp_path, outside=kind)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_inside_the_model(kind, placement, tmp_path):
    compare(Net, placement, tmp_path, inside=kind)


@pytest.mark.parametrize("outside", [Same, Copied])
@pytest.mark.parametrize("inside", [OnCpu, ReadLate])
def test_hooks_around_and_inside(outside, inside, tmp_path):
    compare(Net, "host", tmp_path, outside=outside, inside=inside)


def test_a_graph_that_is_used_twice(tmp_path):
    compare(Net, "host", tmp_path, outside=OnCpu, inside=ReadLate, backwards=2)


@pytest.mark.parametrize("placement", ["device", "host"])
@pytest.mark.parametrize("build", [Checkpointed, Reentrant, Nested, NestedReentrant])
@pytest.mark.parametrize("around_backward", [False, True], ids=["forward", "forward-and-backward"])
def test_checkpoints_with_hooks_around_the_model(build, around_backward, placement, tmp_path):
    compare(build, placement, tmp_path, outside=OnCpu, around_backward=around_backward)


@pytest.mark.parametrize("kind", [OnCpu, ReadLate])
@pytest.mark.parametrize("build", [Checkpointed, Reentrant, Nested, NestedReentrant])
def test_checkpoints_with_hooks_inside_them(build, kind, tmp_path):
    compare(build, "host", tmp_path, outside=Same, inside=kind)


class Faulty(Net):
    """Raises in the middle, with hooks of its own in place, when told to."""

    fail = False

    def run(self, blocks, x):
        x = super().run(blocks[:1], x)
        if self.fail and blocks[0] is self.blocks[2]:
            blocks[1].register_forward_pre_hook(self.stop)
        return super().run(blocks[1:], x)

    def stop(self, *_):
        raise ArithmeticError("told to")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_exception_in_forward_leaves_the_hooks_as_they_were(placement, tmp_path):
    outside, inside = OnCpu(), OnCpu()
    model, optimizer = sharded(Faulty(inside), placement, tmp_path)
    expected = train(*plain(Faulty()))
    model.fail = True
    with outside():
        with pytest.raises(ArithmeticError):
            model(torch.ones(2, WIDTH))
        outside.packed.clear()
        torch.ones(7, requires_grad=True).sin()
        assert outside.packed == [(7,)]
    assert top_hooks(True) is None
    model.fail = False
    for block in model.blocks:
        for number, hook in list(block._forward_pre_hooks.items()):
            if hook == model.stop:
                del block._forward_pre_hooks[number]
    assert_close(expected, train(model, optimizer))


@pytest.mark.parametrize("early", [True, False], ids=["before-shard", "after-shard"])
def test_hooks_that_a_module_hook_pushes(early, tmp_path):
    """A pre-hook pushes them and a forward hook pops them: ours are popped in between, from below them."""

    def tie(model, hooks):
        contexts = []
        model.register_forward_pre_hook(lambda *_: contexts.append(hooks()) or contexts[-1].__enter__())
        model.register_forward_hook(lambda *_: contexts.pop().__exit__(None, None, None))

    expected_hooks, hooks = Same(), Same()
    model, optimizer = plain(Net())
    tie(model, expected_hooks)
    expected = train(model, optimizer, Copied())
    model = Net()
    if early:
        tie(model, hooks)
    model, optimizer = sharded(model, "host", tmp_path)
    if not early:
        tie(model, hooks)
    assert_close(expected, train(model, optimizer, Copied()))
    assert (hooks.packed, hooks.unpacked) == (expected_hooks.packed, expected_hooks.unpacked)


def test_two_sharded_models_in_one_another(tmp_path):
    """The inner model is no submodule of the outer one: both have hooks of their own, over the user's."""

    class Outer(Net):
        def run(self, blocks, x):
            return super().run(blocks, inner(x) if blocks[0] is self.blocks[0] else x)

    def both(start):
        nonlocal inner
        hooks = OnCpu()
        inner, optimizer = start(Net())
        outer, other = start(Outer())
        result = train(outer, optimizer, hooks)
        other.step()
        return result, whole_state(inner), hooks.packed, hooks.unpacked

    inner = None
    expected = both(plain)
    got = both(lambda model: sharded(model, "host", tmp_path))
    assert_close(expected[0], got[0])
    assert_close(expected[1], got[1])
    assert expected[2:] == got[2:]


@pytest.mark.parametrize("hooks", [None, Same], ids=["without-hooks", "with-hooks"])
def test_versions_are_compared_where_pytorch_compares_them(hooks, tmp_path):
    """Under hooks PyTorch does not: what they give back is what counts."""
    model, _ = sharded(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, WIDTH)), "host", tmp_path)
    changed = []
    model[1].register_forward_hook(lambda module, inputs, output: changed.append(output))
    with hooks()() if hooks else contextlib.nullcontext():
        loss = model(torch.randn(4, WIDTH)).sum()
    with torch.no_grad():
        changed[0].mul_(2)
    with contextlib.nullcontext() if hooks else pytest.raises(RuntimeError, match="modified since by an inplace operation"):
        loss.backward()


class SparseNet(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("adjacency", torch.eye(WIDTH).to_sparse(), persistent=False)

    def forward(self, x):
        return torch.sparse.mm(self.adjacency, self.linear(x).T)


def test_sparse_tensors_are_saved_as_any_others(tmp_path):
    assert_close(train(*plain(SparseNet())), train(*sharded(SparseNet(), "host", tmp_path)))


class Noting:
    """A layer that notes what it is given, both ways."""

    active = True

    def __init__(self):
        self.packed, self.unpacked = [], []

    def pack(self, value):
        self.packed.append(value)
        return (value,)

    def unpack(self, packed):
        self.unpacked.append(packed[0])
        return packed[0]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("hooks", [None, OnCpu], ids=["without-hooks", "with-hooks"])
def test_a_further_layer_sees_what_the_hooks_made(hooks, placement, tmp_path):
    counted = Same()
    expected = train(*plain(Net()), counted)
    model, optimizer = sharded(Net(), placement, tmp_path)
    layer = Noting()
    unwall.api.engine(model).forward.saved.layers.append(layer)
    outside = hooks() if hooks else contextlib.nullcontext
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is kept by your code")  # by the layer
        assert_close(expected, train(model, optimizer, outside))
    assert (len(layer.packed), len(layer.unpacked)) == (len(counted.packed) - 2, len(counted.unpacked) - 2)  # the losses
    assert all(isinstance(value, tuple if hooks else torch.Tensor) for value in layer.packed)


def test_without_a_way_to_see_the_hooks_the_innermost_pair_counts(monkeypatch, tmp_path):
    """A torch without that private function: hooks do not compose, and ours is the innermost pair."""
    expected = train(*plain(Net()))
    model, optimizer = sharded(Net(), "host", tmp_path)
    monkeypatch.setattr(default_hooks, "_top", None)
    assert_close(expected, train(model, optimizer, Copied()))
