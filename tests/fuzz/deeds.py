"""What the loops of ``fuzz.ranks`` do between backward and step, and between one step and the next.

Each deed gets a trainer, what was drawn, and the moment. With plain PyTorch those that only read, or put back what was there,
do nothing.
"""

import contextlib
import dataclasses
import random
from dataclasses import dataclass
from pathlib import Path

import torch

import unwall

PLACES = (("host", "host"), ("device", "device"), ("device", "host"), ("disk", "disk"))


@dataclass(frozen=True)
class Moment:
    key: str
    """Different for each deed of a script."""
    step: int


def with_gradient(trainer, share, moment):
    return [param for param in trainer.some(share, moment.key) if param.grad is not None]


def read_gradients(trainer, deed, moment):
    for param in with_gradient(trainer, 1.0, moment):
        param.grad.norm()


def scale_in_place(trainer, deed, moment):
    for param in with_gradient(trainer, deed.share, moment):
        param.grad.mul_(0.5)


def assign_scaled(trainer, deed, moment):
    for param in with_gradient(trainer, deed.share, moment):
        param.grad = 2 * param.grad


def assign(trainer, deed, moment):
    for param in trainer.some(deed.share, moment.key):
        if param.requires_grad:
            param.grad = torch.full(param.shape, 0.01)


def drop(trainer, deed, moment):
    for param in trainer.some(deed.share, moment.key):
        trainer.drop(param)


def zero_in_place(trainer, deed, moment):
    for param in with_gradient(trainer, deed.share, moment):
        param.grad.zero_()


def add_through_data(trainer, deed, moment):
    for param in with_gradient(trainer, deed.share, moment):
        param.grad.data.add_(0.01)


def clip_with_torch(trainer, deed, moment):
    torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), deed.value)


def clip_with_optimizer(trainer, deed, moment):
    """One of two optimizers would clip its own half; one that clips by itself is not asked to."""
    if len(trainer.optimizers) == 1 and trainer.case.clip is None:
        trainer.clip(deed.value)


def zero_grad(trainer, deed, moment):
    trainer.zero_all(to_none=bool(deed.value))


def zero_grad_of_the_model(trainer, deed, moment):
    trainer.zero_model()


def set_rate(trainer, deed, moment):
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = deed.value


def evaluate(trainer, deed, moment):
    trainer.evaluate(moment.step)


def write_values(trainer, deed, moment):
    with torch.no_grad():
        for param in trainer.some(deed.share, moment.key):
            param.mul_(0.9)


def write_trained_values(trainer, deed, moment):
    with torch.no_grad():
        for param in trainer.some(deed.share, moment.key):
            if param.requires_grad:
                param.mul_(0.7)


def write_lent_values(trainer, deed, moment):
    params = trainer.some(deed.share, moment.key)
    plainly = trainer.is_plain or not params
    with contextlib.nullcontext() if plainly else unwall.full_params(params, write=True), torch.no_grad():
        for param in params:
            param.mul_(0.8)


def read_values(trainer, deed, moment):
    if not trainer.is_plain:
        trainer.values()


def state_dict(trainer, deed, moment):
    if not trainer.is_plain:
        trainer.model.state_dict()


def state_dict_of_optimizers(trainer, deed, moment):
    if not trainer.is_plain:
        for optimizer in trainer.optimizers:
            optimizer.state_dict()


def load_state_dict(trainer, deed, moment):
    if not trainer.is_plain:
        trainer.model.load_state_dict(trainer.model.state_dict())


def load_state_dict_of_optimizers(trainer, deed, moment):
    if not trainer.is_plain:
        for optimizer in trainer.optimizers:
            optimizer.load_state_dict(optimizer.state_dict())


def save_and_load(trainer, deed, moment):
    """What is written in between is gone after the load."""
    if trainer.is_plain or len(trainer.optimizers) > 1:
        return
    (optimizer,) = trainer.optimizers
    path = Path(trainer.saves) / moment.key
    unwall.save(path, trainer.model, optimizer)
    with torch.no_grad():
        for param in trainer.model.parameters():
            param.mul_(1.5)
    unwall.load(path, trainer.model, optimizer)


def move(trainer, deed, moment):
    """Other tiers, of those that the plan has; one with budgets stays."""
    if trainer.is_plain or trainer.plan.device_bytes or trainer.plan.host_bytes:
        return
    places = PLACES if trainer.plan.disk else PLACES[:-1]
    params, optimizer = random.Random(f"{trainer.case.seed}-{moment.key}").choice(places)
    unwall.move(trainer.model, dataclasses.replace(trainer.plan, params=params, optimizer=optimizer))


DEEDS = {
    "read gradients": read_gradients,
    "scale gradients in place": scale_in_place,
    "assign scaled gradients": assign_scaled,
    "assign gradients": assign,
    "drop gradients": drop,
    "zero gradients in place": zero_in_place,
    "add to gradients through data": add_through_data,
    "clip with torch": clip_with_torch,
    "clip with the optimizer": clip_with_optimizer,
    "zero_grad": zero_grad,
    "zero_grad of the model": zero_grad_of_the_model,
    "set the rate": set_rate,
    "evaluate": evaluate,
    "write values": write_values,
    "write trained values": write_trained_values,
    "write lent values": write_lent_values,
    "read values": read_values,
    "state_dict": state_dict,
    "state_dict of the optimizer": state_dict_of_optimizers,
    "load its state_dict": load_state_dict,
    "load the optimizer's state_dict": load_state_dict_of_optimizers,
    "save and load": save_and_load,
    "move": move,
}
