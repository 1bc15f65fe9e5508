"""`vivace demo`: the main job on real data, from tuning to a report."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from vivace.command.endings import trained, tuned
from vivace.command.progress import TrainProgress, TuneProgress
from vivace.errors import FolderError
from vivace.reporting import report
from vivace.training.training import train
from vivace.tuning import tune

JOB = "digits"


def demo(out: Path, quiet: bool = False) -> int:
    """Tune, verify, train and report the digits recipe below `out`; returns the exit code.

    Raises FolderError where `out` holds a training run already.
    """
    folder = out / "train"
    if folder.is_dir() and any(folder.iterdir()):
        raise FolderError(f"'{folder}' holds a training already: name another folder with --out")
    console = Console(stderr=True, highlight=False, quiet=quiet)
    console.print("[bold]1 of 3  tune[/]: handwritten digits, a small residual network, two minutes")
    command = f"vivace tune {JOB} --budget fast --out {out / 'tune'}"
    with TuneProgress(quiet) as listener:
        result = tune(JOB, budget="fast", out=out / "tune", on_event=listener, command=command)
    if result.interrupted:
        return 130
    console.print("\n[bold]2 of 3  train[/] with the plan")
    with TrainProgress(quiet) as progress:
        run = train(JOB, result.plan, out=folder, on_event=progress)
    if run.interrupted:
        return run.exit_code
    console.print("\n[bold]3 of 3  report[/]")
    report(folder)
    report(out / "tune")
    trained(run, console)
    tuned(result, JOB, console)
    return 0
