"""Profile a job or an unmodified script: let it run under the recorder, then judge what was recorded."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shlex
import shutil
import signal
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.errors import ChildFailed, FolderError, InputError
from vivace.files import LOCK, open_own, output_folder, own_folder, replace_text, take_lock
from vivace.processes import scripts
from vivace.profiling.record import RECORD, TRACE
from vivace.profiling.seen import UNNAMED

if TYPE_CHECKING:
    from vivace.job import Job
    from vivace.machine import Machine
    from vivace.plan import Plan

CEILING_SECONDS = 20.0
BEGIN_TIMEOUT = 24 * 3600.0  # seconds; how long the job's own model and data take nobody knows
JOB_TIMEOUT = 600.0


@dataclasses.dataclass(frozen=True)
class Profiled:
    """What a profile found: `document` is what ``--json`` prints, `exit_code` the script's own."""

    document: dict[str, Any]
    page_path: Path
    trace_path: Path | None
    exit_code: int = 0

    @property
    def verdicts(self) -> list[dict[str, Any]]:
        """Causes with evidence, gain and next step, the most important first."""
        return list(self.document["verdicts"])

    @property
    def shares(self) -> dict[str, float]:
        """Fractions of the step by phase; they sum to 1."""
        return dict(self.document["shares"])

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from vivace.pages.render import card
        from vivace.profiling.answering import answer

        return card(answer(self.document))

    def to_dict(self) -> dict[str, Any]:
        """The document that ``vivace profile --json`` prints."""
        return self.document


def profile(
    job: Job | str | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    *,
    command: Sequence[str] = (),
    out: str | os.PathLike[str] = "runs/profile",
    machine: Machine | None = None,
    strict: bool = False,
    timed_seconds: float = 4.0,
    script_output: int | None = None,
    script_input: int | None = None,
) -> Profiled:
    """Where the time and the memory of a training step go, how far it is from the limit, and why.

    Args:
        job: a Job, or its reference; left out where `command` is given.
        plan: profile the job under this plan.
        command: an unmodified script with its interpreter and arguments, such as ``["python", "train.py"]``.
        out: folder for the page, the trace and ``profile.json``; made if missing. An earlier profile in it is
            replaced, which the document says; anything else in it is refused.
        machine: its `ceilings` bound the step; left out, this machine's stored ones, measured where missing.
        strict: forbid TF32 and its like, as the reference of `tune` does.
        timed_seconds: the least length of the window in which nothing but the clock runs; a quarter of it is
            enough for 100 steps.
        script_output: file descriptor of the script's standard output; left out, this process's own.
        script_input: the same of its standard input.

    Started by torchrun, all ranks train the job together, and the document says what their number brings, and
    what others would: `ranks`, `law` and `expected` stand in the place of verdicts and roofline.

    Raises InputError, JobError, Refused, FolderError; ChildFailed where nothing was recorded.
    """
    _require_either(job, command)
    from vivace.training.crew import num_ranks

    if num_ranks() > 1:
        return _together(_required(job), plan, Path(out), machine, strict, timed_seconds)
    if command and (plan is not None or strict):
        raise InputError("plan and strict need a JOB: a script is profiled as it is")
    words = scripts.resolved(command) if command else []
    wanted = None if job is None else _planned(plan, job)  # before the earlier profile goes
    with _prepared(Path(out)) as (folder, new, earlier):
        exit_code, epochs, name = 0, None, shlex.join(command)
        from vivace.inspection import inspect

        known = machine or inspect()
        if words:
            exit_code = _run_script(words, new, timed_seconds, script_output, script_input)
        else:
            assert job is not None
            name = job if isinstance(job, str) else UNNAMED
            epochs = _run_job(job, wanted, new, known, strict, timed_seconds)
        record = _read_record(new, exit_code, command)
        unsteady = ""
        if machine is None:
            known, unsteady = _with_ceilings(known, str(record.get("device", "cpu")))
        record["exit_code"] = exit_code
        document: dict[str, Any] = {"exit_code": exit_code, "replaced": earlier}
        document |= {} if wanted is None else {"plan": wanted.to_dict()}
        return _judge(record, new, folder, known, name, epochs, document, unsteady)


def _require_either(job: Job | str | None, command: Sequence[str]) -> None:
    if (job is None) == (not command):
        raise InputError("profile takes either a JOB or a command after '--', such as -- python train.py")
    if isinstance(command, str):
        raise InputError(f"command is the text {command!r}; give its words: {command.split()}")


def _planned(plan: Plan | str | os.PathLike[str] | None, job: Job | str) -> Plan:
    from vivace.job import require_job
    from vivace.plan import Plan
    from vivace.processes.launch import plan_of

    require_job(job)
    return Plan() if plan is None else plan_of(plan, job)


