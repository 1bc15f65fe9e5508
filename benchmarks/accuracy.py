"""Trained to the end: time to the same accuracy in strict fp32, in PyTorch's defaults and under tune's plan.

    scripts/bench accuracy [RECIPE ...] [--seeds 3] [--budget fast] [--epochs N]

Each training is a process of its own; the three ways alternate, each seed in another order. `strict` is
`vivace train` without a plan, `defaults` a plain PyTorch loop without Vivace, `plan` is `vivace train`
under what `vivace tune` found with --budget, watched, with the compilers' caches as the search left them.
The time is that of the whole process: start, import, building, warm-up, training, evaluation after each
epoch, checkpoints. The final metric is of data that neither trained nor chose anything. Two trainings are
equal where the mean of its differences, paired by seed, lies within the recipe's margin (two one-sided
tests, 5 %), which stands in `vivace.recipes` before anything is measured. Where seeds are added later, or the
row begins anew for other code, it is judged again, and each further look may err half as often as the one
before: 2.5 %, 1.25 % and so on. All looks together err in at most 10 % of the recipes that are not equal,
however long one goes on; a single look errs in at most 5 %.

A row is a recipe: its search and its trainings, about eight minutes on two quiet cores. The record is written
after each training: a run that was stopped goes on where it was, recipe by recipe in the order of
`vivace recipes`. A row begins anew, and says so, where its epochs, its margin or a line of Vivace's code have
changed since; one that has its result stays as other code measured it until it is named. A recipe that fails
says why in the record, and the next one follows; a row says when and by which code it was begun. --epochs
makes trainings shorter than the recipe's, to try this out; such a record is not kept. Exit code 1 where a
recipe failed, was slower than strict fp32 or PyTorch's defaults, or was not shown to be equal.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean, mean, stdev
from typing import Any

import _record

import vivace
from vivace.inspection.energy import Meter
from vivace.job import load
from vivace.measuring.statistics import speed_ratio
from vivace.recipes import RECIPES
from vivace.verifying.equivalence import SIGNIFICANCE, equivalence_p

CHILD = Path(__file__).resolve().parent / "_accuracy_child.py"
WAYS = ("strict", "defaults", "plan")
CHANGES = {"vivace": "code", "epochs": "number of epochs", "margin": "margin"}
MOST_SEARCHES = 3
LONGEST_SECONDS = 3600.0  # of one training: then it hangs
Rows = list[dict[str, Any]]


def main() -> int:
    """Train the named recipes, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=", ".join(RECIPES))
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each way; at least 3")
    parser.add_argument("--budget", default="fast", help="of `vivace tune`, for each recipe")
    parser.add_argument("--epochs", type=int, help="fewer than the recipe's, to try this out; not recorded")
    chosen = parser.parse_args()
    names = _record.named_jobs(parser, chosen.recipes, RECIPES)
    if chosen.seeds < 3:
        parser.error(f"--seeds must be at least 3, not {chosen.seeds}: an interval needs as many")
    record = begun(chosen)
    good = [row_of(name, record, chosen) for name in names]
    done = [record["recipes"][name] for name in names if "speed" in record["recipes"][name]]
    if done:
        strict, defaults = (
            geometric_mean(recipe["speed"][way]["estimate"] for recipe in done) for way in WAYS[:2]
        )
        means = f"{strict:.2f}x over strict fp32, {defaults:.2f}x over PyTorch as it comes"
        print(f"geometric mean of {len(done)} whole trainings: {means}", flush=True)
    return 0 if all(good) else 1


def row_of(name: str, record: dict[str, Any], chosen: argparse.Namespace) -> bool:
    """Do whatever one recipe misses yet, and keep it; is it equal, and not slower beyond noise?"""
    stated: dict[str, Any] = {"vivace": _record.where()["vivace"], "epochs": load(name).epochs}
    stated["margin"] = RECIPES[name].margin
    recipe = record["recipes"].get(name, {})
    other = [key for key, value in stated.items() if recipe.get(key) != value] if recipe else []
    if other == ["vivace"] and "speed" in recipe and name not in chosen.recipes:
        print(f"{told(name, recipe)}; by other code, left as it is until {name} is named", flush=True)
        return holds(recipe)
    if other:
        changed = " and ".join(CHANGES[key] for key in other)
        print(f"{name}: begins anew, as it was measured with another {changed}", flush=True)
        looks = {"looks": looks_of(recipe)} if other == ["vivace"] else {}  # of the same claim
        recipe = {"date": _record.today(), **looks}
    day = record["date"] if recipe else _record.today()
    recipe = record["recipes"][name] = {"date": day, "rows": [], **recipe, **stated}
    recipe.pop("failed", None)
    begin = time.monotonic()
    try:
        for _ in further(name, recipe, chosen):
            keep(record, chosen)
        recipe |= summary(recipe["rows"], recipe["margin"], looks_of(recipe), recipe.get("seeds"))
    except (Failed, vivace.VivaceError, subprocess.TimeoutExpired) as error:
        recipe["failed"] = str(error)
    keep(record, chosen)
    print(f"{told(name, recipe)} [{time.monotonic() - begin:.0f} s]", flush=True)
    return holds(recipe)


