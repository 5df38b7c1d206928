"""The same: modules, hooks, parameters and gradients by hand, saving. See habit_tools.py."""

import copy
import io
import math

import torch
import torch.nn.functional as F
from habit_tools import WIDTH, batch, fit, loss_of, net, scripts_of, values
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.data import DataLoader, Dataset


def parametrizes(kit):
    class Symmetric(nn.Module):
        def forward(self, x):
            return x.triu() + x.triu(1).transpose(-1, -2)

    model = kit.model(net())
    parametrize.register_parametrization(model.layers[0], "weight", Symmetric())
    prune.l1_unstructured(model.head, "weight", amount=0.3)
    fit(model, kit.sgd(model.parameters(), lr=0.1), 3)
    prune.remove(model.head, "weight")
    parametrize.remove_parametrizations(model.layers[0], "weight")
    return [v.detach().float().clone() for v in (model.layers[0].weight, model.head.weight)]


def constrained(kit):
    model = kit.model(net())
    torch.manual_seed(1)
    parametrizations.spectral_norm(model.layers[2])
    parametrizations.orthogonal(model.layers[1])
    fit(model, kit.sgd(model.parameters(), lr=0.1), 3)
    return [model.layers[1].weight.detach().clone(), model.layers[2].weight.detach().clone()]


