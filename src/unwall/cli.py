"""The ``unwall`` command."""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from unwall._version import __version__
from unwall.terminal import console, open_streams, progress, said_plainly
from unwall.train.signals import ended_by, ending, terminating
from unwall.train.start import process_age_s, without_collector

_FIRST = ("train", "plan", "report", "export", "inspect", "probe", "demo")


class _Commands(TyperGroup):
    """In the order in which people come to need them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))


app = typer.Typer(add_completion=False, cls=_Commands)


@contextmanager
def _command() -> Iterator[None]:
    """What a command does: its errors are said plainly, and Ctrl-C ends it also while torch is imported."""
    with said_plainly(), ending(signal.SIGINT):
        yield


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"unwall {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 - its callback has done it all
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Train models far larger than the accelerator's memory."""
    open_streams()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 40,
    out: Annotated[Path, typer.Option(help="The directory for the log and the report.")] = Path("unwall-demo"),
) -> None:
    """Train a byte-level language model on unwall's own source files, far beyond its budgets, with plain PyTorch beside it."""
    with _command():
        with without_collector(), ending(signal.SIGINT):
            from unwall.demo import run  # torch is only imported when something is trained

        run(steps, out)


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(help="The directory of a run, as `unwall train --out` writes it.")],
    out: Annotated[Path | None, typer.Option(help="The file to write. Default: report.html in the directory.")] = None,
) -> None:
    """Write one HTML page about a run: loss, speed, memory per tier, the time line of a step, the plan against it."""
    with _command():
        from unwall.report.page import write_report

        typer.echo(str(write_report(run_dir, out)))