def _required(job: Job | str | None) -> Job | str:
    from vivace.training.crew import num_ranks

    if job is None:
        raise InputError(
            f"{num_ranks()} ranks would each profile the command for themselves: start the profile before "
            "torchrun, as in vivace profile -- torchrun --nproc-per-node 2 train.py"
        )
    return job


def _together(
    job: Job | str,
    plan: Plan | str | os.PathLike[str] | None,
    out: Path,
    machine: Machine | None,
    strict: bool,
    timed_seconds: float,
) -> Profiled:
    """What several ranks bring; rank 0 writes, and all return it."""
    from vivace.inspection import inspect
    from vivace.plan import Plan
    from vivace.processes.launch import Source
    from vivace.profiling import together
    from vivace.training.crew import company_of, lead_or_follow, num_ranks
    from vivace.training.ranks import for_so_many

    source = Source(job)

    def lead() -> dict[str, Any]:
        given = _planned(plan, job)
        wanted = for_so_many(given, num_ranks())
        with _prepared(out) as (folder, new, earlier):
            document = together.measured(
                company,
                wanted,
                machine or inspect(),
                name=source.name,
                folder=folder,
                strict=strict,
                seconds=timed_seconds,
                replaced=earlier,
            )
            document |= {"page_path": str(folder / "profile.html"), "trace_path": None, "exit_code": 0}
            if wanted == given and not (plan is None or isinstance(plan, Plan)):
                document["plan_path"] = str(plan)
            else:  # none that the person has averages the ranks' gradients
                wanted.save(new / PLAN_OF_RANKS)
                document["plan_path"] = str(out / PLAN_OF_RANKS)
            _write(document, new)
            return document

    with company_of(source) as company:
        document = lead_or_follow(company, lead)
    return Profiled(document, Path(document["page_path"]), None)


def _judge(
    record: dict[str, Any],
    new: Path,
    folder: Path,
    machine: Machine,
    name: str,
    epochs: int | None,
    more: dict[str, Any],
    unsteady: str,
) -> Profiled:
    from vivace.profiling.judge import judge

    document = {**judge(record, new / TRACE, machine, name, epochs), **more}
    if unsteady and document["bound_seconds"] is not None:
        document["unsteady_limit"] = unsteady
        document["missing"].append(f"a limit that holds: {unsteady}")
    page, trace = folder / "profile.html", folder / TRACE if (new / TRACE).is_file() else None
    document |= {"page_path": str(page), "trace_path": None if trace is None else str(trace)}
    _write(document, new)
    return Profiled(document, page, trace, more["exit_code"])


def _write(document: dict[str, Any], folder: Path) -> None:
    from vivace.profiling.page import render

    replace_text(folder / "profile.html", render(document))
    replace_text(folder / "profile.json", json.dumps(document, default=str))


PLAN_OF_RANKS, LOG = "plan-of-ranks.toml", "job.log"
NEW = "profile.unfinished.tmp"  # a profile writes in it until it answers; no person has such a name
WRITTEN = ("profile.html", "profile.json", "record.json*", "trace.json*", "worker-*.json", PLAN_OF_RANKS)
OWN = (*WRITTEN, "rank-*", LOG, NEW, LOCK)
LEFT_BEHIND = ("worker-*.json", "trace.json.*", "rank-*/worker-*.json", "rank-*/trace.json.*")  # by a process


@contextlib.contextmanager
def _prepared(folder: Path) -> Iterator[tuple[Path, Path, str | None]]:
    """Inside, the folder is this profile's alone: given with the one for what it writes, and with what an
    earlier profile was of, whose files make way for the new ones unless this one fails. Raises FolderError.
    """
    folder = output_folder(folder, OWN, locked=True).resolve()
    with take_lock(folder, "profile"):
        shutil.rmtree(folder / NEW, ignore_errors=True)  # of one that was ended by force
        (folder / LOG).unlink(missing_ok=True)
        new = own_folder(folder / NEW)
        try:
            yield folder, new, _earlier(folder / "profile.json")
            _remove(folder, WRITTEN)
            for earlier in folder.glob("rank-*"):
                shutil.rmtree(earlier, ignore_errors=True)
            for file in new.iterdir():
                file.replace(folder / file.name)
        finally:
            shutil.rmtree(new, ignore_errors=True)


def _remove(folder: Path, patterns: Iterable[str]) -> None:
    for file in itertools.chain.from_iterable(map(folder.glob, patterns)):
        if file.is_file():
            file.unlink(missing_ok=True)


