"""Trains a Job under a Plan to its end, through kills, full disks and requests to stop."""

from __future__ import annotations

import dataclasses
import datetime
import gc
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from vivace import words
from vivace.errors import Diverged, FolderError, InputError, JobError, OutOfMemory
from vivace.events import EventKind, OnEvent, metric_title
from vivace.files import finite, replace_file, replace_text
from vivace.inspection import inspect
from vivace.inspection.device_choice import of_launch
from vivace.job import Job, load, require_job
from vivace.machine import Machine
from vivace.pages.answer import Answer
from vivace.pages.notebook import listening
from vivace.pages.sameness import of_run
from vivace.pictures import PICTURES
from vivace.plan import Plan
from vivace.session.opening import call, models_of, start
from vivace.training.checkpoints import kept_plan, kept_seed, kept_tuned, save_model
from vivace.training.crew import num_ranks, num_ranks_here
from vivace.training.folder import SEED, RunFolder
from vivace.training.loop import DEADLINE, Loop
from vivace.training.options import LARGEST_SEED, Changed, OnNan, Options
from vivace.training.progress import raising_the_listeners
from vivace.training.ranks import Ranks, for_so_many, joined
from vivace.training.resuming import load_into
from vivace.training.survival import naming_memory
from vivace.training.tuned import consists_of, doubt_of, found_by_tune, of_plan
from vivace.training.watch import Unwatched, Watch


@dataclasses.dataclass(frozen=True)
class Run:
    """What `train` did. `metric` and `loss` are the last ones; `seconds` and the speed are of this process.

    `missing_steps` were promised by the length of the data, and no batch came for them. `epochs_left` are
    those of the Job that were not trained to their end, as `max_steps` or a signal came before.
    `interrupted_by` names the signal that asked for the stop, or ``deadline``; the run can then be resumed.
    `damaged` are the samples that could not be read: index, path, error, and the times they were met.
    `metric_data` says whether the metric is of ``validation`` or ``training`` data. `watched` is what
    watching its steps found (see `vivace.train`) in all processes that trained it, with a `sentence`; None
    without a plan.

    `job` is its reference, where it was given as one; `does` says what each technique of `plan` does;
    `seconds` are those of all processes that trained it, `stepping_seconds` what of this one's went into
    steps. `tuned` is what the ledger beside the plan's file held of the plan and this very job when the run
    began: its ``speedup`` and its ``verdict``. `found` is what a search while it trained came to: its
    ``outcome``, ``reason``, whether it has ``ended``, and of a plan ``ratio``, ``step`` (its first) and
    ``saved_seconds``, which are the least, of steps alone. `energy` is what the machine took in this process,
    evaluation and all, whoever used it: ``joules``, ``joules_per_sample`` trained, the ``counters``; or the
    ``reason`` why it was not measured. `ranks` trained it together.
    """

    run_path: str
    steps: int
    epochs: int
    metric: float | None
    loss: float | None
    seconds: float
    samples_per_second: float
    resumed_from_step: int | None
    interrupted: bool = False
    interrupted_by: str = ""
    notices: tuple[str, ...] = ()
    damaged: tuple[dict[str, Any], ...] = ()
    metric_data: str | None = None
    metric_name: str = "metric"
    job: str = ""
    plan: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    does: dict[str, str] = dataclasses.field(default_factory=dict)
    date: str = ""
    device: str = ""
    stepping_seconds: float = 0.0
    tuned: dict[str, Any] = dataclasses.field(default_factory=dict)
    watched: dict[str, Any] | None = None
    missing_steps: int = 0
    found: dict[str, Any] = dataclasses.field(default_factory=dict)
    energy: dict[str, Any] = dataclasses.field(default_factory=dict)
    ranks: int = 1
    epochs_left: int = 0

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from vivace.pages.render import card  # only then: a template engine

        on = " on the validation data" if self.metric_data == "validation" else ""
        title = f"{metric_title(vars(self))}{on}"
        metric = [(title, words.number(self.metric))] if self.metric_data else []
        length = f"{words.count(self.steps, 'step')} in {words.count(self.epochs, 'epoch')}"
        stopped = f"Stopped by {self.interrupted_by} after {length}; resume=True goes on"
        length += "; max_steps ended it early, and resume=True goes on" if self.epochs_left else ""
        same, same_kept = of_run(self.to_dict())
        answer = Answer(
            command="train",
            subject=self.run_path,
            figure="" if self.interrupted else words.duration(self.seconds),
            sentence=stopped if self.interrupted else f"to train {length}",
            tone="open" if self.interrupted else "bad" if same_kept is False else "good",
            same=same,
            parts=tuple(self.does.items()),
            notes=self.notices,
            facts=(
                *metric,
                ("training loss", words.number(self.loss)),
                ("samples a second", words.number(self.samples_per_second)),
            ),
        )
        return card(answer)

    @property
    def exit_code(self) -> int:
        """What a command that trained ends with: 0; 1 where steps are missing; or 128 and the signal's
        number: 130 after Ctrl-C, and at a deadline what SIGTERM would give.

        Of several ranks only rank 0 ends with 1, which has the most to do at the end: torchrun ends all
        where one does.
        """
        name = "SIGTERM" if self.interrupted_by == DEADLINE else self.interrupted_by
        short = self.missing_steps > 0 and of_launch("RANK", 0) == 0
        return 128 + signal.Signals[name] if name else int(short)

    def to_dict(self) -> dict[str, Any]:
        """The document that ``vivace train --json`` prints."""
        return dataclasses.asdict(self)


