"""The command line. With `--json`, standard output holds one document and nothing else."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import os
import shlex
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vivace import __version__
from vivace.command.mistakes import meant
from vivace.command.options import Address, AsJson, Debug, Details, JobName, OnDevice, Quiet, app
from vivace.command.screen import Screen, screen
from vivace.errors import AnswerIsNo, InputError, VivaceError

if TYPE_CHECKING:
    from vivace.machine import Machine

RankTimeout = Annotated[
    str, typer.Option(metavar="TIME", help="of several ranks: how long to wait for one that hangs or is gone")
]
Changed = Annotated[
    str, typer.Option(metavar="ok", help="resume though source or hyper-parameters have changed")
]
OnNan = Annotated[str, typer.Option(help="where the loss is no finite number: rollback (once) or stop")]
Restart = Annotated[bool, typer.Option("--restart", help="delete checkpoints and results, train from zero")]
WatchShare = Annotated[
    float, typer.Option(max=1.0, help="share of the time to repeat steps under the reference; 0: none")
]
OnBroken = Annotated[
    str, typer.Option(help="where a repeated step is not the same: stop, fallback or ignore")
]
TuneIt = Annotated[bool, typer.Option("--tune", help="find a plan on the run's own steps, and go over to it")]
Engine = Annotated[
    str | None, typer.Option(metavar="ray", help="several ranks, on a Ray cluster, without torchrun")
]
LaunchTime = Annotated[float | None, typer.Option(help="microseconds of a launch (inspect --measure)")]
Allowed = Annotated[str, typer.Option(help="largest change of numbers: exact, rounding or semantics")]
JobOrScript = Annotated[
    list[str], typer.Argument(metavar="JOB | -- COMMAND", help="JOB, or -- python train.py")
]
Deadline = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="stop with a checkpoint before it ran so long, such as 2h"),
]


def _seconds(option: str, text: str | None) -> float | None:
    """An option's time, such as ``90s`` or ``1h30m``, in seconds. Raises InputError, also without a unit."""
    from vivace.words import SECONDS, amount

    seconds = amount(text, SECONDS) if text is not None else None
    if seconds is None and text is not None:
        raise InputError(f"{option} is '{text}'; it must be a time such as 90s, 30m or 2h")
    return seconds


def _require_not_ranks(num_ranks: int) -> None:
    """Raises InputError where several ranks were started, each of which would tune its own script."""
    if num_ranks > 1:
        raise InputError(
            f"{num_ranks} ranks were started, and tune itself starts a script: write "
            "vivace tune -- torchrun ... for that; a JOB is tuned on ranks"
        )


def _import_torch() -> None:
    """Import what trains. Raises InputError where torch is missing or too old."""
    from vivace.inspection.gather import require_torch
    from vivace.job import importing
    from vivace.processes.waiting import waiting

    os.environ.update(waiting())
    require_torch()
    with importing():
        importlib.import_module("vivace.live.training")
    gc.freeze()  # what stays to the end is not looked through for garbage, at the end either


