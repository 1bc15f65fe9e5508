"""The launcher's side: the person's command, with the hooks injected."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from vivace.errors import InputError
from vivace.files import output_folder, take_lock
from vivace.live.errand import DOCUMENT, OWN, PLAN, VARIABLE, Errand, lying_in
from vivace.processes import scripts

if TYPE_CHECKING:
    from vivace.plan import Plan


@dataclasses.dataclass(frozen=True)
class Ran:
    """What became of a script: its exit code, and the document that it left (see ``run.json``)."""

    exit_code: int
    document: dict[str, Any]
    plan_path: Path | None

    def to_dict(self) -> dict[str, Any]:
        """The document that ``vivace run --json`` prints."""
        plan = str(self.plan_path) if self.plan_path is not None else None
        return {**self.document, "exit_code": self.exit_code, "plan_path": plan}


def run(
    command: Sequence[str],
    plan: Plan | str | os.PathLike[str] | None = None,
    *,
    out: str | os.PathLike[str] = "runs/run",
    script_output: int | None = None,
    script_input: int | None = None,
    quiet: bool = False,
    details: bool = False,
) -> Ran:
    """Run a script as it is, faster from the moment at which that is proven.

    Args:
        command: the script with its interpreter and arguments, such as ``["python", "train.py"]``.
        plan: act under this plan from the first steps on, still proven; left out, one is searched.
        out: folder for the plan and the ledger; made if missing.
        script_output: file descriptor of the script's standard output; left out, this process's own.
        script_input: the same of its standard input.
        quiet: say nothing at the script's end.
        details: say there all that the page holds, before the answer.

    Raises InputError, PlanError, FolderError.
    """
    command, environment, errand, lock = prepared(command, plan, Path(out), quiet=quiet, details=details)
    streams = {"stdout": script_output, "stdin": script_input}
    with lock, scripts.started(command, env=environment, **streams) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:  # which the terminal sent to the script as well
            code = scripts.end(process)
    document = errand.take_document() or {"outcome": "nothing_seen"}
    plan_path = Path(errand.folder) / PLAN if document.get("plan") else None
    return Ran(scripts.exit_code(code), document, plan_path)


def become(
    command: Sequence[str],
    plan: Plan | str | os.PathLike[str] | None,
    out: Path,
    *,
    quiet: bool,
    details: bool,
) -> NoReturn:
    """Replace this process by the person's command: its signals and its exit code are the script's own.

    Raises InputError, PlanError, FolderError.
    """
    command, environment, _, lock = prepared(command, plan, out, becoming=True, quiet=quiet, details=details)
    os.set_inheritable(lock.fileno(), True)  # the script holds it as long as it lives
    sys.stdout.flush()
    sys.stderr.flush()
    with scripts.starting(command[0]):
        os.execvpe(command[0], command, environment)
    raise AssertionError("a process that was replaced goes on")


def prepared(
    command: Sequence[str],
    plan: Plan | str | os.PathLike[str] | None,
    out: Path,
    *,
    becoming: bool = False,
    quiet: bool = False,
    details: bool = False,
) -> tuple[list[str], dict[str, str], Errand, IO[bytes]]:
    """The command, its environment, its errand, and its folder's lock. `becoming`: this process will be the
    command.

    Raises InputError where there is no such program, PlanError, FolderError.
    """
    if not command:
        raise InputError("run takes a command after '--', such as -- python train.py")
    words = scripts.resolved(command)
    folder, wanted, earlier, lock = taken_folder(out, plan)
    errand = Errand(
        folder=str(folder),
        shown=str(out),
        command=shlex.join(command if scripts.has_torchrun_started() else words),
        plan=wanted,
        launcher=os.getpid(),
        became=becoming,
        quiet=quiet,
        details=details,
        launch_seconds=time.process_time() if becoming else 0.0,  # which imports take, nearly all of it
        lock=lock.fileno() if becoming else -1,
        earlier=earlier,
    )
    return words, scripts.injected(**{VARIABLE: errand.dumps()}), errand, lock


def taken_folder(
    out: Path, plan: Plan | str | os.PathLike[str] | None
) -> tuple[Path, dict[str, dict[str, Any]] | None, dict[str, int], IO[bytes]]:
    """The folder, the given plan's settings, what an earlier run has left, and the folder's lock.

    Raises FolderError, PlanError.
    """
    given = None if plan is None else _loaded(plan)
    leads = os.environ.get("RANK", "").strip() in ("", "0")  # ranks of one launch share a folder
    # Scripts clear what they find, and the lock with it; what they leave there is written at their end.
    is_in_it = isinstance(plan, str | os.PathLike) and Path(plan) == out / PLAN
    is_ours = is_in_it or (out / DOCUMENT).is_file()
    folder = output_folder(out, OWN, locked=leads and not is_ours).resolve()
    lock = take_lock(folder, "run") if leads else open(os.devnull, "rb")  # noqa: SIM115
    return folder, None if given is None else given.to_dict(), lying_in(folder) if leads else {}, lock


def _loaded(plan: Plan | str | os.PathLike[str]) -> Plan:
    from vivace.plan import Plan

    return plan if isinstance(plan, Plan) else Plan.load(plan)