WatchedBy = Callable[[Job, Plan, Machine, int, Ranks, Path], Watch]


def _unwatched(*_: object) -> Watch:
    return Unwatched()


def train(
    job: Job | str,
    plan: Plan | str | os.PathLike[str] | None = None,
    *,
    out: str | os.PathLike[str] = "runs/train",
    resume: bool = False,
    restart: bool = False,
    seed: int | None = None,
    on_event: OnEvent | None = None,
    watched_by: WatchedBy = _unwatched,
    **settings: Any,
) -> Run:
    """Train a job; see `vivace.train`, which is this with a sentinel. `settings` are the others of `Options`.

    `watched_by` makes who looks at the steps, of the job, its plan, the machine, the seed, the ranks and the
    run folder, before the job is opened.
    """
    options = Options(seed or 0, restart=restart, **settings)
    _check(options, resume=resume)
    path = Path(out).absolute()
    own_plan = path / "plan.toml"
    name = job if isinstance(job, str) else ""
    plan_file = None if plan is None or isinstance(plan, Plan) else Path(plan).absolute()
    keeps_its_plan = plan is None and resume and os.path.lexists(own_plan)
    job, plan = _loaded(job, plan)
    plan = _own_plan(path) if keeps_its_plan else plan
    plan = for_so_many(plan, num_ranks()) if resume else plan
    with raising_the_listeners(), joined(plan, options.rank_timeout_seconds) as ranks, ExitStack() as stack:
        if ranks.began_before(str(path)):
            resume = True
            options = dataclasses.replace(options, changed="ok", restart=False)  # nobody is there to be asked
            if os.path.lexists(own_plan):
                # A smaller one than was given, where a step ran out of memory.
                plan = for_so_many(_own_plan(path), ranks.world_size)
        with ranks.together():
            if ranks.writes:
                stack.enter_context(RunFolder(path, resume=resume, restart=options.restart))
        options = _seeded(options, path, ranks, kept=resume and seed is None)
        with ranks.together():
            machine = inspect()
        tuned = found_by_tune(plan_file, plan, name, machine.fingerprint)
        tuned = tuned or (kept_tuned(path / "checkpoints") if resume else {})
        opened = partial(_opened, job, machine, ranks, path, listening(on_event), watched_by, tuned)
        try:
            with opened(plan, options) as loop:
                loop.run()
                run = _write_results(loop, machine, name)
            return _handed_on(loop, run)
        except Diverged as error:
            if not error.may_pass or options.on_nan != "rollback":
                raise
            plan, first, text = loop.plan, loop.first_attempt(), error.what
        del loop
        gc.collect()
        with opened(plan, dataclasses.replace(options, changed="ok", restart=False)) as loop:
            loop.repeat(text, first)
            loop.run()
            run = _write_results(loop, machine, name)
        return _handed_on(loop, run)


def _seeded(options: Options, path: Path, ranks: Ranks, *, kept: bool) -> Options:
    """With the seed `kept` of the run; it is written down, as a run may end before its first checkpoint."""
    with ranks.together():
        seed = kept_seed(path) if kept else options.seed
        if ranks.writes:
            replace_text(path / SEED, f"{seed}\n")
    return dataclasses.replace(options, seed=seed)