def ties(kit):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.body = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.out = nn.Linear(WIDTH, 10, bias=False)

        def forward(self, ids):
            return self.out(torch.tanh(self.body(self.embed(ids))))

    torch.manual_seed(0)
    model = Tied()
    model.out.weight = model.embed.weight
    model = kit.model(model)
    assert model.out.weight is model.embed.weight
    optimizer = kit.adam(model.parameters(), lr=0.01)
    ids = torch.arange(10).view(2, 5)
    for _ in range(3):
        F.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def autocasts(kit):
    model = kit.model(net())
    optimizer = kit.sgd(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x, y = batch(step)
            out = model(x)
            loss = F.mse_loss(out.float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return values(model)


class Rows(Dataset):
    def __init__(self, model=None):
        self.model = model

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return batch(i, 1)[0][0], batch(i, 1)[1][0]


def loads_data(kit):
    model = kit.model(net())
    optimizer = kit.adam(model.parameters(), lr=0.01)
    for _ in range(2):
        for x, y in DataLoader(Rows(model), batch_size=4, num_workers=1):
            optimizer.zero_grad(set_to_none=True)
            F.mse_loss(model(x).float(), y).backward()
            optimizer.step()
    return values(model)


def best_state(kit):
    model = kit.model(net())
    optimizer = kit.adam(model.parameters(), lr=0.05)
    best, state, logs = math.inf, None, []
    for step in range(4):
        fit(model, optimizer, 1, step)
        with torch.no_grad():
            now = loss_of(model, 60).item()
        logs.append(now)
        if now < best:
            best, state = now, copy.deepcopy(model.state_dict())
            other = {k: v.cpu().clone() for k, v in model.state_dict().items()}
    model.load_state_dict(state)
    assert not other or all(torch.equal(other[k], state[k]) for k in state)
    return [*values(model), torch.tensor(logs)]


def ema_class(kit):
    """As in ema_pytorch, timm and many repositories: shadow, apply, restore."""
    model = kit.model(net())
    optimizer = kit.adam(model.parameters(), lr=0.05)
    shadow = {n: p.data.clone() for n, p in model.named_parameters() if p.requires_grad}
    for step in range(3):
        fit(model, optimizer, 1, step)
        for n, p in model.named_parameters():
            if p.requires_grad:
                shadow[n] = 0.1 * p.data + 0.9 * shadow[n]
    backup = {}
    for n, p in model.named_parameters():
        backup[n] = p.data
        p.data = shadow[n]
    with torch.no_grad():
        seen = loss_of(model, 60)
    for n, p in model.named_parameters():
        p.data = backup[n]
    fit(model, optimizer, 1, 3)
    return [*values(model), seen, *list(shadow.values())]


def interpolates(kit):
    one, two = kit.model(net(1)), kit.model(net(2))
    seen = []
    mixed = kit.model(net(3))
    for share in (0.0, 0.3, 1.0):
        state = {
            n: (1 - share) * p.detach() + share * q.detach()
            for (n, p), (_, q) in zip(one.named_parameters(), two.named_parameters(), strict=False)
        }
        mixed.load_state_dict(state)
        with torch.no_grad():
            seen.append(loss_of(mixed, 0))
        seen.append(loss_of(lambda x, state=state: torch.func.functional_call(one, state, (x,)), 0).detach())
    return [torch.stack(seen), *values(mixed)]


def maml(kit):
    model = kit.model(net())
    optimizer = kit.sgd(model.parameters(), lr=0.1)
    for step in range(2):
        params = dict(model.named_parameters())
        inner = loss_of(model, step)
        grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
        fast = {n: p - 0.1 * g for (n, p), g in zip(params.items(), grads, strict=False)}
        loss_of(lambda x, fast=fast: torch.func.functional_call(model, fast, (x,)), step + 10).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def regularises(kit):
    """L1 and EWC-like penalties beside the loss."""
    model = kit.model(net())
    optimizer = kit.sgd(model.parameters(), lr=0.1)
    anchor = {n: p.detach().clone() for n, p in model.named_parameters()}
    loss_of(model, 9).backward()
    fisher = {n: p.grad.detach().clone() ** 2 for n, p in model.named_parameters()}
    optimizer.zero_grad()
    for step in range(3):
        penalty = sum((fisher[n] * (p - anchor[n]) ** 2).sum() for n, p in model.named_parameters())
        penalty = penalty + 1e-3 * sum(p.abs().sum() for p in model.parameters())
        (loss_of(model, step) + penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def gradient_surgery(kit):
    """PCGrad: gradients of two losses, one after the other, changed and put back."""
    model = kit.model(net())
    optimizer = kit.sgd(model.parameters(), lr=0.1)
    for step in range(2):
        found = []
        for part in range(2):
            optimizer.zero_grad()
            loss_of(model, 2 * step + part).backward()
            found.append([p.grad.clone() for p in model.parameters()])
        for p, a, b in zip(model.parameters(), *found, strict=False):
            dot = (a * b).sum()
            p.grad = a + b if dot >= 0 else a + b - dot / (b.norm() ** 2 + 1e-12) * b
        optimizer.step()
    return values(model)


def accumulates_by_hand(kit):
    model = kit.model(net())
    optimizer = kit.sgd(model.parameters(), lr=0.1)
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for step in range(3):
        loss_of(model, step).backward()
        for total, p in zip(sums, model.parameters(), strict=False):
            total += p.grad
        model.zero_grad()
    for total, p in zip(sums, model.parameters(), strict=False):
        p.grad = total / 3
    optimizer.step()
    return values(model) + sums


def logs_norms(kit):
    model = kit.model(net())
    optimizer = kit.adam(model.parameters(), lr=0.01)
    logs = []
    for step in range(2):
        loss_of(model, step).backward()
        total = 0.0
        for _n, p in model.named_parameters():
            if p.grad is not None:
                total += p.grad.data.norm(2).item() ** 2
                logs.append((p.grad.abs().max() / p.data.abs().max().clamp(min=1e-3)).item())
        logs.append(total**0.5)
        logs.append(float(nn.utils.clip_grad_norm_(model.parameters(), math.inf)))
        logs.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        optimizer.step()
        optimizer.zero_grad()
    return [*values(model), torch.tensor(logs)]


def lbfgs_closure(kit):
    model = kit.model(net())
    optimizer = kit.sgd(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure)) for _ in range(3)]
    return [*values(model), torch.tensor(losses)]


def swaps_head(kit):
    model = kit.model(net())
    optimizer = kit.sgd(model.parameters(), lr=0.1)
    fit(model, optimizer, 1)
    torch.manual_seed(5)
    model.head = nn.Linear(WIDTH, 4)
    for p in model.layers.parameters():
        p.requires_grad = False
    optimizer = kit.sgd(filter(lambda p: p.requires_grad, model.parameters()), lr=0.1)
    fit(model, optimizer, 2)
    return values(model)


def saves_and_resumes(kit):
    model = kit.model(net())
    optimizer = kit.adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    fit(model, optimizer)
    schedule.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    model = kit.model(net(9))
    optimizer = kit.adam(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    fit(model, optimizer, 2, 2)
    return values(model)


def spectral_by_hand(kit):
    """Power iteration, orthogonality penalty and an SVD of the weights."""
    model = kit.model(net())
    optimizer = kit.sgd(model.parameters(), lr=0.1)
    ranks = []
    for step in range(2):
        w = model.layers[0].weight
        gram = w @ w.t() - torch.eye(WIDTH)
        (loss_of(model, step) + 0.1 * gram.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        ranks.append(torch.linalg.svdvals(model.layers[0].weight.detach().float())[0])
    with torch.no_grad():
        u, s, v = torch.linalg.svd(model.layers[1].weight.float())
        model.layers[1].weight.copy_(u[:, :4] @ torch.diag(s[:4]) @ v[:4])
    return values(model) + ranks


def per_sample(kit):
    model = kit.model(net())
    x, y = batch(0)
    params = {n: p.detach() for n, p in model.named_parameters()}

    def one(params, x, y):
        return F.mse_loss(torch.func.functional_call(model, params, (x[None],))[0].float(), y)

    grads = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0))(params, x, y)
    saliency = x.clone().requires_grad_()
    model(saliency).float().sum().backward()
    return [g.float() for g in grads.values()] + [saliency.grad.clone()]


def set_grad_none_loop(kit):
    model = kit.model(net())
    optimizer = kit.adam(model.parameters(), lr=0.01)
    for step in range(3):
        for p in model.parameters():
            p.grad = None
        loss_of(model, step).backward()
        if step == 1:
            for p in model.layers[0].parameters():
                p.grad.detach_()
                p.grad.zero_()
        optimizer.step()
    return values(model)


def ema_state_dict(kit):
    model = kit.model(net())
    optimizer = kit.adam(model.parameters(), lr=0.05)
    ema = copy.deepcopy(model.state_dict())
    for step in range(3):
        fit(model, optimizer, 1, step)
        for k, v in model.state_dict().items():
            ema[k].mul_(0.9).add_(v, alpha=0.1)
    model.load_state_dict(ema)
    return values(model)


SCRIPTS = scripts_of(globals())
