"""What is in ``OUT`` after the last step: a directory that ``transformers`` (or ``peft``) loads."""

from pathlib import Path
from typing import Any

from unwall.checkpoint.weights_out import export_weights
from unwall.shards.collectives import Ranks
from unwall.train.lora import write_adapter_files
from unwall.train.model import Trained
from unwall.train.options import Options
from unwall.train.world import together


def write_result(options: Options, trained: Trained, tokenizer: Any, ranks: Ranks) -> None:
    """All ranks call it together."""
    out = Path(options.out)
    if options.lora:
        write_adapter_files(trained.model, out, options.model, ranks.rank)
    else:
        export_weights(trained.base, out)

    def write_tokenizer() -> None:
        if ranks.rank == 0:
            tokenizer.save_pretrained(str(out))

    together(ranks, write_tokenizer)
