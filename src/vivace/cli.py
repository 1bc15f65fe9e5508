"""The command line. With `--json`, standard output holds one document and nothing else."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vivace.errors import AnswerIsNo, VivaceError

if TYPE_CHECKING:
    from vivace.machine import Machine

HELP = """Makes a PyTorch training job faster, proves that it is still the same model, and trains it.

JOB is path/to/file.py:name, package.module:name, or the name of a built-in recipe."""

app = typer.Typer(
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
JobName = Annotated[str, typer.Argument(metavar="JOB", help="file.py:name, module:name, or a recipe")]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON document on standard output")]
Quiet = Annotated[bool, typer.Option("--quiet", help="no progress, no tables")]
Debug = Annotated[bool, typer.Option("--debug", help="show tracebacks")]


class Screen:
    """Where a command shows things: standard error; the real standard output is kept for the document."""

    def __init__(self, as_json: bool, quiet: bool, debug: bool) -> None:
        self.as_json, self.quiet, self.debug = as_json, quiet, debug
        self.exit_code = 0
        sys.stdout.flush()
        self._output = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # what a job prints goes to standard error

    def document(self, content: dict[str, Any]) -> None:
        """Print the command's JSON document, if it was asked for."""
        if self.as_json:
            self._output.write(json.dumps(_finite(content), ensure_ascii=False, default=str) + "\n")
            self._output.flush()

    def fail(self, kind: str, message: str) -> None:
        """The error's document, where documents are asked for, and its sentence."""
        self.document({"error": {"kind": kind, "message": message}})
        print(f"vivace: {message}", file=sys.stderr, flush=True)

    def show(self, draw: Callable[[Any], None]) -> None:
        """Let `draw` print tables on a console, unless quiet."""
        if not self.quiet:
            from rich.console import Console

            draw(Console(stderr=True, highlight=False))

    def say(self, text: str) -> None:
        """One line on standard error, unless quiet."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)


def _finite(content: Any) -> Any:
    """`content` with None for every number that JSON has no word for."""
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


@contextmanager
def screen(as_json: bool, quiet: bool, debug: bool) -> Iterator[Screen]:
    """Run a command's body; every error becomes one sentence and an exit code."""
    current = Screen(as_json, quiet, debug)
    try:
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)  # a job must not wait for the terminal
        yield current
        code = current.exit_code
    except VivaceError as error:
        if debug:
            raise
        current.fail(error.kind, str(error))
        code = error.exit_code
    except KeyboardInterrupt:
        current.fail("KeyboardInterrupt", "interrupted")
        code = 130
    except BaseException as error:  # SystemExit too: a job that calls exit() must not end with its code
        if debug:
            raise
        current.fail(
            "InternalError",
            f"a fault of Vivace's own, {type(error).__name__}: {error}; --debug shows where",
        )
        code = 2
    if code:
        raise typer.Exit(code)


