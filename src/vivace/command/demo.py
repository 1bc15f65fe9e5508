"""`vivace demo`: the main job on real data, from tuning to a report, trained both ways."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any

from vivace.command.console import Lasting
from vivace.command.endings import trained, tuned
from vivace.command.progress import TrainProgress, TuneProgress
from vivace.errors import FolderError
from vivace.ledger import Ratio
from vivace.live.training import train
from vivace.plan import Plan
from vivace.recipes import RECIPES
from vivace.reporting import report
from vivace.training.training import Run
from vivace.tuning import tune
from vivace.words import duration

JOB = "photographs"
UNEXPLAINED_TIMES = 1.15  # between a whole training's ratio and its steps' interval


def demo(out: Path, quiet: bool = False) -> tuple[int, dict[str, Any]]:
    """Tune a recipe, train it as it is and under the plan, and report, below `out`.

    Returns the exit code and the documents of `tune` and of both trainings, as far as it came: ``tune``,
    ``as_it_is`` and ``plan``. Raises FolderError where `out` holds a training run already.
    """
    folders = {"as it is": out / "reference", "the plan": out / "train"}
    for folder in folders.values():
        if folder.is_dir() and any(folder.iterdir()):
            raise FolderError(f"'{folder}' holds a training already: name another folder with --out")
    console = Lasting(stderr=True, highlight=False, quiet=quiet)
    console.print(f"[bold]1 of 2  tune[/]: {RECIPES[JOB].data}, a small MobileNet, two minutes")
    command = f"vivace tune {JOB} --budget fast --out {shlex.quote(str(out / 'tune'))}"
    with TuneProgress(quiet) as listener:
        result = tune(JOB, budget="fast", out=out / "tune", on_event=listener, command=command)
    tuned(result, JOB, console)
    if result.interrupted:
        return 130, {"tune": result.to_dict()}
    plans = {"as it is": Plan()} | ({"the plan": result.plan_path} if len(result.plan) else {})
    both = " in strict fp32 and with the plan" if len(plans) > 1 else ": no plan was found for this machine"
    console.print(f"\n[bold]2 of 2  train[/] to the end, as it is{both}")
    runs, documents = {}, {"tune": result.to_dict()}
    for name, plan in plans.items():
        with TrainProgress(quiet) as progress:
            runs[name] = run = train(JOB, plan, out=folders[name], on_event=progress)
        documents["plan" if name == "the plan" else "as_it_is"] = run.to_dict()
        if run.interrupted:
            trained(run, console)
            return run.exit_code, documents
    page = report(folders["as it is"])
    if len(plans) == 1:
        trained(runs["as it is"], console, page=page)
        return result.exit_code, documents
    page = report(folders["the plan"], beside=folders["as it is"])
    trained(runs["the plan"], console, beside=runs["as it is"], page=page)
    for line in compared(runs["as it is"], runs["the plan"], RECIPES[JOB].validated, result.speedup):
        console.print(line, markup=False)
    return result.exit_code, documents


def compared(reference: Run, plan: Run, validated: int, steps: Ratio) -> list[str]:
    """Both trainings side by side; accuracies with their standard error over `validated` samples.

    One training after the other says nothing of a machine that others use as well: where the ratio of the two
    lies outside what `steps`, measured in turn, explain, that is said.
    """
    lines = [
        f"{name}    {duration(run.seconds):>8}    accuracy {_accuracy(run.metric, validated)}"
        for name, run in (("as it is", reference), ("the plan", plan))
    ]
    ratio = reference.seconds / plan.seconds
    lines.append(f"one run each, warm-up and evaluations included: {ratio:.2f}x as fast")
    if ratio > UNEXPLAINED_TIMES * steps.high or UNEXPLAINED_TIMES * ratio < min(1.0, steps.low):
        told = f"{steps.estimate:.2f}x as fast ({steps.low:.2f}-{steps.high:.2f})"
        lines.append(f"the machine was not alike in both: measured in turn, the plan's steps are {told}")
    return lines


def _accuracy(share: float | None, count: int) -> str:
    if share is None:
        return "not measured"
    return f"{share:.3f} +- {math.sqrt(share * (1 - share) / count):.3f}"
