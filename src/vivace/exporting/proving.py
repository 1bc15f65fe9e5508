"""`vivace.export`: the public function."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vivace.errors import CheckpointError, ChildFailed, InputError, JobError, Refused
from vivace.exporting.page import render
from vivace.exporting.result import Exported
from vivace.exporting.source import Subject, subject_of
from vivace.files import LOCK, finite, full_disk_told, output_folder, own_folder, replace_text, take_lock
from vivace.inspection import inspect
from vivace.inspection.gather import require_torch
from vivace.job import Job
from vivace.processes.launch import Child, Source
from vivace.serving.calls import Calls, read_arrays, write_arrays
from vivace.serving.envelope import Check, compare
from vivace.serving.files import digest, parts
from vivace.serving.forms import EXTRA
from vivace.serving.layers import few_calls
from vivace.serving.maker import PROOF_SAMPLES
from vivace.serving.proof import answers, pieces
from vivace.serving.trained import damaged_of, is_of_the_same, moved_since
from vivace.serving.use import astray
from vivace.training.stopping import ends_like_ctrl_c

JUDGE, MAKER = "vivace.serving.judge:Judge", "vivace.serving.maker:Maker"
TIMEOUT = 1200.0
CARD, PAGE, WEIGHTS, LOG = "model_card.json", "model_card.html", "weights.safetensors", "export.log"
WRITTEN = (CARD, PAGE, WEIGHTS, *(f"model.{ending}" for ending in ("onnx", "xml", "bin", "pt2")))
UNPROVEN = "unproven"  # the folder of what an export writes, until it is proven
OWN = (*WRITTEN, LOG, LOCK, UNPROVEN)
DIFFERS = "differs from the model's by more than rounding explains"


@ends_like_ctrl_c()
def export(
    source: str | os.PathLike[str],
    *,
    to: str,
    job: Job | str | None = None,
    out: str | os.PathLike[str] = "runs/export",
) -> Exported:
    """Write a trained model for a runtime, and prove that the file is the model.

    The file is opened in a fresh process that has neither the job nor its folder, and answers 256 of the
    job's own validation samples in batches of many sizes. In the same number format every output, and every
    layer that stands in the file, must lie within the envelope of rounding; else the job's metric, on the
    file's own outputs, within the margin of `vivace compress`.

    Args:
        source: the folder of a `vivace compress`, of which the fastest form for the runtime is taken, or of a
            `vivace train`.
        to: ``onnx``, ``openvino``, ``aoti`` (torch's compiler, ahead of time) or ``torch`` (torch.export).
        job: a Job, or its reference; left out, the one that the folder names.
        out: folder for ``model.*``, ``weights.safetensors`` and the model card; an earlier export in it stays
            until this one's file has answered.

    Raises InputError, JobError, CheckpointError, FolderError; AnswerIsNo where no form for the runtime may be
    deployed; Refused where the metric's calls of the model cannot be recorded; ChildFailed where the file
    cannot be made or served. Then, or after SIGTERM, nothing is left of it, and an earlier export stays.
    """
    require_torch()
    subject = subject_of(Path(source).absolute(), to)
    wanted = job if job is not None else subject.job
    if not wanted or wanted == "job":
        raise InputError(f"'{source}' does not name its job: give it, with --job (job=...)")
    file = wanted.partition(":")[0] if isinstance(wanted, str) else ""
    if job is None and file.endswith(".py") and not os.path.exists(file):
        raise InputError(
            f"'{source}' is of the job '{wanted}', and there is no file '{file}' from here: say where it is, "
            "with --job (job=...)"
        )
    lacking = list(subject.form.missing())
    lacking += [] if importlib.util.find_spec("safetensors") else ["safetensors"]
    if lacking:
        raise InputError(f"an export to {to} needs {' and '.join(lacking)}: {EXTRA}")
    folder = output_folder(Path(out), OWN, locked=True)
    with (
        take_lock(folder, "export"),
        full_disk_told(folder),
        tempfile.TemporaryDirectory(prefix="vivace-") as scratch,
    ):
        (folder / LOG).unlink(missing_ok=True)
        origin, own = Source(wanted), {"run": str(subject.run), "folder": scratch}
        with Child(JUDGE, origin, own, log=folder / LOG) as judge:
            facts = _recorded(subject, judge)
            with _replacing(folder) as written:
                found = _proven(subject, origin, judge, facts, written, Path(scratch))
                name = wanted if isinstance(wanted, str) else "job"
                found = dataclasses.replace(found, job=name, page_path=str(folder / PAGE))
                replace_text(written / PAGE, render(found))
                found = dataclasses.replace(found, file=str(folder / Path(found.file).name))
                card = json.dumps(finite(found.to_dict()), indent=1, default=str) + "\n"
                replace_text(written / CARD, card)
    return found


@contextlib.contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A folder for the files of an export, which take the place of an earlier one's unless this one fails."""
    shutil.rmtree(folder / UNPROVEN, ignore_errors=True)  # of one that was ended by force
    written = own_folder(folder / UNPROVEN)
    try:
        yield written
        for name in WRITTEN:
            (folder / name).unlink(missing_ok=True)
        for file in written.iterdir():
            file.replace(folder / file.name)
    finally:
        shutil.rmtree(written, ignore_errors=True)


def _recorded(subject: Subject, judge: Child) -> dict[str, Any]:
    """What the judge tells of the model; under ``unused``, on which outputs the metric does not depend."""
    facts: dict[str, Any] = judge.ask("record", TIMEOUT)
    if subject.weights not in ("", facts["trained"]["sha256"]):
        raise CheckpointError(
            f"'{subject.run}' holds other weights than vivace compress was given: compress it again"
        )
    unused = [] if subject.form.numbers == "fp32" else judge.ask("unused", TIMEOUT)
    return facts | {"unused": unused}


def _proven(
    subject: Subject, source: Source, judge: Child, facts: dict[str, Any], folder: Path, scratch: Path
) -> Exported:
    """Make the file in the folder, let a fresh process answer, and compare."""
    form, log, runtime = subject.form, folder.parent / LOG, subject.form.opener
    exact = form.numbers == "fp32"  # also of what was trained further, whose own weights are the model here
    own = {"run": str(subject.run), "folder": str(scratch), "threads": facts["threads"]}
    calls = Calls.load(scratch)
    with Child(MAKER, source, own, log=log) as maker:
        file = _file(subject, maker, folder, scratch)
        left_out = maker.ask("weights", TIMEOUT, path=str(folder / WEIGHTS))
        width = maker.ask("envelope", TIMEOUT, numbers="fp32" if exact else "bf16")
        asked = [*pieces(calls), *_larger(calls, maker, scratch)]
        expected = scratch / "expected.npz"
        maker.ask("answer", TIMEOUT, calls=_written(asked, scratch), path=str(expected))
        layers = _layers(subject, maker, file, facts["threads"], scratch)
    found, versions = answers(runtime, file, form.numbers, facts["threads"], asked, scratch)
    checks = compare(read_arrays(expected), found, width, facts["outputs"])
    change = None
    if not exact:
        whole, _ = answers(runtime, file, form.numbers, facts["threads"], calls.inputs, scratch)
        outputs = _written(whole, scratch, "whole.npz")
        change = judge.ask("change", TIMEOUT, outputs=outputs, margin=subject.margin)
    kept, reason = _answer(checks, layers["checks"], change)
    told = [check.to_dict() for check in checks]
    unseen = astray(told, facts["unused"]) if kept else ""
    rows = list(map(calls.rows_of, asked))
    return Exported(
        job="",
        runtime=runtime,
        form=form.name,
        numbers=form.numbers,
        file=str(file),
        hashes={p.name: _sha256(p) for p in sorted((*folder.glob("model.*"), folder / WEIGHTS))},
        kept=kept and not unseen,
        reason=reason or unseen,
        samples=min(sum(rows), sum(map(calls.rows_of, calls.first(PROOF_SAMPLES)))),
        batches=tuple(sorted(set(rows))),
        checks=tuple(told),
        unused=tuple(facts["unused"]),
        layers=layers,
        change=change,
        inputs=tuple(_inputs(calls, facts["inputs"])),
        trained=facts["trained"] | {"numbers": "fp64" if facts["double"] else "fp32"},
        measured=subject.measured,
        machine=inspect().to_dict(),
        versions={k: v for k, v in versions.items() if k != "of_the_job"},
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        metric=facts["metric"] if is_of_the_same(facts) else facts["trained"]["metric"],
        notes=tuple(_notes(facts, left_out)),
    )


def _notes(facts: dict[str, Any], left_out: Sequence[str]) -> Iterator[str]:
    if moved := moved_since(facts):
        yield moved
    if damaged := damaged_of(facts):
        yield damaged
    if facts["double"]:
        yield "the model has weights in fp64, and its file is compared with it to rounding in fp32 alone"
    if left_out:
        names = " and ".join(f"'{name}'" for name in left_out)
        yield f"{WEIGHTS} holds tensors alone, without {names} of the state_dict"


def _larger(calls: Calls, maker: Child, scratch: Path) -> list[list[Any]]:
    """A call on one sample more than the metric has ever put together: what a model keeps for the batches
    that it has seen, such as numbers of rows, may stand in the file as a constant.

    None where the model itself takes no more.
    """
    asked = [calls.larger()]
    try:
        larger = {"calls": _written(asked, scratch, "larger.npz"), "path": str(scratch / "of_larger.npz")}
        maker.ask("answer", TIMEOUT, **larger)
    except (ChildFailed, JobError, Refused):
        return []
    return asked


def _file(subject: Subject, maker: Child, folder: Path, scratch: Path) -> Path:
    """The form's file in the folder: the one that was judged, where there is one, or made now."""
    made = subject.made
    if made is None:
        maker.ask("write", TIMEOUT, form=subject.form.name, folder=str(scratch))
        made = scratch / subject.form.file
    elif not made.is_file() or (subject.sha256 and digest(made) != subject.sha256):
        raise CheckpointError(f"'{made}' is not the file that vivace compress wrote: run it again")
    for part in parts(made):
        shutil.copyfile(part, folder / f"model{part.suffix}")
    return folder / f"model{made.suffix}"


def _layers(subject: Subject, maker: Child, file: Path, threads: int, scratch: Path) -> dict[str, Any]:
    """How far each layer that stands in the file is from the model's, in order, and of how many; or under
    ``reason`` why none can be told.
    """
    form, found = subject.form, {"of": 0, "checks": [], "reason": ""}
    if form.numbers != "fp32":
        return {**found, "reason": f"{form.numbers} moves every layer, and the metric decides"}
    if form.runtime == "aoti":
        return {**found, "reason": "what is compiled ahead of time keeps no layer's output"}
    asked = few_calls(Calls.load(scratch))
    try:
        layers = maker.ask("layers", TIMEOUT, form=form.name, calls=_written(asked, scratch))
        asked = asked[: layers["calls"]]
        told, facts = answers(form.opener, file, form.numbers, threads, asked, scratch, layers["values"])
        path = _written(told, scratch, "layers.npz")
        checks = maker.ask("layer_checks", TIMEOUT, told=facts["told"], path=path)
    except (Refused, ChildFailed) as error:
        return {**found, "reason": str(error)}
    return {**found, "of": len(layers["values"]), "checks": checks}


def _answer(
    checks: list[Check], layers: list[dict[str, Any]], change: dict[str, Any] | None
) -> tuple[bool, str]:
    """Is the file the model, and if not, which output and which layer first say so?"""
    broken = next((check for check in checks if check.problem), None)
    if change is not None and broken is None:
        if change["kept"]:
            return True, ""
        return False, "with the file's own outputs the metric is not known to stay within the margin"
    wrong = broken or next((check for check in checks if not check.kept), None)
    layer = next((one["output"] for one in layers if not one["kept"]), None)
    if wrong is None and layer is None:
        return True, ""
    if wrong is None:
        return False, f"its layer '{layer}' {DIFFERS}, though no output does on your samples"
    told = f"'{wrong.output}': {wrong.problem}" if wrong.problem else f"'{wrong.output}' {DIFFERS}"
    if layer is not None:
        return False, f"{told}; the first layer that differs is '{layer}'"
    return False, f"{told}, and the layers up to '{layers[-1]['output']}' do not" if layers else told


def _inputs(calls: Calls, names: Sequence[str]) -> list[dict[str, Any]]:
    """Each input as a caller must give it: what the model's ``forward`` calls it, dtype, and its shape with
    None where a length may vary.
    """
    return [
        {"name": f"input_{place}", "in_forward": name, "dtype": numbers, "shape": list(shape)}
        for place, (name, (numbers, shape)) in enumerate(zip(names, calls.fixed, strict=True))
    ]


def _written(arrays: list[Any], scratch: Path, name: str = "asked.npz") -> str:
    write_arrays(scratch / name, arrays)
    return str(scratch / name)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
