"""`vivace demo`: the main job on real data, from tuning to a report."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from vivace.command.progress import TrainProgress, TuneProgress, epilogue
from vivace.errors import FolderError
from vivace.reporting import report, terminal
from vivace.tuning import tune
from vivace.watching import train

JOB = "digits"


def demo(out: Path, quiet: bool = False) -> int:
    """Tune, verify, train and report the digits recipe below `out`; returns the exit code.

    Raises FolderError where `out` holds a training run already.
    """
    trained = out / "train"
    if trained.is_dir() and any(trained.iterdir()):
        raise FolderError(f"'{trained}' holds a training already: name another folder with --out")
    console = Console(stderr=True, highlight=False, quiet=quiet)
    console.print("[bold]1 of 3  tune[/]: handwritten digits, a small residual network, two minutes")
    command = f"vivace tune {JOB} --budget fast --out {out / 'tune'}"
    with TuneProgress(quiet) as listener:
        result = tune(JOB, budget="fast", out=out / "tune", on_event=listener, command=command)
    if result.interrupted:
        return 130
    console.print("\n[bold]2 of 3  train[/] with the plan")
    with TrainProgress(quiet) as progress:
        run = train(JOB, result.plan, out=trained, on_event=progress)
    if run.interrupted:
        return run.exit_code
    console.print("\n[bold]3 of 3  report[/]")
    report(trained)
    report(out / "tune")
    terminal(out / "tune", console)
    console.print(f"\naccuracy on held-out digits: {run.metric:.4f}")
    epilogue(result, JOB, console)
    return 0