def _handed_on(loop: Loop, run: Run) -> Run:
    """What came of it, after the job has been told: by now the plan has left the model."""
    if loop.job.on_trained is not None and loop.ranks.writes and not run.interrupted:
        call(loop.job, "on_trained", _whole_model(loop), loop.path)
    return run


def _whole_model(loop: Loop) -> Any:
    """What the Job's model() returned, trained; another one where each rank holds a part of its weights."""
    if loop.session.build.shards is None:
        return loop.session.built
    built = call(loop.job, "model")
    for module in models_of(loop.job, built):
        module.to(loop.device)
    load_into(built, torch.load(loop.path / "model.pt", map_location="cpu", weights_only=True), "the model")
    return built


@contextmanager
def _opened(
    job: Job,
    machine: Machine,
    ranks: Ranks,
    path: Path,
    on_event: OnEvent | None,
    watched_by: WatchedBy,
    tuned: dict[str, Any],
    plan: Plan,
    options: Options,
) -> Iterator[Loop]:
    """The loop of a run in `path`, where its newest checkpoint stands or at its beginning."""
    with ExitStack() as stack:
        with ranks.together(), naming_memory():
            watch = watched_by(job, plan, machine, options.seed, ranks, path)
            session = stack.enter_context(start(job, plan, machine, seed=options.seed))
        with ranks.together(), naming_memory():
            loop = Loop(job, session, ranks, path, options, on_event, watch)
        with ranks.together():
            loop.take_folder()
        if tuned and (doubt := doubt_of(tuned, consists_of(job, session, loop.feed.own_loader))):
            loop.progress.notice(f"what tune found of the plan is not told of this training: {doubt}")
        else:
            loop.checkpoints.facts |= {"tuned": tuned} if tuned else {}
        stack.callback(lambda: loop.session.close())  # which may be another one by then
        stack.callback(loop.survival.close)
        stack.callback(watch.end)
        if machine.passed_over:
            loop.progress.notice(machine.passed_over)
        if job.validation is not None and job.metric is None and job.pictures is None:
            loop.progress.notice("the Job's validation is never read: it has no metric, and no pictures")
        with naming_memory():
            yield loop


def _loaded(job: Job | str, plan: Plan | str | os.PathLike[str] | None) -> tuple[Job, Plan]:
    """The job and its plan; the job first, because its file may register techniques."""
    here = Path.cwd()
    require_job(job)
    if isinstance(job, str):
        job = load(job)
    if plan is None or isinstance(plan, Plan):
        return job, Plan() if plan is None else plan
    return job, Plan.load(plan if Path.cwd() == here else here / plan)  # the job's file may have left


def _own_plan(path: Path) -> Plan:
    """The plan of the run in a folder: that of its newest checkpoint, which may be newer than its file."""
    kept = kept_plan(path / "checkpoints")
    return Plan.load(path / "plan.toml") if kept is None else kept


