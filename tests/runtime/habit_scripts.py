"""What a new user writes around a model: optimizers, averages, several models, schedules. See habit_tools.py."""

import copy

import torch
import torch.nn.functional as F
from habit_tools import WIDTH, Net, batch, fit, loss_of, net, scripts_of, values
from torch import nn
from torch.utils.checkpoint import checkpoint


def sam(kit):
    model = kit.model(net())
    optimizer = kit.sgd(model.parameters(), lr=0.1)
    for step in range(2):
        loss_of(model, step).backward()
        norm = torch.norm(torch.stack([p.grad.norm(2) for p in model.parameters()]), 2)
        kept = {}
        with torch.no_grad():
            for p in model.parameters():
                e = p.grad * (0.05 / (norm + 1e-12))
                p.add_(e)
                kept[p] = e.clone() if isinstance(e, torch.Tensor) else e
        optimizer.zero_grad()
        loss_of(model, step).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(kept[p])
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def lookahead(kit):
    model = kit.model(net())
    optimizer = kit.sgd(model.parameters(), lr=0.1, momentum=0.9)
    slow = [p.data.clone() for p in model.parameters()]
    for step in range(4):
        fit(model, optimizer, 1, step)
        if step % 2 == 1:
            for p, q in zip(model.parameters(), slow, strict=False):
                q.add_(0.5 * (p.data - q))
                p.data.copy_(q)
    return values(model) + slow


def lottery(kit):
    model = kit.model(net())
    start = {k: v.detach().clone() for k, v in model.named_parameters()}
    optimizer = kit.sgd(model.parameters(), lr=0.1)
    fit(model, optimizer)
    masks = {k: (p.detach().abs() > p.detach().abs().median()).float() for k, p in model.named_parameters() if p.dim() > 1}
    with torch.no_grad():
        for k, p in model.named_parameters():
            p.copy_(start[k])
            if k in masks:
                p.mul_(masks[k])
    optimizer.zero_grad()
    for step in range(2):
        loss_of(model, step).backward()
        for k, p in model.named_parameters():
            if k in masks:
                p.grad.mul_(masks[k])
        optimizer.step()
        optimizer.zero_grad()
    assert all(bool((p[masks[k] == 0] == 0).all()) for k, p in model.named_parameters() if k in masks)
    return values(model)


def lottery_deepcopy(kit):
    model = kit.model(net())
    start = copy.deepcopy(dict(model.named_parameters()))
    fit(model, kit.sgd(model.parameters(), lr=0.1))
    with torch.no_grad():
        for k, p in model.named_parameters():
            p.data = start[k].data.clone()
    return values(model)


