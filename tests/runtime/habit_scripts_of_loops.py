"""The same: loops of all kinds. See habit_tools.py."""

import torch
from habit_tools import WIDTH, batch, fit, loss_of, net, scripts_of, values
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn


def swa(kit):
    torch.manual_seed(0)
    model = kit.model(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)))
    avg, ema = AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    opt = kit.sgd(model.parameters(), lr=0.1)
    sch = SWALR(opt, swa_lr=0.05)
    for s in range(3):
        fit(model, opt, 1, s)
        avg.update_parameters(model)
        ema.update_parameters(model)
        sch.step()
    update_bn([batch(i)[0] for i in range(3)], avg)
    return values(avg, ema) + [b.float().clone() for b in avg.buffers()]


def module_ops(kit):
    model = kit.model(net())
    seq = nn.Sequential(*list(model.layers))  # re-wrapping layers of the model
    x, _ = batch(0)
    a = seq(x).detach().float()
    feats = nn.Sequential(model.layers[0], nn.ReLU())(x).detach().float()
    sub = model.get_submodule("layers.1")
    p = model.get_parameter("layers.1.weight")
    assert sub.weight is p
    model.register_buffer("count", torch.zeros(1))
    model.count += 1
    model.train(False)
    model.train()
    names = [n for n, _ in model.named_parameters(prefix="m")]
    kids = [n for n, _ in model.named_children()]
    fit(model, kit.sgd(model.parameters(), lr=0.1))
    return [*values(model), a, feats, model.count.clone(), torch.tensor([len(names), len(kids)])]


def seq_optimizer_two(kit):
    """Two optimizers for two parts of one model."""
    model = kit.model(net())
    one, two = (
        kit.sgd(model.layers.parameters(), lr=0.1),
        kit.adam([*model.norm.parameters(), *model.head.parameters()], lr=0.01),
    )
    for s in range(3):
        one.zero_grad()
        two.zero_grad()
        loss_of(model, s).backward()
        if s % 2 == 0:
            one.step()
        two.step()
    return values(model)


def alternates(kit):
    """Coordinate descent: gradients of the other part are left and must not leak."""
    model = kit.model(net())
    one, two = kit.sgd(model.layers.parameters(), lr=0.1), kit.sgd([*model.norm.parameters(), *model.head.parameters()], lr=0.1)
    for s in range(4):
        opt = (one, two)[s % 2]
        opt.zero_grad()
        loss_of(model, s).backward()
        opt.step()
    return values(model)


def zero_half(kit):
    """zero_grad of the model only sometimes; accumulation with a remainder."""
    model = kit.model(net())
    opt = kit.sgd(model.parameters(), lr=0.1)
    for s in range(5):
        (loss_of(model, s) / 2).backward()
        if (s + 1) % 2 == 0 or s == 4:
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
            opt.step()
            opt.zero_grad()
    return values(model)


def no_grad_forward_then_train(kit):
    model = kit.model(net())
    opt = kit.sgd(model.parameters(), lr=0.1)
    with torch.no_grad():
        emb = model.features(batch(0)[0])
    head = nn.Linear(WIDTH, 2)
    with torch.no_grad():
        head.weight.copy_(model.head.weight[:2])
        head.bias.copy_(model.head.bias[:2])
    o = torch.optim.SGD(head.parameters(), lr=0.1)
    head(emb.float().clone()).sum().backward()
    o.step()
    fit(model, opt)
    return values(model, head)


def retain(kit):
    model = kit.model(net())
    opt = kit.sgd(model.parameters(), lr=0.1)
    loss = loss_of(model, 0)
    loss.backward(retain_graph=True)
    loss.backward()
    opt.step()
    opt.zero_grad()
    x, _y = batch(1)
    out = model(x)
    out.float()[0].sum().backward(retain_graph=True)
    out.float()[1].sum().backward()
    opt.step()
    opt.zero_grad()
    return values(model)


def nan_skip(kit):
    model = kit.model(net())
    opt = kit.sgd(model.parameters(), lr=0.1)
    for s in range(3):
        opt.zero_grad()
        (loss_of(model, s) * (float("nan") if s == 1 else 1)).backward()
        if any(not torch.isfinite(p.grad).all() for p in model.parameters()):
            continue
        opt.step()
    return values(model)


def lr_per_param(kit):
    model = kit.model(net())
    opt = kit.sgd([{"params": [p], "lr": 0.01 * (i + 1)} for i, p in enumerate(model.parameters())], lr=0.1)
    fit(model, opt)
    for g in opt.param_groups:
        g["lr"] *= 0.5
    fit(model, opt, 1, 2)
    return values(model)


def param_dict_keys(kit):
    """Dictionaries and sets with parameters as keys, over steps."""
    model = kit.model(net())
    opt = kit.sgd(model.parameters(), lr=0.1)
    names = {p: n for n, p in model.named_parameters()}
    seen = set(map(id, model.parameters()))
    moments = {p: torch.zeros_like(p) for p in model.parameters()}
    for s in range(2):
        opt.zero_grad()
        loss_of(model, s).backward()
        for g in opt.param_groups:
            for p in g["params"]:
                assert names[p]
                assert id(p) in seen
                moments[p].mul_(0.9).add_(p.grad)
                p.grad.copy_(moments[p])
        opt.step()
    return values(model) + list(moments.values())


def hand_sgd(kit):
    """No optimizer at all."""
    model = kit.model(net())
    for s in range(3):
        loss_of(model, s).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    return values(model)


def hand_sgd_zero(kit):
    model = kit.model(net())
    for s in range(3):
        loss_of(model, s).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.1)
                p.grad.zero_()
    return values(model)


def hand_sgd_data(kit):
    model = kit.model(net())
    for s in range(3):
        model.zero_grad()
        loss_of(model, s).backward()
        for p in model.parameters():
            p.data.add_(p.grad.data, alpha=-0.1)
    return values(model)


def jac(kit):
    model = kit.model(net())
    x, _ = batch(0)
    j = torch.autograd.functional.jacobian(lambda v: model(v).float(), x[:2])
    h = torch.autograd.functional.vhp(lambda v: model(v).float().square().sum(), x[:2], torch.ones(2, WIDTH))[1]
    return [j, h]


def dropout_eval(kit):
    torch.manual_seed(0)
    model = kit.model(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 4)))
    opt = kit.sgd(model.parameters(), lr=0.1)
    for s in range(3):
        torch.manual_seed(s)
        fit(model, opt, 1, s)
    model.eval()
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            m.train()
    torch.manual_seed(9)
    mc = torch.stack([model(batch(0)[0]).detach().float() for _ in range(3)])
    return [*values(model), mc]


def to_vector(kit):
    model = kit.model(net())
    opt = kit.sgd(model.parameters(), lr=0.1)
    start = parameters_to_vector(model.parameters()).detach().clone()
    fit(model, opt)
    now = parameters_to_vector(model.parameters()).detach()
    vector_to_parameters(start + 0.5 * (now - start), model.parameters())
    fit(model, opt, 1, 2)
    opt.zero_grad()
    loss_of(model, 5).backward()
    flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).clone()
    opt.zero_grad()
    return [*values(model), flat.float()]


SCRIPTS = scripts_of(globals())