@app.command()
def probe(
    disk: Annotated[str | None, typer.Option(help="A directory on the drive to measure.")] = None,
    refresh: Annotated[bool, typer.Option(help="Measure again, whatever is remembered.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure this machine: links, host memory, disk, matrix products. Takes a few seconds, once."""
    with _command():
        from unwall.planner.probe import probe as measure
        from unwall.planner.report import hardware_table

        with progress() as told:
            found = measure(disk=disk, refresh=refresh, progress=told)
        if as_json:
            print(json.dumps(found.to_dict(), indent=2))
        else:
            console().print(hardware_table(found))


@app.command(context_settings={"ignore_unknown_options": False})
def plan(
    model: Annotated[str, typer.Argument(help="config.json or its directory, module:function, or a shape such as 80x10240.")],
    gpus: Annotated[int | None, typer.Option(help="Devices used per node. Default: all of them.")] = None,
    nodes: Annotated[int, typer.Option(help="Machines.")] = 1,
    hardware: Annotated[str | None, typer.Option(help="A machine's name, or a .json file. Default: this machine.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples per step, over all devices. Default: one per device.")] = None,
    seq: Annotated[int, typer.Option(help="Tokens per sample.")] = 1024,
    device_bytes: Annotated[str | None, typer.Option(help="Per device, activations too, such as 20GiB.")] = None,
    host_bytes: Annotated[str | None, typer.Option(help="What it may hold in host memory, per device.")] = None,
    disk_bytes: Annotated[str | None, typer.Option(help="What it may hold on disk, per device.")] = None,
    disk: Annotated[str | None, typer.Option(help="A directory on a fast drive.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32.")] = None,
    clip: Annotated[bool, typer.Option(help="Gradients are clipped to a norm.")] = True,
    objective: Annotated[str, typer.Option(help="speed, or memory: the least on the device.")] = "speed",
    vocab: Annotated[int, typer.Option(help="With a shape: tokens of the vocabulary.")] = 0,
    activations: Annotated[str | None, typer.Option(help="keep, auto, recompute or host. Default: the fastest.")] = None,
    offload_activations: Annotated[
        bool, typer.Option("--offload-activations", help="Inputs of blocks wait on the host: --activations host.")
    ] = False,
    tiles: Annotated[int | None, typer.Option(help="Tiles that each weight is read in. Default: where it must be.")] = None,
    sequence_tiles: Annotated[
        int | None, typer.Option(help="Parts of the sequence that MLPs run in. Default: as needed.")
    ] = None,
    states: Annotated[str, typer.Option(help="exact, or lean: 5 bytes per parameter instead of 12.")] = "exact",
    plot: Annotated[Path | None, typer.Option(help="Draw bytes per tier and seconds per resource to this .svg file.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Run the sharding code for each rank, without memory.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Bytes by term, seconds by resource, what lost.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Choose stage, tiers and passes for a model on a machine, and predict bytes and speed."""
    with _command():
        _plan(
            model, gpus=gpus, nodes=nodes, hardware=hardware, batch=batch, seq=seq, device_bytes=device_bytes,
            host_bytes=host_bytes, disk_bytes=disk_bytes, disk=disk, dtype=dtype, clip=clip, objective=objective, vocab=vocab,
            activations=activations, offload_activations=offload_activations, tiles=tiles, sequence_tiles=sequence_tiles,
            states=states, plot=plot, dry_run=dry_run, as_json=as_json, verbose=verbose,
        )  # fmt: skip


def _plan(
    model: str, *, gpus: int | None, nodes: int, hardware: str | None, dtype: str | None, plot: Path | None, dry_run: bool,
    as_json: bool, verbose: bool, vocab: int, **options: Any,
) -> None:  # fmt: skip
    if plot is not None and plot.suffix != ".svg":
        raise ValueError(f"--plot writes an .svg file, got {plot.name!r}")
    if plot is not None and (plot.is_dir() or not plot.parent.is_dir()):
        raise ValueError(f"--plot {plot}: {'is a directory' if plot.is_dir() else 'no such directory'}; give a file in one")
    with without_collector(), ending(signal.SIGINT):
        from unwall.planner.choose import check_objective
        from unwall.planner.public import kept_of, machine_of
        from unwall.planner.public import plan as choose
        from unwall.planner.read import read_dtype, read_model
        from unwall.planner.report import dry_run_table, short, tables, to_dict

    check_objective(options["objective"])  # before a large model is looked at
    kept_of(options["activations"], options["offload_activations"])
    outline = read_model(model, vocab)
    with progress() as told:
        machine, ranks = machine_of(hardware, None, options["disk"], told, read_dtype(dtype))
    if hardware is not None or gpus is not None or nodes != 1:
        machine = machine.with_nodes(nodes, gpus)
        ranks = machine.devices
    found = choose(outline, hardware=machine, ranks=ranks, compute_dtype=read_dtype(dtype), compare=verbose, **options)
    checked = None
    if dry_run:
        from unwall.planner.dryrun import dry_run as rehearse

        checked = rehearse(outline, found)
    if plot is not None:
        from unwall.planner.draw import plan_picture

        plot.write_text(plan_picture(found))
    if as_json:
        print(json.dumps(to_dict(found) | ({} if checked is None else {"dry_run": checked.to_dict()}), indent=2))
        return
    shown = console()
    shown.print(tables(found) if verbose else short(found), soft_wrap=not verbose)
    if checked is not None:
        shown.print(dry_run_table(checked))


class _TrainCommand(TyperCommand):
    """``--data`` and ``--eval-data`` take several files, as a shell writes out ``*.jsonl``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from unwall.train.launch import spread

        return super().parse_args(ctx, spread(args, ("--data", "--eval-data")))


@app.command(cls=_TrainCommand)
def train(
    model: Annotated[str, typer.Option(help="A directory of transformers, or a config file: then the weights are random.")],
    data: Annotated[list[str], typer.Option(help=".txt, .jsonl or .parquet files, or datasets directories.")],
    out: Annotated[str, typer.Option(help="Where everything goes. The same command again goes on from there.")],
    tokenizer: Annotated[str | None, typer.Option(help="Its directory. Default: the model's.")] = None,
    seq: Annotated[int, typer.Option(help="Tokens per sequence: samples are packed to this length.")] = 1024,
    batch: Annotated[int, typer.Option(help="Sequences per step, over all devices.")] = 8,
    steps: Annotated[int | None, typer.Option(help="Steps. Default: one pass over the data.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate. Default: 2e-5, with --lora 2e-4.")] = None,
    warmup: Annotated[float, typer.Option(help="Steps until it is reached, or below 1 a share of all steps.")] = 0.03,
    schedule: Annotated[str, typer.Option(help="cosine, linear or constant.")] = "cosine",
    weight_decay: Annotated[float, typer.Option(help="Of matrices.")] = 0.0,
    clip: Annotated[float, typer.Option(help="The norm gradients are clipped to. 0: none.")] = 1.0,
    accumulate: Annotated[int | None, typer.Option(help="Passes per step. Default: the planner chooses.")] = None,
    eval_data: Annotated[list[str] | None, typer.Option(help="As --data, to evaluate on.")] = None,
    eval_every: Annotated[int | None, typer.Option(help="Steps between evaluations. Default: only at the end.")] = None,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints. 0: none, only the result.")] = 500,
    keep: Annotated[int, typer.Option(help="Checkpoints that stay.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the order of samples, and of random weights.")] = 0,
    plan: Annotated[str, typer.Option(help="auto, or a .toml file with fields of unwall.Plan.")] = "auto",
    device_bytes: Annotated[str | None, typer.Option(help="Per device, activations too, such as 20GiB.")] = None,
    host_bytes: Annotated[str | None, typer.Option(help="What it may hold in host memory, per device.")] = None,
    disk: Annotated[str | None, typer.Option(help="A directory on a fast drive, for what does not fit.")] = None,
    lora: Annotated[bool, typer.Option("--lora", help="Train adapters; the model itself stays as it is.")] = False,
    lora_rank: Annotated[int, typer.Option(help="Of the adapters.")] = 16,
    lora_alpha: Annotated[float | None, typer.Option(help="Their scale. Default: twice the rank.")] = None,
    lora_dropout: Annotated[float, typer.Option(help="Dropout in front of them.")] = 0.0,
    lora_targets: Annotated[str, typer.Option(help="Names of modules, separated by commas.")] = "all-linear",
    states: Annotated[str, typer.Option(help="exact: fp32 master and moments; lean: 5 bytes instead of 12.")] = "exact",
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write OUT/tensorboard.")] = False,
    nproc: Annotated[int | None, typer.Option(help="Processes to start on this machine. Under torchrun leave it out.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="A sample that cannot be read ends the run.")] = False,
    on_nonfinite: Annotated[str, typer.Option(help="A loss that is not finite: stop, or skip the step.")] = "stop",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="The plan in detail.")] = False,
) -> None:
    """Fine-tune a causal language model, or train one from a config, on files. Goes on where it was stopped."""
    given = dict(locals()) | {"data": tuple(data), "eval_data": tuple(eval_data or ())}
    with said_plainly():
        try:
            with terminating():
                code = _train(nproc, given)
        except KeyboardInterrupt as error:  # before the first step
            code = ended_by(error)
    if code:
        raise typer.Exit(code=code)


def _train(nproc: int | None, given: dict[str, Any]) -> int:
    from unwall.train.ahead import begin_ahead
    from unwall.train.launch import check_launcher, launch, under_launcher
    from unwall.train.measuring import end_measuring
    from unwall.train.options import Options

    options = Options(**given)
    check_launcher(nproc)
    if nproc is not None and not under_launcher():
        return launch(nproc, sys.argv[1:])
    try:
        begin_ahead(options)
        with without_collector(), terminating():
            from unwall.train.command import run
        with progress() as told:
            return run(options, told, process_age_s())
    finally:
        end_measuring()


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a directory of them: then the newest complete one.")],
    out: Annotated[Path, typer.Argument(help="The directory to write.")],
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16 or float32. Default: what the model was given in.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="The largest file, such as 5GB.")] = "5GB",
) -> None:
    """Write a checkpoint's weights as a directory that transformers loads. Needs no accelerator and little memory."""
    with _command():
        from unwall.checkpoint.offline import export_checkpoint
        from unwall.planner.read import read_dtype

        for path in export_checkpoint(_of_run(checkpoint), out, read_dtype(dtype), max_shard_size):
            typer.echo(str(path))
        if (run := _run_around(checkpoint)) is not None:
            from unwall.train.result import export_tokenizer

            if (missing := export_tokenizer(run, out)) is not None:
                typer.echo(missing, err=True)


@app.command()
def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a directory of them: then the newest complete one.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read everything and check its checksums.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what is in a checkpoint: step, tensors, bytes per file, the plan it was written with."""
    with _command():
        from unwall.checkpoint.inspection import inspect_checkpoint, tables

        found = inspect_checkpoint(_of_run(checkpoint), verify)
        if as_json:
            print(json.dumps(found.to_dict(), indent=2))
        else:
            console().print(tables(found))


def _of_run(path: Path) -> Path:
    """The checkpoints of a directory that ``unwall train --out`` made; any other path as it is."""
    if path.is_file():
        raise ValueError(f"{path}: is a file; give the directory of a checkpoint, or the one that `unwall train --out` wrote")
    run = _run_around(path)
    if run is None:
        return path
    if any((run / "checkpoints").glob("adapters-*")):
        raise ValueError(f"{run}: a run with --lora, whose checkpoints hold adapters alone; {run} itself is what peft loads")
    return path if run == path.absolute().parent.parent else run / "checkpoints"


def _run_around(path: Path) -> Path | None:
    """The directory that ``unwall train --out`` made, of itself, its checkpoints or one of them."""
    path = path.absolute()
    around = [path]
    if path.name == "checkpoints":
        around.append(path.parent)
    if path.parent.name == "checkpoints":
        around.append(path.parent.parent)
    return next((run for run in around if (run / "run.json").is_file()), None)


if __name__ == "__main__":
    app()
