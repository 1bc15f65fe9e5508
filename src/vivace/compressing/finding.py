"""`vivace.compress`: the public function."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vivace.compressing.bench import Bench
from vivace.compressing.further import WAYS
from vivace.compressing.journal import Journal
from vivace.compressing.page import render
from vivace.compressing.result import Compressed, Tried, choose
from vivace.compressing.searching import Search
from vivace.errors import InputError
from vivace.events import OnEvent, Tell, metric_title, teller
from vivace.files import LOCK, finite, full_disk_told, output_folder, replace_text, take_lock
from vivace.inspection import inspect
from vivace.inspection.gather import require_torch
from vivace.job import Job
from vivace.measuring.budget import BUDGETS, SHARE, parse_budget
from vivace.pages.notebook import listening
from vivace.processes.launch import Source
from vivace.serving.files import digest
from vivace.serving.forms import FORMS, form_named, versions_of
from vivace.serving.margin import parse_margin
from vivace.serving.trained import damaged_of, moved_since, run_of
from vivace.training.stopping import ends_like_ctrl_c
from vivace.words import SECONDS, amount, count, duration, number, percent

OBJECTIVES = ("latency", "throughput", "size")
BATCHES = {"latency": 1, "throughput": 32, "size": 1}
MARGIN = "0.5%"
DEPLOYED = ("kept", "undecided")  # forms whose files stay
FEW_SHARED = 12  # samples of the 256 from which ranges are learnt: so many may be alike by chance
LARGE = 0.1  # of the metric: a difference that may have been meant as a share
DOCUMENT, PAGE, FILES, LOG, JOURNAL = "compress.json", "compress.html", "forms", "forms.log", "forms.jsonl"
LOOSE = (DOCUMENT, PAGE, JOURNAL, *(file for way in WAYS for file in way.files()))
FURTHER_RUNS = tuple(way.name for way in WAYS)
OWN = (*LOOSE, LOG, FILES, *FURTHER_RUNS, LOCK, "__pycache__")


def compress(
    job: Job | str,
    *,
    run: str | os.PathLike[str],
    margin: str | float = MARGIN,
    objective: str = "latency",
    batch: int | str | None = None,
    budget: str | float = "auto",
    finetune: str | float | None = None,
    out: str | os.PathLike[str] = "runs/compress",
    resume: bool = False,
    on_event: OnEvent | None = None,
) -> Compressed:
    """Find the form of a trained model that is really faster on this machine's processor, and no worse.

    Every form (a runtime and a number format) runs in a process of its own, on the job's own validation
    samples, timed in turn with the model as it is, in fp32. One in the same numbers must lie within the
    envelope of rounding; of the others the job's metric decides, on the same samples, by its 95 % interval.
    What the first results make unlikely to be the best is passed over.

    Args:
        job: a Job, or its reference, with a metric.
        run: the folder of a `vivace.train` whose weights are meant.
        margin: what the metric may lose: a share of it such as ``0.5%``, or a difference in its own unit.
        objective: ``latency``, ``throughput`` or ``size``.
        batch: samples of a call; left out, 1, and 32 for throughput. Of several, such as ``"1,8,32"``, the
            form is sought for the first, and timed for all.
        budget: ``auto``, ``fast`` (2 minutes), ``balanced`` (10), ``max`` (60, and no form is passed over), a
            time such as ``5m``, or seconds; it is for trying forms, and measuring the best one again goes on
            beyond it. ``auto`` is a tenth of the training's length, from 2 minutes up to an hour.
        finetune: how long each of two models may be trained further, such as ``10min``; left out, none is.
            The model itself, with int8's rounding in its products, where a form in int8 would be the best and
            loses too much; a narrower one (half of the channels) where it is faster than the best before.
        out: folder for the page, the document and the forms' files; an earlier result in it is replaced.
        resume: go on with the search in `out`, whatever ended it: what was tried is not tried again.
        on_event: hears a `vivace.Event` as each form begins and ends.

    Ctrl-C or SIGTERM ends the search with what was measured until then.

    Raises JobError, InputError, CheckpointError, FolderError; Refused where the metric's calls of the model
    cannot be recorded; ChildFailed where the model as it is does not run.
    """
    require_torch()
    _check(job, objective, batch, finetune)
    parse_margin(margin, 1.0)  # what is no margin is told before anything runs
    seconds = parse_budget(budget)
    wish = _Wish(job, Path(run), margin, objective, batch, budget, Path(out), finetune)
    trained = run_of(wish.run.absolute())
    seconds = auto_budget(trained.get("seconds")) if seconds is None else seconds
    return _Compressing(wish, seconds, every=budget == "max", tell=teller(listening(on_event))).done(
        resume=resume
    )


@dataclasses.dataclass(frozen=True)
class _Wish:
    """What a person asked for."""

    job: Job | str
    run: Path
    margin: str | float
    objective: str
    batch: int | str | None
    budget: str | float
    out: Path
    finetune: str | float | None

    @property
    def name(self) -> str:
        """The job's reference, or a word where it has none."""
        return self.job if isinstance(self.job, str) else "job"

    @property
    def go_on(self) -> str:
        """The command that goes on with the search; for a job without a name, the call."""
        if not isinstance(self.job, str):
            return f"vivace.compress(job, run={str(self.run)!r}, out={str(self.out)!r}, ..., resume=True)"
        words = ["vivace", "compress", self.name, "--run", str(self.run)]
        words += ["--margin", str(self.margin)] if str(self.margin) != MARGIN else []
        words += ["--for", self.objective] if self.objective != "latency" else []
        words += ["--batch", str(self.batch)] if self.batch is not None else []
        words += ["--budget", str(self.budget)] if self.budget != "auto" else []
        words += ["--finetune", str(self.finetune)] if self.finetune is not None else []
        return shlex.join([*words, "--out", str(self.out), "--resume"])


