"""What is in ``OUT`` after the last step: a directory that ``transformers`` (or ``peft``) loads."""

import contextlib
from pathlib import Path
from typing import Any

from unwall.checkpoint.weights_out import export_weights
from unwall.json_files import read_json
from unwall.shards.collectives import Ranks
from unwall.train.errors import TrainError
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


def export_tokenizer(run: Path, out: Path) -> str | None:
    """Puts the tokenizer of a run beside the weights of one of its checkpoints. Gives what stands in the way of that."""
    said = read_json(run / "run.json", TrainError)
    options = said.get("options") if isinstance(said, dict) else None
    if not isinstance(options, dict) or not isinstance(options.get("model"), str):
        return None  # another program's run
    model = Path(options["model"])
    folder = Path(options.get("tokenizer") or (model.parent if model.suffix == ".json" else model))
    try:
        import transformers
    except ImportError:
        return "the tokenizer is not written: that needs transformers"
    for place in (run, folder):  # a run that has ended holds its own
        with contextlib.suppress(Exception):  # whatever transformers makes of a directory without a tokenizer
            transformers.AutoTokenizer.from_pretrained(str(place), local_files_only=True).save_pretrained(str(out))
            return None
    where = "" if folder.is_absolute() else "; call this in the directory that the run was started in"
    return (
        f"the tokenizer is not written: {folder}, where the run had it from, holds none that transformers can load now{where}"
    )
