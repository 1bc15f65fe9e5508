"""Reading a run's folder, whatever of it is torn, cut short or of another version."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vivace import words
from vivace.errors import FolderError
from vivace.files import read_own
from vivace.ledger import Ledger, Trial
from vivace.pictures import PICTURES, read
from vivace.reporting import shapes
from vivace.reporting.content import Content, ratio_of
from vivace.reporting.shapes import fitting

_SHAPES = {
    "run": shapes.RUN,
    "profile": shapes.PROFILE,
    "result": shapes.RESULT,
    "verdict": shapes.VERDICT,
    "trial": shapes.TRIAL,
    "memory": shapes.MEMORY,
    "batches": shapes.BATCHES,
}


# What other verbs write into their --out, each its own page.
OTHER_PAGES = {
    "run.html": "run",
    "profile.html": "profile",
    "compress.html": "compress",
    "sweep.html": "sweep",
    "model_card.html": "export",
    "compare.html": "compare",
    "advise.html": "advise",
}


def page_of_another(folder: Path) -> tuple[Path, str] | None:
    """The page that another verb has written into its folder, and the verb; None of a tune or train. Raises
    FolderError where the folder is unreadable, or of a script's run, which left no page.
    """
    with _readable(folder):
        if (folder / "metrics.jsonl").exists():
            return None
        found = [(folder / name, verb) for name, verb in OTHER_PAGES.items() if (folder / name).is_file()]
        if not found and _is_of_a_script(folder):
            reason = _document(folder / "run.json").get("reason") or "it has not come to its end"
            raise FolderError(f"'{folder}' is the folder of a script's run, which has no page: {reason}")
    return found[0] if found else None


def _is_of_a_script(folder: Path) -> bool:
    """Was it a script that `run`, or `tune`, looked at? One that was killed has left its ledger alone."""
    if document := _document(folder / "run.json"):
        return "own_seconds" in document
    records = Ledger(folder / "ledger.jsonl").read()
    return bool(records) and all("process" in record for record in records)


@contextlib.contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FolderError(f"the run in '{folder}' cannot be read: {error.strerror}") from None


def load(folder: Path) -> Content:
    """Read a run's folder. Raises FolderError where it is missing, unreadable, or holds no run."""
    with _readable(folder):
        if not folder.is_dir():
            raise FolderError(f"there is no folder '{folder}'; give the --out folder of a tune or train run")
        records = Ledger(folder / "ledger.jsonl").read()
        metrics = Ledger(folder / "metrics.jsonl").read()
        training = _document(folder / "run.json")
        pictures = read(_document(folder / PICTURES))
    if not records and not metrics and not training:
        raise FolderError(
            f"'{folder}' holds no record of a run; give the --out folder of a tune or train run"
        )
    skipped: list[str] = []
    records = [_fitting(record, skipped) for record in records]
    metrics = [fitting(line, shapes.METRIC, "metrics.jsonl", skipped) for line in metrics]
    training = fitting(training, shapes.TRAINING, "run.json", skipped)
    runs = [number for number, record in enumerate(records) if record.get("record") == "run"]
    records = records[runs[-1] :] if runs else records
    trials, unread = _trials(records)
    last = {kind: _last(records, kind) for kind in ("run", "profile", "result", "verdict")}
    final = last["result"].get("verdict")
    if isinstance(final, dict) and final.get("kept") is not None:
        agree = last["verdict"].get("kept") == final["kept"]
        last["verdict"] = {**(last["verdict"] if agree else {}), **final}
    elif last["result"].get("plan") and last["result"]["plan"] != last["verdict"].get("plan"):
        last["verdict"] = {}  # it is of another plan
    by_step: dict[float, dict[str, Any]] = {}
    for line in metrics:
        if (step := words.real(line.get("step"))) is not None:
            by_step[step] = {**by_step.get(step, {}), **line}  # a watched step has two lines
    lines = tuple(by_step[step] for step in sorted(by_step))
    return Content(
        folder=folder,
        trials=tuple(trials),
        metrics=lines,
        training=_so_far(training, lines),
        curves={kind: _last(records, kind) for kind in ("memory", "batches")},
        unread=unread,
        skipped=tuple(dict.fromkeys(skipped)),
        pictures=pictures,
        **last,
    )


# Of an earlier process of a training that goes on, or was killed since.
_STAYS = ("job", "plan", "does", "device", "machine", "tuned", "ranks", "metric_name", "metric_data")
_LOOKED_AT = ("loss", "metric", "metric_name", "metric_data", "samples_per_second")


def _so_far(training: dict[str, Any], lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What ``run.json`` says where it is of the last step, else what the metrics say of a training that has
    not ended: it goes on, or it was killed.
    """
    newest = {key: value for line in lines for key, value in line.items()}
    at = max((line["step"] for line in lines if "loss" in line or "metric" in line), default=0)
    if not at or (training and at <= (words.real(training.get("steps")) or at)):
        return training
    known = {key: training[key] for key in _STAYS if key in training}
    known |= {key: newest[key] for key in _LOOKED_AT if key in newest}
    return known | {"steps": at, "unfinished": True}


def _fitting(record: dict[str, Any], skipped: list[str]) -> dict[str, Any]:
    """What of a record of the ledger can be shown."""
    kind = record.get("record")
    shape = _SHAPES.get(kind) if isinstance(kind, str) else None
    found = fitting(record, shape, f"ledger.jsonl, {kind}", skipped) if shape is not None else record
    return dict(found)


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(read_own(path) or b"{}")
    except (ValueError, RecursionError):  # torn: the metrics beside it still say what happened
        return {}
    return document if isinstance(document, dict) else {}


def _last(records: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    found = [record for record in records if record.get("record") == kind]
    return found[-1] if found else {}


def _trials(records: list[dict[str, Any]]) -> tuple[list[Trial], int]:
    """The trials, and the number of those that this version cannot read."""
    trials, unread = [], 0
    for record in records:
        if record.get("record") == "trial":
            try:
                known = {k: v for k, v in record.items() if v is not None}
                if ratio_of(known.get("ratio")) is None:
                    known.pop("ratio", None)
                trials.append(Trial.from_dict(known))
            except (TypeError, ValueError, AssertionError):
                unread += 1
    return trials, unread