class _Compressing:
    """One search, from the recorded calls to the page. `every`: no form is passed over."""

    def __init__(self, wish: _Wish, seconds: float, *, every: bool, tell: Tell) -> None:
        self.wish, self.seconds, self.every, self.tell = wish, seconds, every, tell
        self.begin, self.machine = time.monotonic(), inspect()
        self.batches = parse_batches(wish.batch) or (BATCHES[wish.objective],)
        self.batch = self.batches[0]

    def done(self, *, resume: bool) -> Compressed:
        """Search, and write down what was found."""
        folder = output_folder(self.wish.out, OWN, locked=True)
        with take_lock(folder, "compress"), full_disk_told(folder):
            if not resume:
                (folder / LOG).unlink(missing_ok=True)
            return self._found(folder, resume=resume)

    def _found(self, folder: Path, *, resume: bool) -> Compressed:
        wish = self.wish
        if self.machine.passed_over:
            self.tell("notice", {"text": self.machine.passed_over})
        run = str(wish.run.absolute())
        with tempfile.TemporaryDirectory(prefix="vivace-") as scratch, ends_like_ctrl_c():
            bench = Bench(Source(wish.job), run, Path(scratch), folder / FILES, folder / LOG, self.batch)
            with contextlib.closing(bench):
                search, tried = self._searched(bench, folder, resume=resume)
                beside = search.beside(tried, self.batches)
        chosen = choose(tried, by_size=search.by_size)
        found = Compressed(
            job=wish.name,
            objective=wish.objective,
            batch=self.batch,
            margin=bench.margin,
            chosen=chosen.name,
            tried=tuple(tried),
            subject=bench.facts,
            machine=self.machine.to_dict(),
            notes=(
                *_ended(tried, search, self.seconds),
                *_of_metric(bench, wish.margin),
                *_notes(bench.facts, tried),
            ),
            interrupted=search.interrupted,
            seconds=time.monotonic() - self.begin,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            file=str(folder / FILES / chosen.file) if chosen.file else "",
            page_path=str(folder / PAGE),
            budget_seconds=self.seconds,
            go_on=wish.go_on if search.interrupted or search.num_left else "",
            beside=tuple(beside),
        )
        _write(found, folder)
        return found

    def _searched(self, bench: Bench, folder: Path, *, resume: bool) -> tuple[Search, list[Tried]]:
        """Every form, and how it went; what an earlier search found is taken from its journal."""
        wish = self.wish
        self.tell("phase", {"name": "the model as it is"})
        facts = bench.begin()
        bench.margin = parse_margin(wish.margin, facts["metric"])
        if not resume:
            _clear(folder)
        (folder / FILES).mkdir(exist_ok=True)
        asked = {
            "weights": facts["trained"]["sha256"],
            "objective": wish.objective,
            "batch": self.batch,
            "samples": facts["samples"],
            "metric": facts["metric"],
            "margin": bench.margin,
            "threads": bench.threads,
            "machine": self.machine.fingerprint,
        }
        journal = Journal(folder / JOURNAL, asked)
        known = [one for one in journal.recall() if _still_holds(one, folder / FILES)]
        _forget(folder / FILES, known)
        search = Search(
            bench,
            FORMS[1:],
            journal,
            self.tell,
            by_size=wish.objective == "size",
            every=self.every,
            deadline=self.begin + self.seconds,
            matrix_units=any("amx_bf16" in d.features for d in self.machine.devices if d.kind == "cpu"),
        )
        tried = search.run(known)
        if wish.finetune is not None:
            seconds = parse_finetune(wish.finetune)
            name, by_size = absolute(wish.name), search.by_size
            for way in WAYS:
                search.train_further(tried, way(bench, name, folder, seconds, self.tell, by_size=by_size))
        return search, tried


