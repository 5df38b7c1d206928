"""How much of a real card is taken where the plan does not say. Run on a GPU machine, alone on its card:
``PYTHONPATH=src python3 -m pytest tests/runtime/test_gpu_memory.py -m gpu``."""

import gc

import pytest
import torch
from torch import nn

import unwall
from unwall.plans import Plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")]

WIDTH, LAYERS = 2048, 48
MODEL_BYTES = 2 * LAYERS * WIDTH * WIDTH
"""In bf16: 384 MiB."""
MIB = 1 << 20


@pytest.fixture(autouse=True)
def clean_card():
    gc.collect()
    torch.cuda.empty_cache()
    yield
    _taken.clear()  # also after a failure, whose traceback holds the test's variables
    gc.collect()
    torch.cuda.empty_cache()


_taken: list[torch.Tensor] = []


def build():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def occupy(left_bytes):
    """Takes the card, all but ``left_bytes``."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    _taken.append(torch.empty(free - left_bytes, dtype=torch.uint8, device="cuda"))


class Run:
    def __init__(self, plan=None):
        self.model = unwall.shard(build(), plan or Plan(params="host", optimizer="host"))
        self.optimizer = unwall.AdamW(self.model.parameters(), lr=1e-4)

    def step(self, rows):
        """The loss, and the most that unwall held on the device."""
        unwall.stats(self.model).reset()
        torch.manual_seed(rows)
        loss = self.model(torch.randn(rows, WIDTH, device="cuda")).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), unwall.stats(self.model).tiers["device"].peak_bytes

    def fetched(self):
        return unwall.stats(self.model).links["host>device"].moved_bytes


def test_with_room_the_second_step_fetches_each_group_once():
    run = Run()
    _, first = run.step(64)
    assert first < MODEL_BYTES
    run.step(64)
    assert run.fetched() < 1.2 * MODEL_BYTES
    run.step(64)
    assert run.fetched() < 1.2 * MODEL_BYTES


def test_on_a_card_that_is_nearly_full_the_model_is_never_whole_on_the_device():
    plain = Run()
    wanted = [plain.step(64)[0] for _ in range(4)]
    del plain
    gc.collect()
    torch.cuda.empty_cache()
    run = Run()
    occupy(420 * MIB)
    found = [run.step(64) for _ in range(4)]
    assert [loss for loss, _ in found] == wanted
    assert max(peak for _, peak in found) < MODEL_BYTES


def test_activations_that_grow_push_the_cache_out():
    """A batch whose activations need what the cache had: it runs, at the latest when it is tried again."""
    run = Run()
    occupy(2000 * MIB)
    for _ in range(3):
        _, roomy = run.step(64)
    assert roomy > 0.8 * MODEL_BYTES
    rows = 1300 * MIB // (LAYERS * WIDTH * 2)  # each layer keeps its output, in bf16; the loss and copies in fp32 come on top
    run.step(rows // 2)
    try:
        run.step(rows)
    except torch.OutOfMemoryError:  # in the user's own code, where nothing can be tried again for them
        run.optimizer.zero_grad()
    gc.collect()
    _, tight = run.step(rows)
    assert tight < roomy


def test_an_out_of_memory_in_the_users_code_is_over_with_the_next_try():
    run, failed = Run(), False
    occupy(1500 * MIB)
    for _ in range(2):
        run.step(64)
    try:
        run.step(100_000)
    except torch.OutOfMemoryError:
        failed = True
    assert failed
    gc.collect()
    loss, careful = run.step(64)
    assert careful < MODEL_BYTES
    assert loss == loss


def test_memory_that_a_fetch_does_not_find_is_taken_from_the_cache():
    """Less is free than even the first pass may hold: what is cached goes, and the fetch is tried again."""
    run = Run()
    for _ in range(2):
        run.step(64)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_stats()["num_ooms"]
    occupy(150 * MIB)
    with torch.no_grad():
        found = run.model(torch.ones(4, WIDTH, device="cuda"))
    assert torch.cuda.memory_stats()["num_ooms"] > before
    assert found.isfinite().all()
    _taken.clear()
    torch.cuda.empty_cache()
    run.step(64)


def test_the_users_own_peak_is_left_alone():
    run = Run()
    run.step(64)
    torch.cuda.reset_peak_memory_stats()
    held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    del held
    before = torch.cuda.max_memory_allocated()
    run.step(4)
    assert torch.cuda.max_memory_allocated() >= before
