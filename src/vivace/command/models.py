"""Commands on many runs and on what they left: sweep, compress, export, compare."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from vivace.command.options import Address, AsJson, Debug, Details, JobName, OnDevice, Quiet, app, draw_rows
from vivace.command.screen import screen
from vivace.errors import InputError

OnlyProcessor = Annotated[
    str | None, typer.Option("--device", help="cpu, the processor of this machine; no GPU is served yet")
]


def require_processor(verb: str, device: str | None) -> None:
    """Raises InputError for a GPU, which no runtime here serves a model on."""
    if device not in (None, "cpu"):
        raise InputError(
            f"{verb} is for the processor, and not for {device}: its runtimes are measured and proven there "
            "alone; leave --device out, or give --device cpu"
        )


@app.command()
def compress(
    job: JobName,
    run: Annotated[Path, typer.Option(metavar="DIR", help="--out of the train whose weights are meant")],
    margin: Annotated[
        str, typer.Option(help="what the metric may lose: a share such as 0.5%, or a difference")
    ] = "0.5%",
    objective: Annotated[str, typer.Option("--for", help="latency, throughput or size")] = "latency",
    batch: Annotated[
        str | None, typer.Option(help="samples of a call (1; 32 for throughput), or several, as 1,8,32")
    ] = None,
    budget: Annotated[
        str,
        typer.Option(help="auto (a tenth of the training), fast, balanced, max, a time such as 5m, seconds"),
    ] = "auto",
    finetune: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="train further for so long, such as 10min: for int8 where it loses too much, and pruned",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="folder for page and forms' files")] = Path("runs/compress"),
    resume: Annotated[bool, typer.Option("--resume", help="go on with the search in that folder")] = False,
    device: OnlyProcessor = None,
    details: Details = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Find the form of a trained model to deploy on this processor.

    It is measured to be faster, and loses no more of the metric than the margin. Exit code 1 if there is
    none.
    """
    with screen(as_json, quiet, debug, device or "cpu", forks=True) as shown:
        require_processor("compress", device)
        from vivace.inspection.gather import require_torch

        require_torch()  # before anything imports it
        from vivace.command.progress import CompressProgress, short
        from vivace.compressing import compress as find
        from vivace.compressing.table import draw

        with CompressProgress(quiet) as progress:
            result = find(
                job,
                run=run,
                margin=margin,
                objective=objective,
                batch=batch,
                budget=budget,
                finetune=finetune,
                out=out,
                resume=resume,
                on_event=progress,
            )
        shown.document(result.to_dict())
        brief = dataclasses.replace(result, page_path=short(result.page_path))
        shown.show(lambda console: draw(brief, console, details=details))
        shown.exit_code = result.exit_code


