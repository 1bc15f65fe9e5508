"""Many contestants in one interleaved run: blocks of steps in turn, everybody else stopped."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from vivace.errors import ChildFailed, JobError, Refused
from vivace.inspection.quiet import ForeignLoad
from vivace.machine import Machine
from vivace.measuring.paired import Comparison, Contestant, across
from vivace.measuring.statistics import speed_ratio
from vivace.plan import Plan
from vivace.processes.launch import Source

Field = dict[str, tuple[Plan, bool]]  # by name: the plan, and whether it stands on strict fp32
REFERENCE = "strict_fp32"
BLOCK_SECONDS = 0.4
FEWEST_TURNS, MOST_TURNS = 4, 60


@dataclasses.dataclass
class Heat:
    """One set of processes. `turns` are seconds a sample by name; `failures` say who fell out and why."""

    turns: list[dict[str, float]]
    disturbed: int
    warmup_seconds: dict[str, float]
    failures: dict[str, tuple[str, str]]  # status and reason


def heat(
    source: Source, machine: Machine, field: Field, environment: Mapping[str, str], seed: int, seconds: float
) -> Heat:
    """Open everybody in fresh processes, then let them step in turn for about `seconds`."""
    running: dict[str, Contestant] = {}
    failures: dict[str, tuple[str, str]] = {}
    try:
        for name, (plan, strict) in field.items():
            running[name] = contestant = Contestant(source, machine, environment=dict(environment))
            try:
                contestant.open(plan, strict=strict, seed=seed, warm_seconds=0.5)
            except (Refused, ChildFailed, JobError) as error:
                _drop(name, running, failures, error)
        warmups = {name: contestant.warmup_seconds for name, contestant in running.items()}
        turns, disturbed = turns_of(running, failures, seconds)
    finally:
        for contestant in running.values():
            contestant.close()
    return Heat(turns, disturbed, warmups, failures)


def turns_of(
    running: dict[str, Contestant], failures: dict[str, tuple[str, str]], seconds: float
) -> tuple[list[dict[str, float]], int]:
    """Turn after turn, every second one backwards, which cancels a steady drift; and how many were disturbed.

    Disturbed turns count only where there are not enough others, as in `vivace.measuring.paired.compare`.
    """
    deadline = time.monotonic() + seconds
    others = ForeignLoad([contestant.child.pid for contestant in running.values()])
    quiet: list[dict[str, float]] = []
    disturbed: list[dict[str, float]] = []
    while True:
        count = len(quiet) + len(disturbed)
        turn = {}
        for name in list(running) if count % 2 == 0 else list(reversed(running)):
            try:
                turn[name] = on_turn(running[name])
            except ChildFailed as error:
                _drop(name, running, failures, error)
        (disturbed if others.disturb() else quiet).append(turn)
        enough = len(quiet) >= FEWEST_TURNS or len(disturbed) >= 2 * FEWEST_TURNS
        if (time.monotonic() > deadline and enough) or count >= MOST_TURNS:
            break
    kept = quiet if len(quiet) >= FEWEST_TURNS else quiet + disturbed
    return kept, len(disturbed)


def _drop(
    name: str,
    running: dict[str, Contestant],
    failures: dict[str, tuple[str, str]],
    error: Refused | ChildFailed | JobError,
) -> None:
    """Go on without a contestant, unless it is the reference."""
    running.pop(name).close()
    if name == REFERENCE:
        raise error
    failures[name] = ("refused" if isinstance(error, Refused) else "failed", str(error))


def on_turn(contestant: Contestant) -> float:
    """Seconds a sample of one block."""
    return contestant.block(max(1, round(BLOCK_SECONDS / max(contestant.step_seconds, 1e-6))))


def ratios(heats: Sequence[Heat], base: str) -> dict[str, dict[str, Any]]:
    """Each contestant's row: how many times faster than `base`, over all heats; or who fell out and why."""
    names = {name: None for done in heats for turn in done.turns for name in turn if name != base}
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        comparisons, speeds = [], []
        for done in heats:
            pairs = tuple((turn[base], turn[name]) for turn in done.turns if base in turn and name in turn)
            speeds += [1 / turn[name] for turn in done.turns if name in turn]
            if len(pairs) >= FEWEST_TURNS:
                comparisons.append(Comparison(speed_ratio(pairs), pairs))
        if comparisons:
            warmups = [done.warmup_seconds[name] for done in heats if name in done.warmup_seconds]
            rows[name] = {
                "ratio": dataclasses.asdict(across(comparisons)),
                "ratios_by_heat": [comparison.ratio.estimate for comparison in comparisons],
                "samples_per_second": sorted(speeds)[len(speeds) // 2],
                "warmup_seconds": max(warmups),
            }
    for done in heats:
        for name, (status, reason) in done.failures.items():
            rows[name] = {
                "status": status,
                "reason": reason,
            }  # what was timed before says nothing of the rest
    return rows
