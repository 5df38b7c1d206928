"""All parameters of a Hugging Face model, from a local directory to a local directory, with checkpoints on the way.

The model is never whole anywhere: its weights are streamed to the tiers of the plan and back. Started again with the same
--out, it goes on after the last checkpoint. `unwall train` does this and more from the command line; this is the loop by hand.

Run it:  python examples/full_fine_tuning.py                                  (a tiny Llama of random weights)
         python examples/full_fine_tuning.py --model DIR --out DIR --text FILE    (needs the package transformers)
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import unwall


def tiny_model(folder: Path) -> Path:
    """A directory such as one gets from the Hub, without the Hub."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def tokens_of(text: str, model: Path) -> torch.Tensor:
    if not any(model.glob("tokenizer*")):
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()  # the tiny model reads bytes
    return AutoTokenizer.from_pretrained(model)(text, return_tensors="pt").input_ids[0]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--model", type=Path)
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--text", type=Path, default=Path(__file__))
    arguments.add_argument("--steps", type=int, default=12)
    arguments.add_argument("--seq", type=int, default=64)
    asked = arguments.parse_args()

    with tempfile.TemporaryDirectory() as scratch:
        path = asked.model or tiny_model(Path(scratch) / "model")
        out = asked.out or Path(scratch) / "out"

        model = unwall.from_pretrained(path, plan=unwall.Plan(params="host", optimizer="host"))
        model.train()
        optimizer = unwall.AdamW(model.parameters(), lr=3e-3 if asked.model is None else 1e-5, max_grad_norm=1.0)
        checkpoints, done = out / "checkpoints", 0
        if checkpoints.exists():
            done = unwall.load(checkpoints, model, optimizer)["step"]

        device = next(model.parameters()).device
        tokens = tokens_of(asked.text.read_text(), path).to(device)
        for step in range(done, asked.steps):
            generator = torch.Generator().manual_seed(step)  # the same samples after a restart
            starts = torch.randint(len(tokens) - asked.seq, (4,), generator=generator).tolist()
            batch = torch.stack([tokens[start : start + asked.seq] for start in starts])
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 3 == 0 or step == asked.steps - 1:
                print(f"step {step + 1}: loss {loss.item():.3f}")
                unwall.save(checkpoints, model, optimizer, extra={"step": step + 1}, keep=2)

        unwall.export_weights(model, out / "model")  # transformers' from_pretrained loads it
        print(f"wrote {sorted(file.name for file in (out / 'model').iterdir())}")


if __name__ == "__main__":
    main()
