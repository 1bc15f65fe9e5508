"""The launcher's side: the person's command, with the hooks injected."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from vivace.errors import FolderError, InputError
from vivace.files import is_leftover
from vivace.live.errand import OWN, VARIABLE, Errand

if TYPE_CHECKING:
    from vivace.plan import Plan

ENDING_SECONDS = 10.0


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
) -> Ran:
    """Run a script as it is, faster from the moment at which that is proven.

    Args:
        command: the script with its interpreter and arguments, such as ``["python", "train.py"]``.
        plan: act under this plan from the first steps on, still proven; left out, one is searched.
        out: folder for the plan and the ledger; made if missing.
        script_output: file descriptor of the script's standard output; left out, this process's own.
        script_input: the same of its standard input.

    Raises InputError, PlanError, FolderError.
    """
    command, environment, folder = prepared(command, plan, Path(out))
    try:
        process = subprocess.Popen(command, env=environment, stdout=script_output, stdin=script_input)
    except OSError as error:
        raise InputError(f"'{command[0]}' cannot be run: {error.strerror}") from None
    code = _ended(process)
    document: dict[str, Any] = {"outcome": "nothing_seen"}
    with contextlib.suppress(OSError, ValueError):
        document = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    file = folder / "plan.toml"
    return Ran(code if code >= 0 else 128 - code, document, file if file.is_file() else None)


def become(command: Sequence[str], plan: Plan | str | os.PathLike[str] | None, out: Path) -> NoReturn:
    """Replace this process by the person's command: its signals and its exit code are the script's own.

    Raises InputError, PlanError, FolderError.
    """
    command, environment, _ = prepared(command, plan, out)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        raise InputError(f"'{command[0]}' cannot be run: {error.strerror}") from None


def prepared(
    command: Sequence[str], plan: Plan | str | os.PathLike[str] | None, out: Path
) -> tuple[list[str], dict[str, str], Path]:
    """The command, its environment, and the folder with nothing of an earlier run in it.

    Raises InputError where there is no such program, PlanError, FolderError.
    """
    if not command:
        raise InputError("run takes a command after '--', such as -- python train.py")
    words = list(command)
    if shutil.which(words[0]) is None:
        if words[0] != "python":
            raise InputError(f"there is no program '{words[0]}' to run")
        print(f"vivace: no 'python' is on the PATH; {sys.executable} runs the script", file=sys.stderr)
        words[0] = sys.executable
    wanted = None if plan is None else settings_of(plan)
    folder = prepared_folder(out)  # after the plan was read, which may lie in it
    inject = str(Path(__file__).parents[1] / "profiling" / "inject")
    before = os.environ.get("PYTHONPATH")
    errand = Errand(str(folder), str(out), shlex.join(words), wanted, os.getpid())
    environment = {
        **os.environ,
        "PYTHONPATH": inject + (os.pathsep + before if before else ""),
        VARIABLE: errand.dumps(),
    }
    environment.pop("VIVACE_PROFILE", None)
    return words, environment, folder


def settings_of(plan: Plan | str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """A plan's techniques with their settings. Raises PlanError where a file holds no plan."""
    from vivace.plan import Plan

    return (plan if isinstance(plan, Plan) else Plan.load(plan)).to_dict()


def prepared_folder(folder: Path) -> Path:
    """The folder, made if missing, without an earlier run's files. Raises FolderError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = [entry.name for entry in folder.iterdir()]
        if strangers := [name for name in names if name not in OWN and not is_leftover(name)]:
            raise FolderError(
                f"the output folder '{folder}' is not empty ({min(strangers)}): name another with --out"
            )
        for name in names:
            (folder / name).unlink()
    except (FileExistsError, NotADirectoryError):
        raise FolderError(f"the output '{folder}' is a file; name a folder") from None
    except OSError as error:
        raise FolderError(f"the folder '{folder}' cannot be used: {error.strerror}") from None
    return folder.resolve()


def _ended(process: subprocess.Popen[bytes]) -> int:
    """The exit code; a Ctrl-C, which the terminal sent to the script as well, waits for its own ending."""
    for wish in (None, signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if wish is not None:
            process.send_signal(wish)
        try:
            return process.wait(None if wish is None else ENDING_SECONDS)
        except KeyboardInterrupt:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    return process.wait()