def looks_of(recipe: dict[str, Any]) -> list[int]:
    """How many seeds each judgement of it had so far; older records do not say so."""
    return list(recipe.get("looks", [recipe["seeds"]] if "seeds" in recipe else []))


def holds(recipe: dict[str, Any]) -> bool:
    """Is it equal, and not slower beyond noise?"""
    return (
        "failed" not in recipe
        and recipe["equal"]
        and all(speed["high"] >= 1 for speed in recipe["speed"].values())
    )


def keep(record: dict[str, Any], chosen: argparse.Namespace) -> None:
    """Write the record under the day of its newest recipe, unless this is a try."""
    if not chosen.epochs:
        before = _record.path_of(record)
        record["date"] = max(recipe["date"] for recipe in record["recipes"].values())
        _record.write(record)
        if before != _record.path_of(record):
            before.unlink(missing_ok=True)


class Failed(Exception):
    """A training that did not come to its end, with the last lines that it said."""


def begun(chosen: argparse.Namespace) -> dict[str, Any]:
    """The newest record of this machine and these versions, to go on with, or a new one. Ends the process
    where today's is of others: it would be lost.
    """
    command = f"scripts/bench accuracy --budget {chosen.budget}"
    record = _record.opened("accuracy", command, vivace.inspect())
    record |= {"budget": chosen.budget, "recipes": {}}
    if chosen.epochs:
        return record
    same = ("machine", "versions", "vivace", "budget")
    _record.of_today(record, same)
    before = _record.newest_like(record, same)
    if before is None:
        return record
    for recipe in before["recipes"].values():
        recipe.setdefault("date", before["date"])
    return {**before, "command": command}


def further(name: str, recipe: dict[str, Any], chosen: argparse.Namespace) -> Iterator[None]:
    """Whatever is missing yet: the search, then each training; stops after each, so that it can be kept."""
    if "plan" not in recipe:
        recipe |= searched(name, chosen.budget)
        yield
    with tempfile.TemporaryDirectory(prefix="vivace-") as folder:
        plan = Path(folder, "plan.toml")
        vivace.Plan.from_dict(recipe["plan"]).save(plan)
        for seed in range(chosen.seeds):
            turn = seed % len(WAYS)
            for way in (*WAYS[turn:], *WAYS[:turn]):
                if not any((row["way"], row["seed"]) == (way, seed) for row in recipe["rows"]):
                    recipe["rows"].append(trained(name, way, seed, plan, chosen.epochs))
                    yield


def searched(name: str, budget: str) -> dict[str, Any]:
    """What `vivace tune` finds, and what it says of it; again, as it says, where it could not measure."""
    seconds = 0.0
    with tempfile.TemporaryDirectory(prefix="vivace-") as folder:
        for _ in range(MOST_SEARCHES):
            result = _record.tuned(name, budget, Path(folder, "tune"))
            seconds += result.seconds
            if result.outcome.answered:
                break
    found = result.to_dict()
    trials = ("techniques", "status", "reason", "ratio", "role")
    return {
        **{
            key: found[key] for key in ("plan", "speedup", "outcome", "promise", "reason", "break_even_steps")
        },
        "tune_seconds": seconds,
        "trials": [{key: trial[key] for key in trials} for trial in found["trials"]],
    }


def trained(name: str, way: str, seed: int, plan: Path, epochs: int | None) -> dict[str, Any]:
    """One whole training in a process of its own. Raises Failed."""
    command = [sys.executable, str(CHILD), name, way, str(seed), repr(time.time())]
    command += ["--plan", str(plan)] if way == "plan" else []
    command += ["--epochs", str(epochs)] if epochs else []
    meter = Meter(gpus=1)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONGEST_SECONDS)
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr, flush=True)
        raise Failed(f"{way}, seed {seed}: {(done.stderr.strip().splitlines() or ['killed'])[-1]}")
    row = {"way": way, "seed": seed, **json.loads(done.stdout.splitlines()[-1])}
    row["joules"] = meter.joules()
    print(f"{name} {way} seed {seed}: {row['seconds']:.0f} s, {row['metric']:.4f}", flush=True)
    return row