def gradient_noise(kit):
    model = kit.model(net())
    optimizer = kit.adam(model.parameters(), lr=0.01)
    draw = torch.Generator().manual_seed(7)
    for step in range(3):
        loss_of(model, step).backward()
        for p in model.parameters():
            p.grad += 0.01 * torch.randn(p.shape, generator=draw)
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def distill(kit):
    teacher, student = kit.model(net(1)), kit.model(net(2))
    teacher.eval().requires_grad_(False)
    optimizer = kit.adam(student.parameters(), lr=0.01)
    for step in range(3):
        x, _ = batch(step)
        with torch.no_grad():
            target = teacher(x)
        loss = F.kl_div(F.log_softmax(student(x).float(), -1), F.softmax(target.float(), -1), reduction="batchmean")
        loss = loss + F.mse_loss(student.features(x).float(), teacher.features(x).float().detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(p.grad is None for p in teacher.parameters())
    return values(teacher, student)


def gan(kit):
    make, judge = kit.model(net(1)), kit.model(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    first, second = kit.adam(make.parameters(), lr=0.01), kit.adam(judge.parameters(), lr=0.01)
    for step in range(3):
        x, y = batch(step)
        second.zero_grad()
        fake = make(x)
        loss = F.softplus(-judge(y)).mean() + F.softplus(judge(fake.detach())).mean()
        loss.backward()
        second.step()
        first.zero_grad()
        for p in judge.parameters():
            p.requires_grad_(False)
        F.softplus(-judge(fake)).mean().backward()
        for p in judge.parameters():
            p.requires_grad_(True)
        first.step()
    return values(make, judge)


def policy(kit):
    model, old = kit.model(net(1)), kit.model(net(1))
    old.requires_grad_(False)
    optimizer = kit.adam(model.parameters(), lr=0.01)
    for step in range(2):
        x, _ = batch(step)
        with torch.no_grad():
            before = old(x).float().log_softmax(-1)[:, 0]
        for _ in range(2):
            now = model(x).float().log_softmax(-1)[:, 0]
            ratio = (now - before).exp()
            (-(torch.min(ratio, ratio.clamp(0.8, 1.2))).mean()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for p, q in zip(old.parameters(), model.parameters(), strict=False):
                p.copy_(q)
    return values(model, old)


def soft_target(kit):
    model = kit.model(net(1))
    target = copy.deepcopy(model)
    for p in target.parameters():
        p.requires_grad = False
    optimizer = kit.adam(model.parameters(), lr=0.01)
    for step in range(3):
        x, y = batch(step)
        with torch.no_grad():
            y = y + 0.9 * target(x).float()
        F.smooth_l1_loss(model(x).float(), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        for p, q in zip(target.parameters(), model.parameters(), strict=False):
            p.data.mul_(0.9).add_(q.data, alpha=0.1)
    return values(model, target)


def evaluates_between(kit):
    model = kit.model(net())
    optimizer = kit.adam(model.parameters(), lr=0.01)
    seen = []
    for step in range(3):
        for part in range(2):
            (loss_of(model, 2 * step + part) / 2).backward()
            model.eval()
            with torch.inference_mode():
                seen.append(loss_of(model, 50))
            model.train()
        optimizer.step()
        optimizer.zero_grad()
    return [*values(model), torch.stack([s.clone() for s in seen])]


def freezes_and_thaws(kit):
    model = kit.model(net())
    optimizer = kit.adam(model.parameters(), lr=0.01)
    for step in range(4):
        for p in model.layers.parameters():
            p.requires_grad = step in (0, 3)
        fit(model, optimizer, 1, step)
        if step in (1, 2):
            assert all(p.grad is None for p in model.layers.parameters())
    return values(model)


def thaws_with_new_group(kit):
    model = kit.model(net())
    model.layers.requires_grad_(False)
    optimizer = kit.adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    fit(model, optimizer, 2)
    model.layers[2].requires_grad_(True)
    optimizer.add_param_group({"params": model.layers[2].parameters(), "lr": 0.001})
    fit(model, optimizer, 2, 2)
    return values(model)


def changes_groups(kit):
    model = kit.model(net())
    decay = [p for n, p in model.named_parameters() if p.ndim >= 2]
    rest = [p for n, p in model.named_parameters() if p.ndim < 2]
    optimizer = kit.adam([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.02, 0.01], total_steps=6)
    for step in range(5):
        fit(model, optimizer, 1, step)
        schedule.step()
        optimizer.param_groups[1]["weight_decay"] = 0.01 * step
    return [*values(model), torch.tensor(schedule.get_last_lr())]


def plateau(kit):
    model = kit.model(net())
    optimizer = kit.adam(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
    for _ in range(4):
        fit(model, optimizer, 1, 0)
        schedule.step(1.0)
    warm = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4),
        ],
        milestones=[2],
    )
    for step in range(4):
        fit(model, optimizer, 1, step)
        warm.step()
    return [*values(model), torch.tensor(optimizer.param_groups[0]["lr"])]


def checkpointing(kit):
    class Hand(Net):
        def features(self, x):
            for layer in self.layers:
                x = x + checkpoint(lambda v, layer=layer: torch.tanh(layer(v)), x, use_reentrant=False)
            return self.norm(x)

    torch.manual_seed(0)
    model = kit.model(Hand())
    fit(model, kit.adam(model.parameters(), lr=0.01), 3)
    return values(model)


def hooks(kit):
    model = kit.model(net())
    seen, norms = [], []
    handles = [layer.register_forward_hook(lambda m, a, o: seen.append(o.detach().float().mean())) for layer in model.layers]
    handles += [model.head.register_full_backward_hook(lambda m, gi, go: norms.append(go[0].float().norm()))]
    handles += [model.layers[1].register_forward_pre_hook(lambda m, a: (a[0] * 0.5,))]
    handles += [model.layers[0].weight.register_hook(lambda g: g * 2)]
    optimizer = kit.sgd(model.parameters(), lr=0.1)
    fit(model, optimizer)
    for handle in handles:
        handle.remove()
    fit(model, optimizer, 1, 2)
    return [*values(model), torch.stack(seen), torch.stack(norms)]


def captures(kit):
    """Features by a hook, used in the loss."""
    model = kit.model(net())
    kept = {}
    model.layers[1].register_forward_hook(lambda m, a, o: kept.__setitem__("h", o))
    optimizer = kit.sgd(model.parameters(), lr=0.1)
    for step in range(2):
        (loss_of(model, step) + 0.1 * kept["h"].float().square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def applies_init(kit):
    model = kit.model(net())

    def init(module):
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    torch.manual_seed(3)
    model.apply(init)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.data.fill_(0.1)
    fit(model, kit.sgd(model.parameters(), lr=0.1))
    return values(model)


def compares(kit):
    model = kit.model(net())
    before = {n: p.clone() for n, p in model.named_parameters()}
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    fit(model, kit.sgd(model.parameters(), lr=0.1))
    changed = [n for n, p in model.named_parameters() if not torch.equal(p, before[n])]
    assert changed == [n for n, _ in model.named_parameters()], changed
    far = [(p - before[n]).norm().item() for n, p in model.named_parameters()]
    text = repr(model.head.weight) + str(model)
    assert "tensor(" in text
    w = model.head.weight
    some = [w[0, 0].item(), float(w.sum()), w.mean().item(), w.abs().max().item(), w.t().contiguous().view(-1)[3].item()]
    assert w.shape == (4, WIDTH)
    assert len(w) == 4
    assert w.is_leaf
    assert w.requires_grad
    assert (w == w).all()
    assert not torch.isnan(w).any()
    assert w in set(model.parameters())
    assert any(p is w for p in model.parameters())
    rows = [row.sum().item() for row in w]
    return [*values(model), torch.tensor([count, size, *far, *some, *rows])]


def in_place(kit):
    model = kit.model(net())
    optimizer = kit.sgd(model.parameters(), lr=0.1)
    with torch.no_grad():
        model.head.weight *= 0.5
        model.head.bias += 1
        model.layers[0].weight[0] = 0
        model.layers[0].weight[:, 1:3].mul_(2)
        model.layers[1].weight.view(-1)[:5] = 0.25
        model.layers[1].bias[torch.tensor([0, 2])] = 3.0
        model.layers[2].weight.clamp_(-0.1, 0.1)
        model.layers[2].weight.t()[0].zero_()
        model.norm.weight.sub_(0.1)
        torch.add(model.norm.bias, 1, out=model.norm.bias)
        model.layers[0].bias.copy_(model.layers[1].bias)
        torch._foreach_mul_(list(model.layers.parameters()), 0.9)
        w = model.layers[0].weight.data
        w /= w.norm(dim=1, keepdim=True) + 1
    fit(model, optimizer)
    return values(model)


def weight_normalises(kit):
    """Max-norm constraint after each step, as old Keras users write it."""
    model = kit.model(net())
    optimizer = kit.sgd(model.parameters(), lr=0.5)
    for step in range(3):
        fit(model, optimizer, 1, step)
        for layer in model.layers:
            w = layer.weight.data
            norm = w.norm(2, dim=1, keepdim=True)
            layer.weight.data = w * norm.clamp(max=0.5) / norm
    return values(model)


SCRIPTS = scripts_of(globals())