@app.command()
def inspect(
    measure: Annotated[
        bool, typer.Option("--measure", help="measure the ceilings afresh, in about 50 seconds")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """This machine: devices, what serves them, limits, what is missing, and what it can reach."""
    with screen(as_json, quiet, debug) as out:
        from vivace.inspect import inspect as gather
        from vivace.inspect import measuring
        from vivace.inspect.backends import look_closer
        from vivace.inspect.table import draw, draw_ceilings

        machine = look_closer(gather())
        surveys = measuring.stored(machine)
        if measure:
            from vivace.progress import MeasureProgress

            with MeasureProgress(quiet) as progress:
                surveys |= measuring.measure(machine, progress=progress)
            machine = dataclasses.replace(machine, ceilings=gather().ceilings)
        figures = {
            kind: measuring.vendor_figures(machine, kind, _catalogued(machine, kind)) for kind in surveys
        }
        out.document(measuring.document(machine, surveys, figures))
        out.show(lambda console: draw(machine, console))
        for kind, survey in surveys.items():
            out.show(partial(draw_ceilings, kind, survey, figures[kind]))
        if not surveys:
            out.say("\nnext: vivace inspect --measure")
        if any(survey.interrupted for survey in surveys.values()):
            out.say("interrupted: what was measured until then is kept")
            out.exit_code = 130


def _catalogued(machine: Machine, kind: str) -> Any:
    """The catalogue's entry of the first device of a kind; `None` where it has none."""
    from vivace.advise.catalogue import find_gpu

    device = next(device for device in machine.devices if device.kind == kind)
    try:
        return find_gpu(device.name)
    except VivaceError:
        return None


@app.command()
def tune(
    job: JobName,
    budget: Annotated[str, typer.Option(help="fast, balanced, max, or seconds")] = "balanced",
    memory: Annotated[str | None, typer.Option(help="largest peak memory, such as 20GiB")] = None,
    allow: Annotated[str, typer.Option(help="exact, rounding or semantics")] = "rounding",
    out: Annotated[Path, typer.Option(help="folder for plan, ledger and report")] = Path("runs/tune"),
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Find the fastest plan that trains the same model."""
    with screen(as_json, quiet, debug) as shown:
        from vivace.progress import TuneProgress, epilogue
        from vivace.tune import tune as run

        command = f"vivace tune {job} --budget {budget} --allow {allow}" + (
            f" --memory {memory}" if memory else ""
        )
        with TuneProgress(quiet) as progress:
            result = run(
                job, budget=budget, memory=memory, allow=allow, out=out, on_event=progress, command=command
            )
        shown.document(result.to_dict())
        shown.show(lambda console: epilogue(result, job, console))
        shown.exit_code = 130 if result.interrupted else 0


@app.command()
def train(
    job: JobName,
    plan: Annotated[Path | None, typer.Option(help="plan file; left out, strict fp32")] = None,
    out: Annotated[Path, typer.Option(help="run folder")] = Path("runs/train"),
    resume: Annotated[bool, typer.Option("--resume", help="go on from the newest checkpoint")] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="delete the checkpoints, train from zero")
    ] = False,
    seed: Annotated[int, typer.Option(help="of weights, data order and all randomness")] = 0,
    max_steps: Annotated[int | None, typer.Option(help="stop after so many steps in all")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train under a plan, without losing work."""
    with screen(as_json, quiet, debug) as shown:
        from vivace.inspect.gather import require_torch

        require_torch()  # before anything imports it
        from vivace.engine.training import train as run
        from vivace.progress import TrainProgress

        with TrainProgress(quiet) as progress:
            result = run(
                job,
                plan,
                out=out,
                resume=resume,
                restart=restart,
                seed=seed,
                max_steps=max_steps,
                on_event=progress,
            )
        shown.document(result.to_dict())
        shown.exit_code = result.exit_code


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="folder for everything")] = Path("runs/demo"),
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """The main job on real data: tune, verify, train and report handwritten digits."""
    with screen(False, quiet, debug) as shown:
        from vivace.demo import demo as run

        shown.exit_code = run(out, quiet)


@app.command()
def verify(
    job: JobName,
    plan: Annotated[Path, typer.Option(help="plan file")],
    metric: Annotated[bool, typer.Option("--metric", help="train to the end and compare the metric")] = False,
    seeds: Annotated[int, typer.Option(help="seeds of the metric's test")] = 5,
    margin: Annotated[float | None, typer.Option(help="metric difference that does not matter")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Is the plan's promise kept? Exit code 1 if not."""
    with screen(as_json, quiet, debug) as out:
        from vivace.verify import verify as run
        from vivace.verify.table import draw

        verdict = run(job, plan, metric=metric, seeds=seeds, margin=margin)
        out.document(verdict.to_dict())
        out.show(lambda console: draw(verdict, console))
        out.exit_code = 0 if verdict.kept else AnswerIsNo.exit_code


@app.command()
def report(folder: Path, as_json: AsJson = False, quiet: Quiet = False, debug: Debug = False) -> None:
    """Show a run, and write it as one HTML page."""
    with screen(as_json, quiet, debug) as out:
        from vivace.report import report as run
        from vivace.report import terminal

        page = run(folder)
        out.document({"report_path": str(page)})
        out.show(lambda console: terminal(folder, console))


@app.command()
def techniques(as_json: AsJson = False, quiet: Quiet = False, debug: Debug = False) -> None:
    """List the techniques that a plan can hold."""
    with screen(as_json, quiet, debug) as out:
        from vivace import registry

        cards = [
            {
                "name": cls.name,
                "stage": cls.card.stage.name,
                "promise": cls.card.numerics.name.lower(),
                "devices": list(cls.card.devices),
                "summary": cls.card.summary,
                "source": cls.card.source,
            }
            for cls in registry.everything()
        ]
        out.document({"techniques": cards})
        out.show(lambda console: _draw_cards(cards, console))


def _draw_cards(cards: list[dict[str, Any]], console: Any) -> None:
    from rich.table import Table

    table = Table(box=None)
    for column in ("technique", "stage", "promise", "devices", "what it does"):
        table.add_column(column)
    for card in cards:
        table.add_row(
            card["name"], card["stage"], card["promise"], " ".join(card["devices"]), card["summary"]
        )
    console.print(table)


def main() -> None:
    """The entry point; bad options end with one sentence and exit code 2 like every other bad input."""
    try:
        code = app(standalone_mode=False)
    except Exception as error:  # the usage errors of click, whichever package brings it
        explain = getattr(error, "format_message", None)
        if explain is None:
            raise
        if len(sys.argv) < 2:  # no command: the error is the help text
            print(explain(), file=sys.stderr)
        else:
            context = getattr(error, "ctx", None)
            command = context.command_path if context is not None else "vivace"
            message = " ".join(explain().split()).rstrip(".")
            Screen("--json" in sys.argv, False, False).fail("UsageError", f"{message}; see {command} --help")
        code = 2
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
