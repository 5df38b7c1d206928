"""The ``unwall`` command."""

import typer

app = typer.Typer(help="Train models far larger than the accelerator's memory.", no_args_is_help=True, add_completion=False)


@app.callback()
def main() -> None:
    """Train models far larger than the accelerator's memory."""


@app.command()
def demo(steps: int = typer.Option(150, min=1, help="Training steps.")) -> None:
    """Train a small byte-level language model on unwall's own source files."""
    from unwall.demo import run  # torch is only imported when something is trained

    losses = run(steps)
    if not losses[-1] < losses[0]:
        raise typer.Exit(code=1)