def _earlier(path: Path) -> str | None:
    """What the profile that lies here was of."""
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["target"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _run_job(
    job: Job | str,
    wanted: Plan | None,
    folder: Path,
    machine: Machine,
    strict: bool,
    timed_seconds: float,
) -> int:
    """Drive the job in a child process; returns its epochs."""
    from vivace.processes.launch import Child, Source, enough_memory_to

    assert wanted is not None
    arguments = {"machine": machine.to_dict()}
    driver = "vivace.profiling.drive:Driver"
    with (
        enough_memory_to("profile the job"),
        Child(driver, Source(job), arguments, log=folder.parent / LOG, environment=QUIET) as child,
    ):
        child.ask(
            "begin",
            BEGIN_TIMEOUT,
            plan=wanted.to_dict(),
            folder=str(folder),
            timed_seconds=timed_seconds,
            strict=strict,
        )
        done = child.ask("run", JOB_TIMEOUT)
    return int(done["epochs"])


# torch's profiler writes lines of its own to standard error, which is the script's.
QUIET = {"KINETO_LOG_LEVEL": "6", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def _run_script(
    command: list[str], folder: Path, timed_seconds: float, output: int | None, source: int | None
) -> int:
    """Run a person's command with the hooks injected; it reads and writes where it always does.

    Ctrl-C ends the script, not the profile: what was recorded until then is judged.
    """
    variables = {"VIVACE_PROFILE": str(folder), "VIVACE_PROFILE_SECONDS": str(timed_seconds)}
    environment = {**QUIET, **scripts.injected(**variables)}
    with scripts.started(command, env=environment, stdout=output, stdin=source) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            scripts.end(process)
            if not _has_steps(folder):
                raise
            code = -signal.SIGINT
    return scripts.exit_code(code)


def _has_steps(folder: Path) -> bool:
    """Was a step timed before the script was interrupted?"""
    try:
        return bool(json.loads((folder / RECORD).read_text(encoding="utf-8")).get("clean_steps"))
    except (OSError, ValueError):
        return False


SIGNALLED = 128  # and the number of a signal, as `scripts.exit_code` tells it
FULL_BYTES = 2**20  # what is free where a record and its trace could not be written


def _read_record(folder: Path, exit_code: int, command: Sequence[str]) -> dict[str, Any]:
    _remove(folder, LEFT_BEHIND)
    path = folder / RECORD
    if folder.is_dir():  # it may be the recorder's: scripts remove what they find, and its lock with it
        os.close(open_own(folder.parent / LOCK, os.O_RDWR | os.O_CREAT))
    ended = f" (the script ended with exit code {exit_code})" if exit_code else ""
    if not path.is_file():
        if not folder.is_dir():
            raise FolderError(
                f"the profile is lost: while it ran, its folder '{folder.parent}' was removed, as by a "
                "script that clears earlier runs; name another with --out"
            )
        if shutil.disk_usage(folder).free < FULL_BYTES:
            raise FolderError(f"nothing was recorded: the disk of '{folder.parent}' is full")
        if exit_code > SIGNALLED:
            raise ChildFailed(f"nothing was recorded: signal {exit_code - SIGNALLED} ended the script before")
        program = shutil.which(command[0]) if command else None
        ran = f" ({program})" if program else ""
        raise ChildFailed(
            f"nothing was recorded{ended}: did the command{ran} start Python, and train with torch?"
        )
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if "refused" in record:
        raise ChildFailed(f"nothing was recorded{ended}: {record['refused']}")
    if not record.get("clean_steps"):
        problems = record.get("problems") or [""]
        detail = f": {problems[0].strip().splitlines()[-1]}" if problems[0] else ""
        why = "a profile needs about 15 steps after the first three"
        if record.get("unseen_updates"):
            why = "the optimizer's step is compiled, and a compiled one is not seen: profile it without that"
        raise ChildFailed(f"no training step was timed{ended}{detail}; {why}")
    record["other_ranks"] = [
        json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob(f"rank-*/{RECORD}"))
    ]
    return record


def _with_ceilings(machine: Machine, device: str) -> tuple[Machine, str]:
    """The machine with ceilings of `device`: stored ones, or measured now; and why these do not hold."""
    from vivace.inspection.measuring import STEADY, survey_and_keep
    from vivace.inspection.store import cached_ceilings

    ceilings = cached_ceilings(machine.measured_as, device)
    if "copy_device" not in ceilings or "matmul_fp32" not in ceilings:
        found = survey_and_keep(machine, device, CEILING_SECONDS)
        return dataclasses.replace(machine, ceilings=found.values), found.absent.get(STEADY, "")
    return dataclasses.replace(machine, ceilings=ceilings), ""
