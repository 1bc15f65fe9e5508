"""How near the search comes to the best of all plans, and in what share of the time.

    scripts/bench search [JOB ...]

For each small job every set of techniques that fits together, with every setting offered, is measured once
against strict fp32 (those that can only save memory, alone); the fastest few are measured again, and the
fastest of them that keeps its promise is the best: so long takes exhausting. Then `vivace tune` searches with
the budgets `fast` and `balanced`, and its plans are timed in alternation with the best. Demanded: balanced
>= 97 % of the best speed in <= 25 % of the time, fast >= 92 % in <= 8 %. A run that was interrupted goes on
where it stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import _record

import vivace
from vivace.ledger import Ledger, Profile, Ratio, Trial
from vivace.machine import Machine
from vivace.measuring.paired import Comparison, Contestant, across, compare
from vivace.plan import Plan
from vivace.processes.launch import Source
from vivace.technique import Numerics, Technique, registry
from vivace.tuning.bench import Bench
from vivace.tuning.candidates import WORTH_TRYING
from vivace.verifying.verifier import Verifier

HERE = Path(__file__).resolve().parent
JOBS = ("search_cnn", "search_gpt", "search_table")
DEMANDED = {"fast": (0.92, 0.08), "balanced": (0.97, 0.25)}  # share of the best speed, share of the time
COMPARING_SECONDS, AGAIN_SECONDS, LONGEST_SECONDS = 3.0, 8.0, 120.0
FINALISTS = 6


def main() -> None:
    """Measure the named jobs, or all three, and record each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=", ".join(JOBS))
    parser.add_argument("--exhaust-only", action="store_true", help="search later: a second run goes on")
    arguments = parser.parse_args()
    machine = vivace.inspect()
    for name in _record.named_jobs(parser, arguments.jobs, JOBS):
        if arguments.exhaust_only:
            with opened(name, machine) as bench:
                exhaust(bench, bench.check(), machine, name)
            continue
        record = measure(name, machine)
        print(f"{name}: {record['num_plans']} plans in {record['exhaustive_seconds']:.0f} s", flush=True)
        for budget, found in record["tuned"].items():
            share, time_share = found["share_of_best"], found["share_of_time"]
            print(
                f"  {budget:9} {share['estimate']:.3f} ({share['low']:.3f}-{share['high']:.3f}) of the best "
                f"in {time_share:.1%} of the time: {' + '.join(found['plan']) or 'reference'}",
                flush=True,
            )


def measure(name: str, machine: Machine) -> dict:
    """Everything for one job; writes and returns its record."""
    with opened(name, machine) as bench:
        trials = exhaust(bench, bench.check(), machine, name)
        begin = time.monotonic()
        best, again = finals(bench, trials, machine)
        exhaustive = sum(trial.seconds for trial in trials) + time.monotonic() - begin
        tuned = {budget: tune(name, budget, best, bench, machine, exhaustive) for budget in DEMANDED}
    measured = [trial for trial in trials if trial.status == "measured"]
    record = {
        **_record.opened("search", f"scripts/bench search {name}", machine, job=name),
        "num_plans": len(trials),
        "num_measured": len(measured),
        "exhaustive_seconds": exhaustive,
        "best": best.to_dict(),
        "finalists": again,
        "tuned": tuned,
        "trials": [_short(trial) for trial in trials],
    }
    _record.write(record)
    return record


@contextlib.contextmanager
def opened(name: str, machine: Machine) -> Iterator[Bench]:
    """The bench of one job, with a ledger that a later run goes on with."""
    partial = HERE.parent / "runs" / "search" / f"{name}-{machine.fingerprint}.jsonl"
    partial.parent.mkdir(parents=True, exist_ok=True)
    source, ledger = Source(f"{HERE / 'jobs.py'}:{name}"), Ledger(partial)
    bench = Bench(source, machine, ledger, lambda *_: None, allow=Numerics.ROUNDING, memory=None)
    try:
        yield bench
    finally:
        bench.close()


def everything(profile: Profile, machine: Machine, allow: Numerics = Numerics.ROUNDING) -> Iterator[Plan]:
    """Every set of techniques that may make this job faster and fit together, with every setting offered;
    and alone each of the others, which by their cards save memory or serve another device. Small ones first.
    """
    axes: list[list[Technique | None]] = []
    plans = []
    for cls in registry.everything():
        if profile.device not in cls.card.devices or cls.card.numerics > allow:
            continue
        offered = cls.candidates(profile, machine)
        if cls.gain(profile, machine)[1] < WORTH_TRYING:
            plans += [Plan([technique]) for technique in offered]
        elif offered:
            axes.append([None, *offered])
    for combination in itertools.product(*axes):
        plan, chosen = Plan(), [technique for technique in combination if technique is not None]
        for technique in chosen:
            plan = plan.adding(technique)
        if chosen and len(plan) == len(chosen):  # a conflict would have displaced one
            plans.append(plan)
    yield from sorted(plans, key=len)


