"""The parts that call a command of Vivace's, or another benchmark, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from book import Book, Case, Server

from vivace.errors import ChildFailed, Refused
from vivace.processes.launch import Child, Source

HERE = Path(__file__).resolve().parent
COMMAND = [sys.executable, "-c", "from vivace.command.cli import main; main()"]
TUNED = {"resnet50_256": 270.0, "mlp": 60.0}  # their budgets
DRY_BUDGET = 12.0
KEPT_EVERY = 10.0  # seconds; a fifth in a dry run
BUDGETED = ("resnet50_64", "gpt", "bert", "unet")
PEER, PEER_JOBS = "pytorch_autotune", ("resnet50", "gpt", "resnet18", "mobilenet_v3_small", "bert")


def ceilings(book: Book) -> None:
    """Rates of this GPU: what `vivace inspect --measure` finds, and a few large shapes beside it."""
    source = Source(f"{HERE / 'tiny.py'}:mlp")
    with Server(lambda: Child("probes:Probes", source, {"dry": book.dry})) as server:
        for name in ("matmul", "copy", "host_to_device", "device_to_host", "launch"):
            timeout = book.patience(60.0)
            book.case(name, lambda name=name, t=timeout: {"rates": server.ask(name, t)}, seconds=3)
    book.case("vivace inspect", lambda: _inspect(book), seconds=5)


def _inspect(book: Book) -> Case:
    options = subprocess.run([*COMMAND, "inspect", "--help"], capture_output=True, text=True, check=False)
    measure = ["--measure"] if "--measure" in options.stdout and not book.dry else []
    document = _run([*COMMAND, "inspect", "--json", *measure], max(10.0, book.left))
    return {"measured": bool(measure), "rates": document["ceilings"], "missing": document["missing"]}


def tune(book: Book) -> None:
    """A whole `vivace tune` of ResNet-50, and of the small MLP if there is time."""
    for name, full in TUNED.items():
        budget = DRY_BUDGET if book.dry else full
        if not book.dry or name == "mlp":
            least = budget if book.dry else _longest(budget)
            book.case(name, lambda n=name, b=budget: _tune(book, n, b), seconds=least)


def _longest(budget: float) -> float:
    """How long a `vivace tune` of this budget may take, its start and its report included."""
    return 1.1 * budget + 30


def _tune(book: Book, name: str, budget: float) -> Case:
    job = f"{HERE / 'workloads.py'}:{name}"
    with _archived(book, f"tune-{name}") as out:  # its ledger has every trial, also of a run that was cut off
        command = [*COMMAND, "tune", job, "--budget", str(budget), "--out", str(out), "--json", "--quiet"]
        result = _run(command, book.patience(_longest(budget)))
    if result["interrupted"]:
        raise ChildFailed("it was ended before its time, and what was cut off is no search")
    for trial in result["trials"]:
        for key in ("pairs", "machine", "job"):
            trial.pop(key)
    verdict = result.pop("verdict") or {}
    kept = ("kept", "promise", "loss_envelopes", "displacement_envelopes", "steps", "seeds", "reason")
    for key in ("plan_path", "report_path"):
        result.pop(key)
    return {"tuned": result | {"verdict": {key: verdict.get(key) for key in kept}}}


@contextmanager
def _archived(book: Book, name: str) -> Iterator[Path]:
    """A folder for what a command writes; the book's gets it as one file, anew every few seconds."""
    ended = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, name)

        def renew() -> None:
            while not ended.wait(KEPT_EVERY / (5 if book.dry else 1)):
                book.keep(out)

        renewing = threading.Thread(target=renew, daemon=True)
        renewing.start()
        try:
            yield out
        finally:
            ended.set()
            renewing.join()
            book.keep(out)


def memory(book: Book) -> None:
    """Predicted peaks against the allocator's, and what less activation memory costs."""
    for name in BUDGETED[-1:] if book.dry else BUDGETED:
        for command, seconds in (("predicted", 20.0), ("chosen", 60.0)):
            book.case(f"{name} | {command}", lambda n=name, c=command: _budgets(book, n, c), seconds=seconds)


def _budgets(book: Book, name: str, command: str) -> Case:
    child = Child("budgets:Budgets", Source(f"{HERE / 'workloads.py'}:{name}"), {"dry": book.dry})
    try:
        return {command: child.ask(command, max(30.0, book.left), name=name)}
    finally:
        child.close()


def verdicts(book: Book) -> None:
    """Scripts with one fault planted that only a GPU shows, and what `vivace profile` says of them."""
    scripts = sorted((HERE.parent / "on_cuda").glob("*_*.py"))
    for script in scripts[-1:] if book.dry else scripts:
        book.case(script.stem, lambda name=script.stem: _verdict(book, name), seconds=5 if book.dry else 60)


def _verdict(book: Book, name: str) -> Case:
    options = ["--no-gain", "--seconds", "0.5"] if book.dry else ["--seconds", "2.5"]
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows.json")
        command = [sys.executable, str(HERE.parent / "verdicts.py"), name, "--keep", str(rows), *options]
        _communicate(command, max(30.0, book.left))
        (row,) = json.loads(rows.read_text(encoding="utf-8"))["kept"]
    if row["said"] == ["failed"]:
        raise ChildFailed(row["evidence"])
    return {"row": row}


def peer(book: Book) -> None:
    """Vivace against the peer on this GPU, where that benchmark is there and the peer can be imported."""
    found = subprocess.run([sys.executable, "-c", f"import {PEER}"], capture_output=True, check=False)

    def compared(name: str) -> Case:
        if found.returncode:
            raise Refused(f"{PEER} cannot be imported here: bring it as a wheel")
        if book.dry:
            raise Refused("it writes a record, and a dry run has nothing to record")
        command = [sys.executable, str(HERE.parent / "peer.py"), name, "--budget", "30"]
        return {"printed": _communicate(command, max(20.0, book.left - 5)).strip().splitlines()[-40:]}

    for name in PEER_JOBS:
        book.case(name, lambda name=name: compared(name), seconds=0 if found.returncode else 100)
    record = (
        HERE.parent.parent / "records" / "peer" / book.facts["fingerprint"] / f"{book.facts['date']}.json"
    )
    if record.is_file():
        (book.folder / "peer.json").write_bytes(record.read_bytes())


def _run(command: list[str], timeout: float) -> dict[str, Any]:
    """The JSON document that a command printed. Raises ChildFailed with what it said where it failed."""
    document: dict[str, Any] = json.loads(_communicate(command, timeout).strip().splitlines()[-1])
    if "error" in document:
        raise ChildFailed(document["error"]["message"])
    return document


def _communicate(command: list[str], timeout: float) -> str:
    """What a command printed; after `timeout` seconds it is asked to stop, and then made to."""
    errors = subprocess.STDOUT if "--json" not in command else subprocess.PIPE
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
    )
    begin = time.monotonic()
    try:
        printed, said = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # vivace keeps the best so far
        try:
            printed, said = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed, said = process.communicate()
    if not printed.strip() or (process.returncode not in (0, 130) and "--json" not in command):
        last = re.sub(r"\s+", " ", (printed + (said or "")).strip())[-400:]
        seconds = time.monotonic() - begin
        raise ChildFailed(f"exit code {process.returncode} after {seconds:.0f} s: {last}")
    return printed
