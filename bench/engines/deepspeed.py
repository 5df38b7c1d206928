"""DeepSpeed ZeRO-3: resident, or with parameters and optimizer state on the host or on NVMe.

``sub_group_size``, ``pipeline`` and ``buffer_count`` can be given behind the engine's name. ``pipeline`` (overlapped NVMe reads
and writes) is off because DeepSpeed 0.19.8 stopped with an assertion or made no progress with it.
"""

from typing import Any

import torch

from bench.engines import Job, Running, require
from bench.workload import ADAMW, Decoder


def start(job: Job) -> Running:
    deepspeed = require("deepspeed")
    config = settings(job)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Decoder(job.shape)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step() -> torch.Tensor:
        loss: torch.Tensor = engine(*job.data)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Running(step=step, version=deepspeed.__version__)


def settings(job: Job) -> dict[str, Any]:
    """DeepSpeed's configuration for a job."""
    options = job.options
    zero: dict[str, Any] = {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": int(5e8),
        "sub_group_size": int(float(options.get("sub_group_size", "1e8"))),
        "stage3_prefetch_bucket_size": int(5e7),
        "stage3_param_persistence_threshold": int(1e5),
        "stage3_max_live_parameters": int(1e9),
        "stage3_max_reuse_distance": int(1e9),
    }
    place = options.get("offload")
    if place:
        zero["offload_optimizer"] = {"device": place, "pin_memory": True}
        zero["offload_param"] = {"device": place, "pin_memory": True}
    if place == "nvme":
        pipeline = options.get("pipeline", "0") != "0"
        path = str(job.scratch)
        buffers = int(options.get("buffer_count", "12"))
        # A buffer holds one parameter, so it is as large as the largest, with room for DeepSpeed's rounding.
        largest = max(job.shape.vocab, 3 * job.shape.hidden, job.shape.ffn) * job.shape.hidden
        zero["offload_optimizer"] |= {
            "nvme_path": path, "buffer_count": buffers, "pipeline_read": pipeline, "pipeline_write": pipeline,
        }  # fmt: skip
        zero["offload_param"] |= {"nvme_path": path, "buffer_count": 8, "buffer_size": int(largest * 1.4)}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.batch,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        "aio": {
            "block_size": 8 << 20,
            "queue_depth": 64,
            "intra_op_parallelism": 4,
            "single_submit": False,
            "overlap_events": True,
        },
        "steps_per_print": 10**9,
    }
    if job.clip is not None:
        config["gradient_clipping"] = job.clip
    return config
