"""A job's learning-rate schedule: stepped along a rehearsal, or alone to the end of the whole training."""

from __future__ import annotations

import dataclasses
import heapq
import math
import time
import warnings
from collections.abc import Iterator
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

import torch

from vivace import words
from vivace.job import Job
from vivace.session.opening import call, schedulers_of
from vivace.session.session import Session
from vivace.verifying.facts import SAME_NUMBER, Facts, settings_of
from vivace.verifying.states import parameter_names

_OF_PLATEAUS = ("mode", "factor", "patience", "threshold", "threshold_mode", "cooldown", "min_lrs", "eps")
Change = tuple[int, int, str, Any]  # after so many steps of it, the group, what changed, and to what


class Schedule:
    """The job's schedulers on a session's optimizer, as `train` builds and steps them."""

    def __init__(self, job: Job, session: Session) -> None:
        built: Any = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if job.scheduler is not None and session.optimizer is not None:
                built = call(job, "scheduler", session.optimizer)
        self.schedulers = schedulers_of(built)

    def step(self) -> bool:
        """One step of each; False where there is none, or it has come to its end (OneCycleLR raises then)."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for scheduler in self.schedulers:
                    plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                    scheduler.step(1.0) if plateau else scheduler.step()
        except ValueError:
            self.schedulers = []
        return bool(self.schedulers)


@dataclasses.dataclass
class WholeSchedule:
    """The optimizer's settings over a training, as what changes in them: `begin` are those of each group at
    the first step, `groups` the number of each parameter's. `steps` of `due` were gone through.
    """

    begin: list[Facts] = dataclasses.field(default_factory=list)
    changes: list[Change] = dataclasses.field(default_factory=list)
    groups: dict[str, int] = dataclasses.field(default_factory=dict)
    steps: int = 0
    due: int = 0
    per: str = "step"


def whole_schedule(job: Job, session: Session, steps_per_epoch: int | None, seconds: float) -> WholeSchedule:
    """Step the job's schedule alone, as often as its training would, as far as `seconds` reach; the session's
    optimizer is left as it comes out. Empty where the job has none, or nobody knows how often.
    """
    found = WholeSchedule(per=job.scheduler_every)
    schedule, optimizer = Schedule(job, session), session.optimizer
    each = 1 if job.scheduler_every == "epoch" else steps_per_epoch
    if not schedule.schedulers or optimizer is None or each is None:
        return found
    names, before = parameter_names(session), [settings_of(group) for group in optimizer.param_groups]
    found.begin = [facts | _waits(schedule.schedulers) for facts in before]
    found.due = job.epochs * each
    found.groups = {names[id(p)]: i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
    deadline = time.perf_counter() + seconds
    while found.steps < found.due and schedule.step():
        found.steps += 1
        after = [settings_of(group) for group in optimizer.param_groups]
        for group, (old, new) in enumerate(zip(before, after, strict=True)):
            found.changes += [(found.steps, group, k, v) for k, v in new.items() if old.get(k) != v]
        before = after
        if time.perf_counter() > deadline:
            return found
    found.due = found.steps  # behind its end nothing is stepped
    return found


def _waits(schedulers: list[Any]) -> Facts:
    """When a schedule that waits for a plateau acts, which no metric that is made up would show in full."""
    plateaus = [one for one in schedulers if isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau)]
    return {f"{key} of ReduceLROnPlateau": getattr(one, key) for one in plateaus for key in _OF_PLATEAUS}


def first_other(mine: WholeSchedule, theirs: WholeSchedule, whose: str) -> tuple[str, int]:
    """Where two schedules part, as a sentence and the number of steps taken; empty where they do not."""
    pairs = sorted({(n, theirs.groups[name]) for name, n in mine.groups.items() if name in theirs.groups})
    largest = _largest(theirs)
    now: list[list[Facts]] = [[{} for _ in side.begin] for side in (mine, theirs)]
    both = heapq.merge(_of_side(0, mine), _of_side(1, theirs), key=itemgetter(0))
    for step, changes in groupby(both, key=itemgetter(0)):
        if step > min(mine.steps, theirs.steps):
            break
        keys = set()
        for _, side, group, key, value in changes:
            now[side][group][key] = value
            keys.add(key)
        for ours, other in pairs:
            for key in sorted(keys & now[0][ours].keys() & now[1][other].keys()):
                a, b = now[0][ours][key], now[1][other][key]
                if not _same(a, b, largest.get(key, 0.0)):
                    after = words.count(step, mine.per)
                    text = f"{key} is {_told(a)}, and {_told(b)} in {whose}"
                    return f"after {after} of its schedule {text}", step
    return "", 0


def _told(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _of_side(side: int, schedule: WholeSchedule) -> Iterator[tuple[int, int, int, str, Any]]:
    begun = ((0, side, group, *item) for group, begin in enumerate(schedule.begin) for item in begin.items())
    return chain(begun, ((step, side, *rest) for step, *rest in schedule.changes))


def _largest(schedule: WholeSchedule) -> dict[str, float]:
    """The largest size of each number: beside it one that has fallen to nothing differs by chance."""
    found: dict[str, float] = {}
    begun = [(key, value) for group in schedule.begin for key, value in group.items()]
    for key, value in [*begun, *(change[2:] for change in schedule.changes)]:
        if isinstance(value, (int, float)):
            found[key] = max(found.get(key, 0.0), abs(value))
    return found


def _same(mine: object, theirs: object, largest: float) -> bool:
    if isinstance(mine, (list, tuple)) and isinstance(theirs, (list, tuple)):
        alike = (_same(a, b, largest) for a, b in zip(mine, theirs, strict=False))
        return len(mine) == len(theirs) and all(alike)
    if isinstance(mine, (int, float)) and isinstance(theirs, (int, float)):
        return math.isclose(mine, theirs, rel_tol=SAME_NUMBER, abs_tol=SAME_NUMBER * largest)
    return mine == theirs