def auto_budget(training_seconds: object) -> float:
    """Seconds that a training of that length is worth: a tenth, from 2 minutes up to an hour; ten minutes
    where it is not known.
    """
    if not isinstance(training_seconds, int | float):
        return BUDGETS["balanced"]
    return min(BUDGETS["max"], max(BUDGETS["fast"], SHARE * training_seconds))


def _write(found: Compressed, folder: Path) -> None:
    """Leave the document, the page, and the files of forms that may be deployed."""
    wanted = {Path(one.file).stem for one in found.tried if one.status in DEPLOYED and one.file}
    for file in (folder / FILES).iterdir():
        if file.stem not in wanted:
            file.unlink()
    replace_text(folder / DOCUMENT, json.dumps(finite(found.to_dict()), indent=1, default=str) + "\n")
    replace_text(folder / PAGE, render(found))


def _still_holds(one: Tried, files: Path) -> bool:
    """Are a form's packages, and its file if it may be deployed, still those that were judged?"""
    if one.versions != versions_of(form_named(one.name)):
        return False
    deployed = one.status in DEPLOYED and bool(one.file)
    return not deployed or ((files / one.file).is_file() and digest(files / one.file) == one.sha256)


def _forget(files: Path, known: list[Tried]) -> None:
    """Remove what a search that was ended by force may have left half written."""
    whole = {Path(one.file).stem for one in known if one.file}
    for file in files.iterdir():
        if file.stem not in whole:
            file.unlink()


def _check(job: Job | str, objective: str, batch: int | str | None, finetune: str | float | None) -> None:
    if objective not in OBJECTIVES:
        raise InputError(f"compress for {' or '.join(OBJECTIVES)}, not for {objective!r}")
    parse_batches(batch)
    if finetune is not None:
        parse_finetune(finetune)
        if not isinstance(job, str):
            raise InputError("finetune needs the job by its name, such as train.py:job: it is trained again")


def parse_batches(batch: int | str | None) -> tuple[int, ...]:
    """Samples of a call, of one number or of several such as ``1,8,32``. Raises InputError."""
    parts = [] if batch is None else str(batch).split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"the batch must be 1 or more, or several such as 1,8,32; not {batch}")
    return tuple(dict.fromkeys(map(int, parts)))


def parse_finetune(finetune: str | float) -> float:
    """Seconds of a time such as ``10min``, or of a number of seconds. Raises InputError."""
    seconds = amount(str(finetune), {"": 1.0, **SECONDS})
    if seconds is None:
        raise InputError(f"finetune is {finetune!r}; it must be a time such as 10min, or seconds")
    return seconds


def absolute(reference: str) -> str:
    """A job's reference as it can be loaded from any folder."""
    file, colon, name = reference.partition(":")
    return f"{Path(file).absolute()}{colon}{name}" if file.endswith(".py") else reference


def _clear(folder: Path) -> None:
    """Leave nothing of an earlier result in the output folder."""
    for name in (FILES, *FURTHER_RUNS):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in LOOSE:
        (folder / name).unlink(missing_ok=True)


def _of_metric(bench: Bench, margin: str | float) -> Iterator[str]:
    """What makes the metric, or the margin, another than the person may think."""
    facts, now, name = bench.facts, bench.facts["metric"], metric_title(bench.facts)
    if moved := moved_since(facts):
        yield moved
    if damaged := damaged_of(facts):
        yield damaged
    if "%" not in str(margin) and bench.margin > LARGE * abs(now):
        share = percent(bench.margin / abs(now)) if now else "all"
        yield f"the margin of {number(bench.margin)} is {share} of the {name}: a share is written as 0.5%"
    if facts["metric_data"] != "training" and facts["num_shared"] > FEW_SHARED:
        yield f"{facts['num_shared']} or more training samples are validation samples too: {name} is too good"


def _ended(tried: list[Tried], search: Search, seconds: float) -> Iterator[str]:
    """What ended the search before its own end."""
    left = search.num_left
    if search.interrupted:
        tried_so_far = f"{count(left, 'form')} more might be tried" if left else "all forms were tried"
        again = "" if search.is_settled(tried) else ", and the best was not measured again"
        yield f"interrupted: {tried_so_far}{again}"
    elif left:
        ended = f"the budget of {duration(seconds)} ended"
        yield f"{ended} before {left} of the untried forms, which promised enough, had their turn"


def _notes(facts: dict[str, Any], tried: list[Tried]) -> list[str]:
    found = []
    if facts["metric_data"] == "training":
        found.append("the metric is of the training data: the job has no validation data of its own")
    if not facts["whole"]:
        found.append(f"judged on the first {facts['samples']:,} samples: more do not fit into memory")
    if any(one.numbers == "int8" and one.ratio for one in tried) and facts["calibrated_on"] != "training":
        found.append("int8 was calibrated on validation data: training batches are not called like them")
    return found
