"""Loading a model of ``transformers`` on two ranks: ``python -m bench.weights``. Ranks may share a card.

``from_pretrained`` on every rank followed by ``shard``, against ``unwall.from_pretrained``, which reads each byte on the rank
that owns it. Rounds alternate and the best of each counts. Files come from the page cache, or from the disk with ``--cold``.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import unwall

RANKS = 2
PLANS = {
    "device": unwall.Plan(),
    "host": unwall.Plan(params="host", optimizer="host"),
}


def write_model(folder, options):
    """A Llama with weights of zeros and ones, in bf16: values make no difference to the time."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=options.width,
        intermediate_size=options.width * 3,
        num_hidden_layers=options.layers,
        num_attention_heads=16,
        vocab_size=32000,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.to(torch.bfloat16).to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
    model.tie_weights()
    model.save_pretrained(folder, max_shard_size="1GB")


def evict(folder):
    """Takes the files out of the page cache."""
    for path in Path(folder).glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def theirs(folder, plan):
    import transformers

    return unwall.shard(transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), plan)


def ours(folder, plan):
    return unwall.from_pretrained(folder, plan)


def measure(rank, folder, store, options, results):
    """One rank: the best seconds of each case."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(rank % torch.cuda.device_count())
        if torch.cuda.device_count() < RANKS:  # NCCL takes ranks of one card for ranks of different machines then
            os.environ |= {
                "NCCL_HOSTID": f"rank{rank}",
                "NCCL_NET": "Socket",
                "NCCL_SOCKET_IFNAME": "lo",
                "NCCL_IB_DISABLE": "1",
            }
    dist.init_process_group(backend, init_method=f"file://{store}/store", rank=rank, world_size=RANKS)
    best = {}
    for _ in range(options.rounds):
        for name, plan in PLANS.items():
            for way in (theirs, ours):
                if options.cold and rank == 0:
                    evict(folder)
                dist.barrier()
                begin = time.perf_counter()
                model = way(folder, plan)
                dist.barrier()
                seconds = time.perf_counter() - begin
                best[name, way.__name__] = min(best.get((name, way.__name__), seconds), seconds)
                del model
    if rank == 0:
        results.put(best)
    dist.barrier()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"layers": 16, "width": 1536, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as store:
        write_model(folder, options)
        nbytes = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        mp.start_processes(measure, args=(folder, store, options, results), nprocs=RANKS, start_method="spawn")
        best = results.get()
    print(f"{nbytes / 2**30:.2f} GiB of bf16 weights, {RANKS} ranks, {'cold' if options.cold else 'cached'} files")
    for name in PLANS:
        one, other = best[name, "theirs"], best[name, "ours"]
        print(
            f"{name:8} from_pretrained + shard {one:6.2f} s   unwall.from_pretrained {other:6.2f} s   {one / other:5.2f} times"
        )


if __name__ == "__main__":
    main()