def _check(options: Options, *, resume: bool) -> None:
    if resume and options.restart:
        raise InputError("resume goes on and restart trains from zero: give one of them, not both")
    positive = ("max_steps", "checkpoint_every_seconds", "checkpoint_every_steps", "rank_timeout_seconds")
    for name in (*positive, "deadline_seconds"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise InputError(f"{name} must be more than 0, not {value!r}")
    if options.changed not in get_args(Changed):
        raise InputError(f"changed is one of {', '.join(get_args(Changed))}, not '{options.changed}'")
    if options.on_nan not in get_args(OnNan):
        raise InputError(f"on_nan is one of {', '.join(get_args(OnNan))}, not '{options.on_nan}'")
    if not 0 <= options.seed <= LARGEST_SEED:
        raise InputError(f"the seed must be from 0 to {LARGEST_SEED}, not {options.seed}")


def _remove_earlier(loop: Loop) -> None:
    """Remove what an earlier end left of other steps, as run.json does not tell of it any more."""
    try:
        ended_at = json.loads((loop.path / "run.json").read_bytes())["steps"]
    except (OSError, ValueError, KeyError, TypeError):  # none, or of another version
        ended_at = None
    for name in ("model.pt", PICTURES) if loop.stopped_by else (PICTURES,):
        if loop.ranks.writes and ended_at != loop.position.step:
            (loop.path / name).unlink(missing_ok=True)


def _keep_model(loop: Loop) -> None:
    """Leave model.pt in the run folder, where the run came to its end."""
    if loop.stopped_by:
        return
    model = loop.model_state()
    with loop.ranks.together():
        if loop.ranks.writes:
            replace_file(loop.path / "model.pt", lambda file: save_model(model, file))


def _draw(loop: Loop) -> None:
    """Leave the job's pictures in the run folder. Where they cannot be drawn, a notice says why."""
    if loop.job.pictures is None or loop.stopped_by:
        return
    with loop.ranks.together(), loop.session.whole():
        if not loop.ranks.writes:
            return
        try:
            replace_text(loop.path / PICTURES, json.dumps(loop.evaluation.pictures()))
        except (JobError, OutOfMemory, FolderError) as error:
            loop.progress.notice(f"the run has no pictures: {error}")


def _known_before(path: Path, run: Run, *, trained: bool) -> dict[str, Any]:
    """Of a resumed run, what a search had found while an earlier process trained it; and where nothing was
    left to be trained in this one, what the process that ended it measured, from which step on, and told.
    """
    try:
        before = json.loads((path / "run.json").read_bytes())
        if before["plan"] != run.plan:
            return {}
        known = {"found": run.found or before["found"]}
        if not trained and (before["steps"], before["interrupted"]) == (run.steps, False):
            measured = "samples_per_second", "stepping_seconds", "energy", "device", "resumed_from_step"
            known |= {key: before[key] for key in measured}
            known["notices"] = tuple(dict.fromkeys((*before["notices"], *run.notices)))
        return known
    except (OSError, ValueError, KeyError, TypeError):  # none, or of another version
        return {}


def _write_results(loop: Loop, machine: Machine, name: str) -> Run:
    """Leave model.pt and pictures, where the run came to its end, and run.json in the run folder."""
    position, ranks, plan, device = loop.position, loop.ranks, loop.plan, loop.device.type
    here = time.monotonic() - loop.started_at
    began = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=here)
    _remove_earlier(loop)
    _keep_model(loop)  # before anything draws: that may end the process
    _draw(loop)
    for before, damage in (("", loop.damage), ("in the validation data ", loop.evaluation.damage)):
        if text := damage.sentence():
            loop.progress.notice(f"{before}{text}")
    run = Run(
        run_path=str(loop.path),
        steps=position.step,
        epochs=position.epoch,
        metric=position.metric,
        loss=position.loss,
        seconds=loop.seconds,
        samples_per_second=loop.samples * ranks.world_size / max(loop.stepping_seconds, 1e-9),
        resumed_from_step=loop.resumed_from_step,
        interrupted=bool(loop.stopped_by),
        interrupted_by=loop.stopped_by,
        notices=tuple(loop.progress.notices),
        damaged=tuple(loop.damage.listed()),
        metric_data=loop.job.metric_data,
        metric_name=loop.job.metric_name,
        job=name,
        plan=plan.to_dict(),
        does=plan.does,
        date=began.isoformat(timespec="seconds"),
        device=next((found.name for found in machine.devices if found.kind == device), device),
        stepping_seconds=loop.stepping_seconds,
        tuned=of_plan(loop.checkpoints.facts.get("tuned", {}), plan, machine.fingerprint),
        watched=loop.watch.to_dict(),
        missing_steps=position.missing,
        found=loop.watch.found(),
        energy=loop.progress.meter.told((loop.samples_before + loop.samples) * num_ranks_here()),
        ranks=ranks.world_size,
        epochs_left=max(0, loop.job.epochs - position.epoch),
    )
    facts = {"plan_id": plan.id, "machine": machine.to_dict()}
    if loop.resumed_from_step is not None:
        known = _known_before(loop.path, run, trained=loop.samples > 0)
        facts |= {key: known.pop(key) for key in known.keys() & {"resumed_from_step"}}
        run = dataclasses.replace(run, **known)
    document = json.dumps(finite({**run.to_dict(), **facts}), indent=1).encode()
    with ranks.together():
        if ranks.writes:
            replace_file(loop.path / "run.json", lambda file: file.write(document))
    loop.progress.tell(EventKind.STOP, **run.to_dict())
    return run