def exhaust(bench: Bench, profile: Profile, machine: Machine, name: str) -> list[Trial]:
    """Measure every plan once; what a technique refuses alone, it refuses in company."""
    known = {trial.plan_id: trial for trial in bench.ledger.trials() if trial.role == "exhaustive"}
    plans = list(everything(profile, machine))
    refused: list[Plan] = []
    trials: list[Trial] = []
    if any(plan.id not in known for plan in plans):
        bench.open_reference()
    for position, plan in enumerate(plans, 1):
        if any(set(small.techniques) <= set(plan.techniques) for small in refused):
            continue
        trial = known.get(plan.id) or bench.measure(
            plan, seconds=LONGEST_SECONDS, comparing=COMPARING_SECONDS, role="exhaustive"
        )
        if trial.status == "refused" and len(plan) == 1:
            refused.append(plan)
        trials.append(trial)
        if plan.id not in known:
            what = f"{trial.ratio.estimate:.2f}" if trial.ratio else f"{trial.status}: {trial.reason[:60]}"
            print(f"{name} {position}/{len(plans)} {plan}: {what}, {trial.seconds:.1f} s", flush=True)
    return trials


def finals(bench: Bench, trials: list[Trial], machine: Machine) -> tuple[Plan, list[dict]]:
    """The fastest plan that keeps its promise, after another and longer look at the fastest few."""
    measured = sorted((t for t in trials if t.ratio), key=lambda t: t.ratio.estimate, reverse=True)
    if not bench.observed:
        bench.open_reference()
    again = []
    for trial in measured[:FINALISTS]:
        plan = Plan.from_dict(trial.techniques)
        retried = bench.measure(plan, seconds=LONGEST_SECONDS, comparing=AGAIN_SECONDS, role="finalist")
        again.append((retried.ratio or trial.ratio, plan))
    again.sort(key=lambda pair: pair[0].estimate, reverse=True)
    table = [{"plan": plan.to_dict(), "ratio": dataclasses.asdict(ratio)} for ratio, plan in again]
    with Verifier(bench.source, machine, environment=bench.environment) as verifier:
        for _, plan in again:
            if verifier.judge(plan).kept:
                return plan, table
    raise SystemExit("none of the fastest plans keeps its promise")


def tune(name: str, budget: str, best: Plan, bench: Bench, machine: Machine, exhaustive: float) -> dict:
    """Search once with a budget; time what it found in alternation with the best plan, which it took
    `exhaustive` seconds to find by measuring everything.
    """
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        result = _record.tuned(f"{HERE / 'jobs.py'}:{name}", budget, Path(folder) / "tune")
        seconds = time.monotonic() - begin
    ratio = Ratio(1.0, 1.0, 1.0) if result.plan == best else against(best, result.plan, bench, machine)
    return {
        "plan": result.plan.to_dict(),
        "seconds": seconds,
        "share_of_time": seconds / exhaustive,
        "share_of_best": dataclasses.asdict(ratio),
        "speedup": dataclasses.asdict(result.speedup),
        "kept": result.verdict.kept if result.verdict else None,
        "num_trials": len(result.trials),
    }


def against(best: Plan, found: Plan, bench: Bench, machine: Machine) -> Ratio:
    """Speed of one plan as a share of another's, over three pairs of processes."""
    rounds: list[Comparison] = []
    for seed in (1, 2, 3):
        pair = [Contestant(bench.source, machine, environment=bench.environment) for _ in range(2)]
        try:
            for contestant, plan in zip(pair, (best, found), strict=True):
                contestant.open(plan, seed=seed)
            rounds.append(compare(*pair, seconds=AGAIN_SECONDS))
        finally:
            for contestant in pair:
                contestant.close()
    return across(rounds)


def _short(trial: Trial) -> dict:
    ratio = [round(value, 4) for value in dataclasses.astuple(trial.ratio)] if trial.ratio else None
    return {
        "techniques": trial.techniques,
        "status": trial.status,
        "ratio": ratio,
        "seconds": round(trial.seconds, 1),
    }


if __name__ == "__main__":
    main()
