"""`vivace tune -- python train.py`: the script is run for the plan alone, and nothing it writes is kept."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vivace.errors import AnswerIsNo, InputError
from vivace.files import output_folder, take_lock
from vivace.live import cover
from vivace.live.answering import ratio_of
from vivace.live.errand import OWN, PAGE, PLAN, VARIABLE, Errand, lying_in
from vivace.processes import scripts

OUTPUT = "script.txt"  # what the script printed
DISK = Path("/var/tmp")  # for what is large and may go
BUDGET_SECONDS = 600.0
# After the budget, for a script that has not come to its next step: as long again, within these bounds.
LATE_SECONDS = (10.0, 60.0)
# What a script sends elsewhere is not kept back by folders; these two have a word for it.
OFFLINE = {"WANDB_MODE": "offline", "COMET_MODE": "disabled"}


@dataclasses.dataclass(frozen=True)
class Searched:
    """What a search on a script's own steps found; `document` holds what `tune --json` prints of a job, and
    what the script's run left (see ``run.json``).
    """

    document: dict[str, Any]
    plan_path: Path | None

    @property
    def exit_code(self) -> int:
        """0 where there is an answer, 1 where nothing could be tried or measured."""
        return (
            0
            if self.document["outcome"] in ("faster", "nothing_helps", "none_kept")
            else AnswerIsNo.exit_code
        )

    def to_dict(self) -> dict[str, Any]:
        """The document that ``vivace tune --json`` prints."""
        return self.document


def search(
    command: Sequence[str],
    *,
    out: str | os.PathLike[str] = "runs/tune",
    budget_seconds: float = BUDGET_SECONDS,
    ways: Sequence[str] = (cover.OVERLAY, cover.READ_ONLY),
    script_input: int | None = None,
) -> Searched:
    """Find the plan for a script on its own first steps, and end it then. What it writes is gone afterwards.

    Args:
        command: the script with its interpreter and arguments, such as ``["python", "train.py"]``.
        out: folder for the plan, the ledger and the page; made if missing.
        budget_seconds: after which the best so far is the answer.
        ways: how the script is kept from writing, the first that this system has; see `vivace.live.cover`.
        script_input: file descriptor of the script's standard input; left out, and where it is a terminal,
            nothing, as what the script asks there would not be seen.

    Raises InputError, also where this system has none of the ways; FolderError.
    """
    if not command:
        raise InputError("tune takes a JOB, or a command after '--', such as -- python train.py")
    words = scripts.resolved(command)
    folder = output_folder(Path(out), (*OWN, OUTPUT), locked=True).resolve()
    shown = shlex.join(words)
    with take_lock(folder, "search"), _scratch() as scratch:
        earlier = lying_in(folder)
        errand = Errand(
            str(folder),
            str(out),
            shown,
            launcher=os.getpid(),
            search_seconds=budget_seconds,
            earlier=earlier,
        )
        environment = OFFLINE | scripts.injected(**{VARIABLE: errand.dumps()})
        covered = [sys.executable, "-I", cover.__file__, str(scratch), str(folder), *ways, "--", *words]
        until = budget_seconds + min(max(LATE_SECONDS[0], budget_seconds), LATE_SECONDS[1])
        code = _ended(covered, environment, folder / OUTPUT, until, script_input)
        found = errand.take_document()
    if code == cover.CANNOT_COVER:
        raise InputError(
            "this system has neither mount namespaces with overlays nor Landlock, so what the script writes "
            f"cannot be kept out of your folders: vivace run -- {shown} tunes it while it trains"
        )
    return _searched(found, folder, Path(out), shown, code)


def _ended(
    command: Sequence[str], environment: dict[str, str], output: Path, seconds: float, source: int | None
) -> int:
    """The exit code of the script, which is ended where it takes too long."""
    stdin = subprocess.DEVNULL if source is None or os.isatty(source) else source
    with (
        output.open("wb") as log,
        scripts.started(command, env=environment, stdin=stdin, stdout=log, stderr=log) as process,
    ):
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:  # after Ctrl-C Python says what came of it; not after SIGTERM
            process.send_signal(signal.SIGINT)
            return scripts.end(process)
        except KeyboardInterrupt:
            scripts.end(process)
            raise


def _searched(found: dict[str, Any] | None, folder: Path, shown: Path, command: str, code: int) -> Searched:
    found = found or {"outcome": "nothing_seen", "plan": {}, "tried": [], "reason": ""}
    timed = [entry for entry in found["tried"] if "wall" in entry]
    judged = [entry for entry in found["tried"] if "verdict" in entry]
    outcome = (
        "faster"
        if found["plan"]
        else "nothing_helps"
        if timed or any(entry["verdict"]["kept"] for entry in judged)
        else "none_kept"
        if judged
        else "nothing_tried"
    )
    ended = (
        f" (the script ended with exit code {scripts.exit_code(code)}; see {shown / OUTPUT})" if code else ""
    )
    plan_path = folder / PLAN if found["plan"] else None
    document = {
        **found,
        "outcome": outcome,
        "reason": (found["reason"] or "it ended before it could say what it had seen") + ended
        if not found["plan"]
        else "",
        "plan_path": str(plan_path) if plan_path is not None else None,
        "speedup": found.get("ratio") if found["plan"] else {"estimate": 1.0, "low": 1.0, "high": 1.0},
        "baselines": {},
        "promise": _promise(found["plan"]),
        "verdict": {"kept": True, "worst": found["worst"], "limit": found["limit"]}
        if found["plan"]
        else None,
        "break_even_steps": None,
        "trials": [_trial(entry) for entry in found["tried"]],
        "report_path": str(folder / PAGE) if found["tried"] and (folder / PAGE).is_file() else None,
        "next": f"vivace run --plan {shlex.quote(str(shown / PLAN))} -- {command}"
        if found["plan"]
        else f"vivace run -- {command}",
        "script_exit_code": code,
    }
    return Searched(document, plan_path)


def _promise(plan: dict[str, dict[str, Any]]) -> str:
    from vivace.plan import Plan

    return Plan.from_dict(plan).promise.name.lower()


def _trial(entry: dict[str, Any]) -> dict[str, Any]:
    status = "measured" if "wall" in entry else "refused"
    verdict = entry.get("verdict") or {}
    reason = verdict.get("reason") or ("" if status == "measured" else entry["answer"])
    ratio = dataclasses.asdict(ratio_of(entry)[0]) if status == "measured" else None
    beside = entry.get("beside", [])  # the techniques that the ratio is beside, if any
    told = {"techniques": list(entry["plan"]), "status": status, "reason": reason}
    return told | {"ratio": ratio, "beside": beside}


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A folder for what the script writes, gone afterwards."""
    place = Path(tempfile.mkdtemp(prefix="vivace-", dir=DISK if os.access(DISK, os.W_OK) else None))
    try:
        yield place
    finally:
        shutil.rmtree(place, onerror=_opened_up)


def _opened_up(remove: Callable[[str], object], path: str, _: object) -> None:
    """An overlay leaves folders that not even their owner may look into."""
    with contextlib.suppress(OSError):
        os.chmod(path, stat.S_IRWXU)
        if os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            remove(path)