def summary(
    rows: Rows, margin: float, looks: Sequence[int] = (), judged: int | None = None
) -> dict[str, Any]:
    """What the trainings of one recipe say together. `looks`: how many seeds each judgement before
    had; `judged`: how many the last one had where it was of these rows.
    """
    trained = [{row["seed"] for row in rows if row["way"] == way} for way in WAYS]
    seeds = set.intersection(*trained)  # a run that was stopped has left one of which a way is missing
    rows = sorted((row for row in rows if row["seed"] in seeds), key=lambda row: row["seed"])
    by_way = {way: [row for row in rows if row["way"] == way] for way in WAYS}
    target = mean(row["curve"][-1][1] for row in by_way["strict"]) - margin
    differences = {
        way: [mine["metric"] - its["metric"] for mine, its in zip(by_way["plan"], by_way[way], strict=True)]
        for way in ("strict", "defaults")
    }
    p = equivalence_p(differences["strict"], margin)
    looks = [*looks, *([] if len(seeds) == judged else [len(seeds)])]
    level = SIGNIFICANCE / 2 ** (len(looks) - 1)
    speed = {
        way: speed_ratio(
            [(its["seconds"], mine["seconds"]) for mine, its in zip(by_way["plan"], by_way[way], strict=True)]
        )
        for way in ("strict", "defaults")
    }
    times = [
        (until(its, target), until(mine, target))
        for mine, its in zip(by_way["plan"], by_way["strict"], strict=True)
    ]
    both = [(before, after) for before, after in times if before is not None and after is not None]
    return {
        "seeds": len(by_way["strict"]),
        "target": target,
        "to_target": dataclasses.asdict(speed_ratio(both)) if len(both) == len(times) else None,
        "ways": {way: of_way(found, target) for way, found in by_way.items()},
        "difference": interval(differences["strict"]),
        "p": p,
        "looks": looks,
        "level": level,
        "equal": p < level,
        "speed": {way: dataclasses.asdict(found) for way, found in speed.items()},
    }


def until(row: dict[str, Any], target: float) -> float | None:
    """Seconds from the start until the validation data's metric was as high; None where it never was."""
    return next((seconds for seconds, metric in row["curve"] if metric >= target), None)


def of_way(rows: Rows, target: float) -> dict[str, Any]:
    """Means over the seeds: whole time, time to the target, final metric, memory and energy."""
    reached = [until(row, target) for row in rows]
    joules = [row["joules"] for row in rows]
    return {
        "seconds": mean(row["seconds"] for row in rows),
        "seconds_to_target": mean(reached) if None not in reached else None,
        "reached": sum(seconds is not None for seconds in reached),
        "metric": interval([row["metric"] for row in rows]),
        "peak_bytes": max(row["peak_bytes"] for row in rows),
        "joules": mean(joules) if None not in joules else None,
    }


def interval(values: list[float]) -> dict[str, float]:
    """The mean with its 95 % interval (Student's t)."""
    from scipy.stats import t as student  # importing it takes a second

    half = float(student.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return {"estimate": mean(values), "low": mean(values) - half, "high": mean(values) + half}


def told(name: str, recipe: dict[str, Any]) -> str:
    """One line."""
    if "failed" in recipe:
        return f"{name}: FAILED: {recipe['failed']}"
    strict, plan = recipe["ways"]["strict"], recipe["ways"]["plan"]
    speed, other = recipe["speed"]["strict"], recipe["speed"]["defaults"]
    equal = "equal" if recipe["equal"] else "NOT SHOWN TO BE EQUAL"
    return (
        f"{name}: {strict['seconds']:.0f} s -> {plan['seconds']:.0f} s, {speed['estimate']:.2f}x "
        f"({speed['low']:.2f}-{speed['high']:.2f}), {other['estimate']:.2f}x over PyTorch as it comes "
        f"({other['low']:.2f}-{other['high']:.2f}); metric {strict['metric']['estimate']:.4f} -> "
        f"{plan['metric']['estimate']:.4f}, {equal} within {recipe['margin']} (p = {recipe['p']:.2g})"
    )


if __name__ == "__main__":
    sys.exit(main())
