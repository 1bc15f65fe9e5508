"""`vivace.compress`: the public function."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from vivace.compressing.bench import Bench
from vivace.compressing.page import write_page
from vivace.compressing.result import Compressed, Tried
from vivace.errors import InputError, Unsteady
from vivace.events import OnEvent, Tell, teller
from vivace.files import output_folder, replace_text
from vivace.inspection import inspect
from vivace.inspection.gather import require_torch
from vivace.job import Job
from vivace.pages.notebook import listening
from vivace.processes.launch import Source
from vivace.serving.forms import BY_NAME, FORMS, REFERENCE
from vivace.serving.margin import parse_margin
from vivace.serving.trained import run_of

OBJECTIVES = ("latency", "throughput", "size")
BATCHES = {"latency": 1, "throughput": 32, "size": 1}
DOCUMENT, PAGE, FILES, LOG = "compress.json", "compress.html", "forms", "forms.log"
OWN = (DOCUMENT, PAGE, FILES, LOG)


def compress(
    job: Job | str,
    *,
    run: str | os.PathLike[str],
    margin: str | float = "0.5%",
    objective: str = "latency",
    batch: int | None = None,
    out: str | os.PathLike[str] = "runs/compress",
    on_event: OnEvent | None = None,
) -> Compressed:
    """Find the form of a trained model that is really faster on this machine's processor, and no worse.

    Every form (a runtime and a number format) runs in a process of its own, on the job's own validation
    samples, timed in turn with the model as it is, in fp32. One in the same numbers must lie within the
    envelope of rounding; of the others the job's metric decides, on the same samples, by its 95 % interval.

    Args:
        job: a Job, or its reference, with a metric.
        run: the folder of a `vivace.train` whose weights are meant.
        margin: what the metric may lose: a share of it such as ``0.5%``, or a difference in its own unit.
        objective: ``latency``, ``throughput`` or ``size``.
        batch: samples of a call; left out, 1, and 32 for throughput.
        out: folder for the page, the document and the forms' files; an earlier result in it is replaced.
        on_event: hears a `vivace.Event` as each form begins and ends.

    Ctrl-C ends the search with what was measured until then.

    Raises JobError, InputError, CheckpointError, FolderError; Refused where the metric's calls of the model
    cannot be recorded; ChildFailed where the model as it is does not run.
    """
    require_torch()
    _check(objective, batch)
    begin, tell = time.monotonic(), teller(listening(on_event))
    size, path = batch or BATCHES[objective], Path(run).absolute()
    run_of(path)
    folder = _prepared(Path(out))
    with tempfile.TemporaryDirectory(prefix="vivace-") as scratch:
        bench = Bench(Source(job), str(path), Path(scratch), folder / FILES, folder / LOG, size)
        facts, tried, interrupted = _searched(bench, margin, objective, tell)
    chosen = _best(tried, objective)
    found = Compressed(
        job=job if isinstance(job, str) else "job",
        objective=objective,
        batch=size,
        margin=bench.margin,
        chosen=chosen.name,
        tried=tuple(tried),
        subject=facts,
        machine=inspect().to_dict(),
        notes=tuple(_notes(facts, tried, interrupted)),
        interrupted=interrupted,
        seconds=time.monotonic() - begin,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        file=str(folder / FILES / chosen.file) if chosen.file else "",
        page_path=str(folder / PAGE),
    )
    _write(found, folder)
    return found


def _searched(
    bench: Bench, margin: str | float, objective: str, tell: Tell
) -> tuple[dict[str, Any], list[Tried], bool]:
    """What is known of the model, every form, and whether Ctrl-C ended it; the processes end with it."""
    try:
        facts = bench.begin()
        bench.margin = parse_margin(margin, facts["metric"])
        tried, interrupted = _tried(bench, objective, tell)
        return facts, tried if interrupted else _settled(bench, tried, objective, tell), interrupted
    finally:
        bench.close()


def _write(found: Compressed, folder: Path) -> None:
    """Leave the document, the page, and the files of forms that may be deployed."""
    wanted = {Path(one.file).stem for one in found.tried if one.status in ("kept", "undecided") and one.file}
    for file in (folder / FILES).iterdir():
        if file.stem not in wanted:
            file.unlink()
    replace_text(folder / DOCUMENT, json.dumps(found.to_dict(), indent=1, default=str) + "\n")
    write_page(found, folder / PAGE)


def _check(objective: str, batch: int | None) -> None:
    if objective not in OBJECTIVES:
        raise InputError(f"compress for {' or '.join(OBJECTIVES)}, not for {objective!r}")
    if batch is not None and batch < 1:
        raise InputError(f"the batch must be 1 or more, not {batch}")


def _prepared(out: Path) -> Path:
    """The output folder, with nothing of an earlier result in it."""
    folder = output_folder(out, OWN)
    shutil.rmtree(folder / FILES, ignore_errors=True)
    for name in (DOCUMENT, PAGE, LOG):
        (folder / name).unlink(missing_ok=True)
    (folder / FILES).mkdir()
    return folder


def _tried(bench: Bench, objective: str, tell: Tell) -> tuple[list[Tried], bool]:
    """Every form, in order, the reference first; and whether Ctrl-C ended it before the last one."""
    found = []
    try:
        for form in FORMS[1:]:
            tell("form_begin", {"form": form.name, "does": form.does})
            found.append(bench.attempt(form, by_size=objective == "size"))
            tell("form_end", {"form": found[-1]})
    except KeyboardInterrupt:
        if not any(one.ratio for one in found):
            raise
        bench.renew()
        return [bench.reference(), *found], True
    return [bench.reference(), *found], False


def _settled(bench: Bench, tried: list[Tried], objective: str, tell: Tell) -> list[Tried]:
    """The best form measured again in fresh processes; one that is not faster there gives way to the next."""
    while (best := _best(tried, objective)).name != REFERENCE:
        assert best.ratio is not None
        tell("phase", {"name": f"{best.name} again, in fresh processes"})
        place = tried.index(best)
        try:
            again = bench.confirmed(BY_NAME[best.name], best.ratio)
        except Unsteady as error:
            tried[place] = dataclasses.replace(best, status="undecided", reason=str(error))
            continue
        tried[place] = dataclasses.replace(best, ratio=again)
        if objective == "size" or again.low > 1.0:
            break
        reason = "not faster when measured again in fresh processes"
        tried[place] = dataclasses.replace(best, ratio=again, status="refused", reason=reason)
    return tried


def _best(tried: list[Tried], objective: str) -> Tried:
    """The fastest form that is kept, or the smallest; the reference where there is none."""
    kept = [one for one in tried[1:] if one.status == "kept" and one.ratio is not None]
    reference = tried[0]
    if objective == "size":
        smaller = [one for one in kept if (one.bytes or 0) < (reference.bytes or 0)]
        return min(smaller, key=lambda one: one.bytes or 0, default=reference)
    return max(kept, key=lambda one: one.ratio.counts if one.ratio else 0.0, default=reference)


def _notes(facts: dict[str, Any], tried: list[Tried], interrupted: bool) -> list[str]:
    found = []
    if interrupted:
        found.append("interrupted: other forms were not tried, and nothing was measured again")
    if facts["metric_data"] == "training":
        found.append("the metric is of the training data: the job has no validation data of its own")
    if not facts["whole"]:
        found.append(f"judged on the first {facts['samples']:,} samples: more do not fit into memory")
    if any(one.numbers == "int8" for one in tried) and facts["calibrated_on"] != "training":
        found.append("int8 was calibrated on validation data: the metric does not take training batches")
    return found
