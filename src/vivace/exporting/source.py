"""What is to be exported: a form that `vivace compress` has found, or the trained model as it is."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from vivace.errors import AnswerIsNo, InputError
from vivace.serving.forms import BY_NAME, FORMS, FURTHER, Form, form_named

RUNTIMES = {"onnx": ("onnx",), "openvino": ("openvino",), "aoti": ("aoti",), "torch": ("torch", "inductor")}
PLAIN = {"onnx": "onnx_fp32", "openvino": "openvino_fp32", "aoti": "aoti_fp32", "torch": "eager_fp32"}
UNJUDGED = ("slower", "untried", "unmeasured", "missing")  # forms that the export itself proves


@dataclasses.dataclass(frozen=True)
class Subject:
    """A form of the weights of a run. `made` is its file where there is one already, with its sha256.

    `measured` is what the document of `vivace compress` says of it, with the ``batch`` of its calls; empty
    without one. `margin` is what the metric may lose, `weights` the sha256 of the run's weights when they
    were compressed.
    """

    job: str
    run: Path
    form: Form
    made: Path | None = None
    sha256: str = ""
    margin: float | None = None
    measured: dict[str, Any] = dataclasses.field(default_factory=dict)
    weights: str = ""


def subject_of(folder: Path, to: str) -> Subject:
    """What of a folder goes to a runtime: of a compression the form that it chose, else the fastest for this
    runtime that may be deployed, or the model's own numbers where none was judged.

    Raises InputError where the folder holds neither, AnswerIsNo where no form for it may be deployed.
    """
    if to not in RUNTIMES:
        raise InputError(f"export to {', '.join(RUNTIMES)}, not to {to!r}")
    if os.path.isfile(folder / "compress.json"):
        return _of_compression(folder, to)
    if os.path.isfile(folder / "run.json"):
        document = _read(folder / "run.json")
        return Subject(str(document.get("job") or ""), folder, BY_NAME[PLAIN[to]])
    raise InputError(f"'{folder}' is neither of a vivace compress nor of a vivace train that has ended")


def _of_compression(folder: Path, to: str) -> Subject:
    document = _read(folder / "compress.json")
    try:
        names = {form.name for form in FORMS if form.runtime in RUNTIMES[to]}
        names |= {f"{further}{name}" for further in FURTHER for name in names}
        tried = [one for one in document["tried"] if one["name"] in names]
        kept = [one for one in tried if one["status"] == "kept" and one["ratio"]]
        best = max(kept, key=lambda one: float(one["ratio"]["estimate"]), default=None)
        best = next((one for one in kept if one["name"] == document.get("chosen")), best)
        trained, job, margin = document["subject"]["trained"], str(document["job"]), document["margin"]
        run, weights = Path(trained["folder"]), str(trained.get("sha256") or "")
    except (KeyError, TypeError, AttributeError):
        raise InputError(f"'{folder / 'compress.json'}' is not what vivace compress wrote") from None
    if best is None and all(one["name"] != PLAIN[to] or one["status"] in UNJUDGED for one in tried):
        run = _moved(run, document, folder)
        return Subject(job, run, BY_NAME[PLAIN[to]], margin=float(margin), weights=weights)
    if best is None:
        why = "; ".join(f"{one['name']}: {one['reason']}" for one in tried)
        raise AnswerIsNo(f"no form for {to} may be deployed ({why})")
    form = form_named(best["name"])
    weights = str(best.get("weights") or "") if best.get("run") else weights
    run, job = _moved(Path(best.get("run") or run), document, folder), best.get("job") or job
    made = folder / "forms" / form.file if best.get("file") else None
    measured = best | {"batch": document.get("batch")}
    return Subject(job, run, form, made, str(best.get("sha256") or ""), float(margin), measured, weights)


def _moved(run: Path, document: dict[str, Any], folder: Path) -> Path:
    """The folder of a run, also where it was moved together with that of the compression."""
    before = str(document.get("page_path") or "")
    if os.path.exists(run) or not before:
        return run
    beside = Path(os.path.normpath(folder / os.path.relpath(run, Path(before).parent)))
    return beside if os.path.exists(beside) else run


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"'{path}' cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise InputError(f"'{path}' is damaged: it is no JSON") from None
    if not isinstance(document, dict):
        raise InputError(f"'{path}' holds no document")
    return document