@app.command()
def export(
    source: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="--out of a compress or a train; or give --plan")
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            help="of DIR: onnx, openvino, aoti, torch; of --plan: torch, transformers, lightning, accelerate"
        ),
    ] = "torch",
    plan: Annotated[
        str | None, typer.Option(metavar="P", help="print a plan as the Python of torch or a trainer")
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(metavar="JOB", help="left out, the folder's own; of --plan: whose file has techniques"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="folder for the file and its model card; left out, runs/export")
    ] = None,
    device: OnlyProcessor = None,
    details: Details = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write a trained model for a runtime, and prove the file.

    It is loaded in a fresh process, and must answer as the model does: exit code 1 if not. With --plan: print
    the plan in the words of torch, transformers, lightning or accelerate.
    """
    with screen(as_json, quiet, debug, device or "cpu") as shown:
        require_processor("export", device)
        from vivace.command.progress import short
        from vivace.exporting.answering import COLUMNS, answer, rows
        from vivace.inspection.gather import require_torch
        from vivace.pages.answer import ending

        if (source is None) == (plan is None):
            raise InputError("export takes either the folder of a trained model or --plan with a plan file")
        if plan is not None:
            if out is not None:
                raise InputError("a plan is printed, and into no folder: leave --out out")
            text = _python_of(plan, job, to)
            shown.document({"to": to, "python": text})
            shown.text(text)
            return
        assert source is not None
        require_torch()  # before anything imports it
        from vivace.exporting.proving import export as write

        result = write(source, to=to, job=job, out=out or "runs/export")
        shown.document(result.to_dict())
        if details:
            shown.show(lambda console: draw_rows(COLUMNS, rows(result), console))
        brief = dataclasses.replace(result, page_path=short(result.page_path))
        shown.show(lambda console: ending(answer(brief), console, details=details))
        shown.exit_code = result.exit_code


Against = Annotated[
    str | None, typer.Option(help="weigh the metric against seconds (of a step) or parameters")
]
Transfer = Annotated[
    str | None, typer.Option(metavar="WIDTH", help="carry learning rates over from its smallest value: muP")
]
Engine = Annotated[
    str | None, typer.Option(metavar="ray", help="run trials on a Ray cluster; left out, on this machine")
]


@app.command()
def sweep(
    job: JobName,
    ranges: Annotated[
        list[str], typer.Argument(metavar="name=range ...", help="lr=1e-4..1e-1:log width=32,64 depth=2..6")
    ],
    trials: Annotated[int, typer.Option(help="how many, those of a resumed sweep counted")] = 60,
    seeds: Annotated[
        int, typer.Option(help="the best three are trained again under so many other seeds; 0: not at all")
    ] = 3,
    seed: Annotated[int, typer.Option(help="of the search, and of every trial")] = 0,
    plan: Annotated[Path | None, typer.Option(help="train every trial under this plan")] = None,
    workers: Annotated[
        int | None, typer.Option(help="trials at a time; left out, as many as are measured faster")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder for journal, runs, page and best.py")] = Path(
        "runs/sweep"
    ),
    resume: Annotated[bool, typer.Option("--resume", help="go on with the sweep in that folder")] = False,
    against: Against = None,
    transfer: Transfer = None,
    engine: Engine = None,
    address: Address = None,
    device: OnDevice = None,
    details: Details = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Search a job's parameters, width and depth for its metric.

    JOB is a function with parameters: def job(lr: float = 0.1, width: int = 64) -> vivace.Job
    """
    with screen(as_json, quiet, debug, device, forks=engine is None) as shown:
        if engine is not None and device is not None:
            raise InputError(f"Ray chooses each trial's device: leave --device {device} out")
        from vivace.command.endings import swept
        from vivace.command.progress import SweepProgress
        from vivace.sweeping import sweep as run

        with SweepProgress(quiet) as progress:
            result = run(
                job,
                ranges,
                trials=trials,
                seeds=seeds,
                seed=seed,
                plan=plan,
                workers=workers,
                out=out,
                resume=resume,
                against=against,
                transfer=transfer,
                engine=engine,
                address=address,
                on_event=progress,
            )
        shown.document(result.to_dict())
        shown.show(lambda console: swept(result, console, details=details))
        shown.exit_code = result.exit_code


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(metavar="A", help="a run's folder, a profile or a record")],
    after: Annotated[Path, typer.Argument(metavar="B", help="the same of what is asked about")],
    max_regression: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT",
            help="how much longer a step (a sample, where batches differ) may take, such as 5%",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="folder for the page")] = None,
    details: Details = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """What differs between two runs, profiles or records. Exit code 1 if B is slower than allowed."""
    with screen(as_json, quiet, debug) as shown:
        from vivace.command.progress import short
        from vivace.comparing import compare as run
        from vivace.comparing.compared import COLUMNS, answer, rows
        from vivace.pages.answer import ending

        found = run(before, after, max_regression=max_regression, out=out)
        shown.document(found.to_dict())
        if details:
            shown.show(lambda console: draw_rows(COLUMNS, rows(found), console))
        brief = dataclasses.replace(found, page_path=short(found.page_path) if found.page_path else None)
        shown.show(lambda console: ending(answer(brief), console, details=details))
        shown.exit_code = found.exit_code


def _python_of(plan: str, job: str | None, to: str) -> str:
    """A plan in the words of torch or a trainer; the job's file may register techniques of its own."""
    from vivace.exporting import in_words
    from vivace.job import load

    path = Path(plan).absolute()  # that file may change the working directory
    if job is not None:
        load(job)
    return in_words(path, to)