def _print_version(wanted: bool) -> None:
    if wanted:
        with screen(False, False, False) as out:
            out.text(f"vivace {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None: ...


@app.command()
def inspect(
    measure: Annotated[
        bool, typer.Option("--measure", help="measure the ceilings afresh, in about 50 seconds")
    ] = False,
    fits: Annotated[
        str | None,
        typer.Option("--fits", metavar="JOB", help="which cards a job fits on, without running it"),
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="with --fits: under this plan")] = None,
    ranks: Annotated[
        int, typer.Option(min=1, help="with --fits: on so many cards that divide the weights")
    ] = 1,
    device: OnDevice = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """This machine: devices, what serves them, what is missing.

    With --measure also the speeds that it reaches.
    """
    with screen(as_json, quiet, debug, device) as out:
        if fits is not None and measure:
            raise InputError("--fits runs nothing, and --measure measures this machine: give one of them")
        if fits is not None:
            _show_fits(fits, plan, ranks, out)
            return
        if plan is not None or ranks > 1:
            raise InputError("--plan and --ranks say how the job of --fits trains: name one")
        from vivace.inspection import apis, measuring
        from vivace.inspection import inspect as gather
        from vivace.inspection.backends import look_closer
        from vivace.inspection.table import draw, draw_apis, draw_ceilings

        machine = look_closer(gather())
        surveys, found, ended = measuring.stored(machine), apis.stored(machine), True
        if measure:
            from vivace.command.progress import MeasureProgress

            with MeasureProgress(quiet) as progress:
                surveys |= measuring.measure(machine, progress=progress)
                ended = not any(survey.interrupted for survey in surveys.values())
                if ended:
                    measured, ended = apis.measure_and_keep(machine, progress=progress)
                    found = apis.stored(machine) | measured
        machine = dataclasses.replace(machine, ceilings=measuring.known(machine, surveys))
        promised = partial(measuring.vendor_figures, machine)
        figures = {kind: promised(kind, _catalogued(machine, kind)) for kind in surveys}
        steps = apis.next_steps(machine)
        out.document(measuring.document(machine, surveys, figures) | apis.document(found, steps))
        out.show(lambda console: draw(machine, console))
        for kind, survey in surveys.items():
            out.show(partial(draw_ceilings, kind, survey, figures[kind]))
        out.show(partial(draw_apis, found, surveys, steps if measure else {}))
        if not surveys:
            out.say("\nnext: vivace inspect --measure")
        if not ended:
            out.say("interrupted: what was measured until then is kept")
            out.exit_code = 130


def _show_fits(reference: str, plan: Path | None, ranks: int, out: Screen) -> None:
    from vivace.advising.catalogue import load_catalogue
    from vivace.inspection.gather import require_torch

    require_torch()  # before anything imports it
    from vivace.memory.fits import draw, fits
    from vivace.memory.on_gpus import load_as_on_gpus
    from vivace.plan import Plan

    cards = {name: gpu.usable_bytes for name, gpu in load_catalogue().items() if gpu.trains}
    found = fits(load_as_on_gpus(reference), cards, None if plan is None else Plan.load(plan), ranks=ranks)
    out.document({"fits": [fit.to_dict() for fit in found]})
    out.show(partial(draw, found))


def _catalogued(machine: Machine, kind: str) -> Any:
    """The catalogue's entry of the first device of a kind; `None` where it has none."""
    from vivace.advising.catalogue import find_gpu

    device = next(device for device in machine.devices if device.kind == kind)
    try:
        return find_gpu(device.name)
    except VivaceError:
        return None


@app.command()
def profile(
    words: JobOrScript,
    plan: Annotated[Path | None, typer.Option(help="profile the job under this plan")] = None,
    out: Annotated[Path, typer.Option(help="folder for page, trace and record")] = Path("runs/profile"),
    device: OnDevice = None,
    details: Details = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Where a step's time and memory go, and what is wrong.

    After -- stands any script, unmodified: vivace profile -- python train.py --epochs 3
    """
    with screen(as_json, quiet, debug, device, one_speaks=True) as shown:
        from vivace.inspection.gather import require_torch

        require_torch()  # before anything imports it
        from vivace.command.progress import short
        from vivace.profiling import profile as run
        from vivace.profiling.table import draw

        a_script = "--" in sys.argv or len(words) > 1
        if a_script and plan is not None:
            raise InputError(f"--plan {plan} needs a JOB: the plan of a script is the script")
        result = run(
            None if a_script else words[0],
            plan,
            command=words if a_script else (),
            out=out,
            script_output=shown.script_output,
            script_input=shown.script_input,
        )
        shown.document(result.to_dict())
        brief = dataclasses.replace(result, page_path=Path(short(str(result.page_path))))
        shown.show(lambda console: draw(brief, console, details=details))
        shown.exit_code = result.exit_code


@app.command()
def tune(
    words: JobOrScript,
    budget: Annotated[
        str, typer.Option(help="auto (a tenth of the training), fast, balanced, max, or a time such as 5m")
    ] = "auto",
    runs: Annotated[int, typer.Option(help="how often you will train it")] = 1,
    steps: Annotated[int | None, typer.Option(help="of one training, where its data have no length")] = None,
    memory: Annotated[str | None, typer.Option(help="largest peak memory, such as 20GiB, or auto")] = None,
    allow: Allowed = "rounding",
    out: Annotated[Path, typer.Option(help="folder for plan, ledger and report")] = Path("runs/tune"),
    device: OnDevice = None,
    details: Details = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Find the fastest plan that trains the same model.

    After -- stands any script, unmodified: it is run until the plan is found, and nothing it writes is kept.
    """
    script = "--" in sys.argv or len(words) > 1
    with screen(as_json, quiet, debug, device, one_speaks=True, forks=not script) as shown:
        from vivace.training.crew import num_ranks

        if script:
            _require_not_ranks(num_ranks())
            needing = {
                "--memory": memory,
                "--runs": runs > 1,
                "--device": device,
                "--allow": allow != "rounding",
                "--steps": steps is not None,
            }
            _refuse_options_of_a_job([option for option, given in needing.items() if given])
            _tune_script(words, budget, out, details, shown)
            return
        job = words[0]
        from vivace.command.endings import tuned
        from vivace.command.progress import TuneProgress
        from vivace.tuning import tune as run

        told: dict[str, object] = {"budget": budget, "allow": allow, "runs": runs if runs > 1 else None}
        told |= {"steps": steps, "memory": memory, "out": out, "device": device}
        command = again(job, num_ranks(), **told)
        with TuneProgress(shown.quiet) as progress:
            result = run(
                job,
                budget=budget,
                runs=runs,
                steps=steps,
                memory=memory,
                allow=allow,
                out=out,
                on_event=progress,
                command=command,
            )
        shown.document(result.to_dict())
        shown.show(lambda console: tuned(result, job, console, details=details, command=command))
        shown.exit_code = result.exit_code


def again(job: str, ranks: int, **options: object) -> str:
    """The command of a search, by which its report says how it is done again."""
    launcher = ["torchrun", "--nproc-per-node", str(ranks), "-m"] if ranks > 1 else []
    given = [(f"--{name}", str(value)) for name, value in options.items() if value is not None]
    return shlex.join([*launcher, "vivace", "tune", job, *(word for pair in given for word in pair)])


def _refuse_options_of_a_job(given: list[str]) -> None:
    """Raises InputError for the first option that a script has no use for."""
    if given:
        raise InputError(f"{given[0]} needs a JOB: a script is tuned as it is, on its own device and steps")


def _tune_script(words: list[str], budget: str, out: Path, details: bool, shown: Screen) -> None:
    from vivace.command.endings import searched
    from vivace.live.search import BUDGET_SECONDS, search
    from vivace.measuring.budget import parse_budget

    seconds = parse_budget(budget) or BUDGET_SECONDS
    result = search(words, out=out, budget_seconds=seconds, script_input=shown.script_input)
    shown.document(result.to_dict())
    shown.show(lambda console: searched(result, shlex.join(words), out, console, details=details))
    shown.exit_code = result.exit_code


@app.command()
def train(
    job: JobName,
    plan: Annotated[Path | None, typer.Option(help="plan file; left out, strict fp32")] = None,
    out: Annotated[Path, typer.Option(help="run folder")] = Path("runs/train"),
    resume: Annotated[bool, typer.Option("--resume", help="go on from the newest checkpoint")] = False,
    restart: Restart = False,
    seed: Annotated[int | None, typer.Option(help="of all randomness; a resumed run keeps its own")] = None,
    max_steps: Annotated[int | None, typer.Option(help="stop after so many steps in all")] = None,
    changed: Changed = "refuse",
    on_nan: OnNan = "rollback",
    deadline: Deadline = None,
    rank_timeout: RankTimeout = "5m",
    watch: WatchShare = 0.01,
    on_broken: OnBroken = "stop",
    tune: TuneIt = False,
    engine: Engine = None,
    address: Address = None,
    ranks: Annotated[int | None, typer.Option(help="with --engine ray; left out, one a GPU or node")] = None,
    device: OnDevice = None,
    details: Details = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train under a plan, without losing work."""
    with screen(as_json and os.environ.get("RANK", "0") == "0", quiet, debug, device) as shown:
        if engine is not None and device is not None:
            raise InputError(f"Ray chooses each rank's device: leave --device {device} out")
        _import_torch()
        from vivace.command.endings import trained
        from vivace.command.progress import TrainProgress
        from vivace.live.training import train as run

        with TrainProgress(quiet) as progress:
            result = run(
                job,
                plan,
                out=out,
                resume=resume,
                restart=restart,
                seed=seed,
                max_steps=max_steps,
                changed=changed,  # type: ignore[arg-type]
                on_nan=on_nan,  # type: ignore[arg-type]
                deadline_seconds=_seconds("--deadline", deadline),
                rank_timeout_seconds=_seconds("--rank-timeout", rank_timeout) or 0.0,
                on_event=progress,
                watch=watch,
                on_broken=on_broken,  # type: ignore[arg-type]  # train checks it
                tune=tune,
                engine=engine,
                address=address,
                ranks=ranks,
            )
        shown.document(result.to_dict())
        if progress.ended:
            shown.show(lambda console: trained(result, console, details=details))
        shown.exit_code = result.exit_code


@app.command()
def run(
    words: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="-- python train.py")],
    plan: Annotated[Path | None, typer.Option(help="act under this plan from the first steps on")] = None,
    out: Annotated[Path, typer.Option(help="folder for plan and ledger")] = Path("runs/run"),
    device: OnDevice = None,
    details: Details = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """A script as it is, made faster while it trains.

    vivace run -- python train.py --epochs 90

    What may act is proven on copies of the script's own step first, and timed on its steps in turn with the
    script as it is. Output, input, files and exit code are the script's own; a few lines at the end say what
    was saved.
    """
    with screen(as_json, quiet, debug, device) as shown:
        from vivace.live.launch import become
        from vivace.live.launch import run as run_beside

        if as_json:
            result = run_beside(
                words,
                plan,
                out=out,
                script_output=shown.script_output,
                script_input=shown.script_input,
                quiet=quiet,
                details=details,
            )
            if os.environ.get("RANK", "0") == "0":  # of ranks, whose document is one
                shown.document(result.to_dict())
            shown.exit_code = result.exit_code
            return
        shown.give_back()
        become(words, plan, out, quiet=quiet, details=details)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="folder for everything")] = Path("runs/demo"),
    device: OnDevice = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """A small network on real photographs: tuned, verified, trained."""
    with screen(as_json, quiet, debug, device) as shown:
        _import_torch()
        from vivace.command.demo import demo as run

        shown.exit_code, found = run(out, quiet)
        shown.document(found)


@app.command()
def verify(
    job: JobName,
    plan: Annotated[Path | None, typer.Option(help="plan file")] = None,
    against: Annotated[
        str | None, typer.Option(metavar="JOB", help="the original, of which this job is an edit")
    ] = None,
    precision: Annotated[
        str, typer.Option(help="how coarsely an edit may round: float32, tf32, bfloat16, float16")
    ] = "float32",
    metric: Annotated[bool, typer.Option("--metric", help="train to the end and compare the metric")] = False,
    seeds: Annotated[int, typer.Option(help="seeds of the metric's test at most")] = 8,
    margin: Annotated[float | None, typer.Option(help="metric difference that does not matter")] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="about so long, such as 2m or 300; left out, full effort"),
    ] = None,
    device: OnDevice = None,
    details: Details = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Is it the same model under a plan, or after an edit?

    Exit code 1 if not, or if that cannot be told.
    """
    with screen(as_json, quiet, debug, device, one_speaks=True, forks=True) as out:
        from vivace.command.progress import VerifyProgress
        from vivace.verifying import verify as run
        from vivace.verifying.table import draw

        with VerifyProgress(out.quiet) as progress:
            verdict = run(
                job,
                plan,
                against=against,
                precision=precision,
                metric=metric,
                seeds=seeds,
                margin=margin,
                budget=budget,
                on_event=progress,
            )
        out.document(verdict.to_dict())
        shown = str(plan) if plan is not None else ""
        out.show(lambda console: draw(verdict, job, shown, console, details=details))
        interrupted = verdict.metric is not None and verdict.metric["interrupted"]
        out.exit_code = 130 if interrupted else 0 if verdict.kept else AnswerIsNo.exit_code


@app.command()
def advise(
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="JOB, a saved profile, or a model")] = None,
    epochs: Annotated[float | None, typer.Option(help="length of the training")] = None,
    steps: Annotated[float | None, typer.Option(help="length in steps of the job's batch")] = None,
    target: Annotated[str | None, typer.Option(help="length in samples, such as 90M")] = None,
    budget_usd: Annotated[float | None, typer.Option(help="most dollars")] = None,
    deadline: Annotated[str | None, typer.Option(help="most time, such as 12h or 3d")] = None,
    probability: Annotated[float, typer.Option(help="chance with which both must be kept")] = 0.8,
    gpus: Annotated[str | None, typer.Option(help="cards by name, separated by commas")] = None,
    most: Annotated[int, typer.Option(help="most GPUs of an offer")] = 8,
    precision: Annotated[str, typer.Option(help="auto (mixed), profiled, fp32, tf32 or amp")] = "auto",
    channels_last: Annotated[
        bool | None, typer.Option("--channels-last/--no-channels-last", help="images in that memory order")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="a plan, which says precision and memory order")] = None,
    launch_us: LaunchTime = None,
    electricity: Annotated[float, typer.Option(help="US dollars a kWh")] = 0.25,
    prices: Annotated[Path | None, typer.Option(help="your own prices, over the shipped ones")] = None,
    catalogue: Annotated[Path | None, typer.Option(help="your own cards, over the shipped ones")] = None,
    on: Annotated[str | None, typer.Option(metavar="CARD", help="what could this card train?")] = None,
    software: Annotated[
        bool, typer.Option("--software", help="which framework and compute API on this machine?")
    ] = False,
    records: Annotated[Path | None, typer.Option(help="with --software: folder of your own records")] = None,
    out: Annotated[Path | None, typer.Option(help="folder for the page")] = None,
    device: OnDevice = None,
    details: Details = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Time, cost and fit of a job on cards that are not here.

    Exit code 1 if none meets budget and deadline, or no record tells of the job.
    """
    with screen(as_json, quiet, debug, device) as shown:
        from vivace.advising import answer, on_software

        options = {
            "epochs": epochs,
            "steps": steps,
            "target": target,
            "budget_usd": budget_usd,
            "deadline": deadline,
            "probability": probability,
            "gpus": None if gpus is None else gpus.split(","),
            "most": most,
            "precision": precision,
            "channels_last": channels_last,
            "plan": plan,
            "launch_us": launch_us,
            "electricity": electricity,
            "prices": prices,
            "catalogue": catalogue,
            "out": out,
        }
        if software or records is not None:
            shown.exit_code = on_software(job, on, options, records, shown, asked=software, details=details)
        else:
            shown.exit_code = answer(job, on, options, shown, details=details)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="--out of a tune or train run")],
    beside: Annotated[
        Path | None, typer.Option(metavar="DIR", help="another training, its metric on the same axis")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Show a run, and write it as one HTML page."""
    with screen(as_json, quiet, debug) as out:
        from vivace.reporting import report as run
        from vivace.reporting import terminal

        page = run(folder, beside=beside)
        out.document({"report_path": str(page)})
        out.show(lambda console: terminal(folder, console, beside))
        out.say(f"\nPage: {page}")


# Below the others, as they are listed.
from vivace.command import lists as lists  # noqa: E402
from vivace.command import models as models  # noqa: E402


def main() -> None:
    """The entry point; bad options end with one sentence and exit code 2 like every other bad input."""
    try:
        code = app(standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):  # before or after a command's own work
        code = 130
    except Exception as error:  # the usage errors of click, whichever package brings it
        explain = getattr(error, "format_message", None)
        if explain is None:
            raise
        if len(sys.argv) < 2:  # no command: the error is the help text
            print(explain(), file=sys.stderr)
        else:
            context = getattr(error, "ctx", None)
            command = context.command_path if context is not None else "vivace"
            message = meant(error) or f"{' '.join(explain().split()).rstrip('.')}; see {command} --help"
            Screen("--json" in sys.argv, False).fail("UsageError", message)
        code = 2
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is told, and Python takes a while to end
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
