"""What stacking runs brings, and whole sweeps beside plain Optuna in processes and Ray Tune.

    scripts/bench sweep stacks [--seconds N]
    scripts/bench sweep engines [--minutes N] [--heats N] [--jobs mlp cnn transformer]

`stacks`: for each example and number of rows, blocks of steps of the stack in turn with blocks of the same
rows one after another, each with torch's fused optimizer, and with blocks of what one writes by hand: `vmap`
over stacked weights, one fused optimizer, one learning rate. First on batches that are at hand, forward,
backward and update alone; then with the rows' own loaders, as a sweep meets them. Demanded: the stack at
least 0.85 times as fast as by hand.

`engines`: for each job, `vivace sweep`, plain Optuna (as many processes as cores, one journal for all) and
Ray Tune with Optuna's sampler and ASHA get equal minutes in turn, on the same space; the last two train with
the loop that a person writes. What counts are trials an hour, the epochs in them, and the best metric. A cell
of as many minutes that stands in the day's record is not run again, so that a stopped benchmark goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import importlib.util
import itertools
import json
import multiprocessing
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _record
import psutil
import sweep_jobs
import torch
from _plain_sweeps import SPACE, optuna_study, optuna_worker, ray_tune

import vivace
from vivace.errors import Refused
from vivace.ledger import Ratio
from vivace.measuring.statistics import speed_ratio
from vivace.sweeping.stacking.choice import clock_of, measured, rows_at_once
from vivace.sweeping.stacking.feeding import Feed
from vivace.sweeping.stacking.proof import Tightest, prove, worst
from vivace.sweeping.stacking.rows import Row
from vivace.sweeping.stacking.stack import Stack

EXAMPLES = [
    ("mlp_64_32_32_10", 16),
    ("mlp_64_32_32_10", 64),
    ("mlp_784_128", 16),
    ("mlp_784_256", 16),
    ("cnn_8_px", 16),
    ("cnn_16_px", 16),
    ("cnn_28_px", 16),
]
PAIRS = 10
JOBS = ("mlp", "cnn", "transformer")


def main() -> None:
    """Measure, and record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("stacks", "engines"))
    parser.add_argument("--seconds", type=float, default=0.1, help="of a block")
    parser.add_argument("--minutes", type=float, default=10.0, help="of each engine in each heat")
    parser.add_argument("--heats", type=int, default=3)
    parser.add_argument("--jobs", nargs="*", default=[])
    chosen = parser.parse_args()
    chosen.jobs = _record.named_jobs(parser, chosen.jobs, JOBS)
    asked = ""
    if chosen.part == "engines":
        asked = f" --minutes {chosen.minutes:g} --heats {chosen.heats}"
        if importlib.util.find_spec("ray") is None:
            parser.error("engines are held against Ray Tune: pip install 'vivace[ray]'")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what it has started ends with it
    machine = vivace.inspect()
    if chosen.part == "stacks" and chosen.seconds != parser.get_default("seconds"):
        asked = f" --seconds {chosen.seconds:g}"
    if chosen.jobs != list(JOBS):
        asked += f" --jobs {' '.join(chosen.jobs)}"
    command = f"scripts/bench sweep {chosen.part}{asked}"
    record = _record.opened("sweep", command, machine, f"sweep_{chosen.part}")
    record["code"] = _record.where()["vivace"]
    same = ("machine", "versions", "code", *(("command",) if chosen.part == "stacks" else ()))
    record = (_record.of_today(record, same) or record) | {"command": command}
    cells = record.setdefault("cells", {})
    if chosen.part == "stacks":
        stacks(cells, record, chosen.seconds)
    else:
        engines(cells, record, chosen)
    _record.write(record)


def stacks(cells: dict[str, Any], record: dict[str, Any], seconds: float) -> None:
    """Each example with its ratios to the rows one after another and to a stack by hand."""
    torch.set_num_threads(1)
    for name, count in EXAMPLES:
        cell = f"{name} x {count}"
        if cell in cells:
            continue
        rows = [
            Row(
                number,
                {},
                sweep_jobs.example(lr=0.01 * (number + 1) / count, name=name),
                vivace.inspect(),
                number,
            )
            for number in range(count)
        ]
        feed = Feed()
        for row in rows:
            feed.enter(row)
        stack = Stack(rows, feed)
        at_once = rows_at_once(stack)
        proofs = list(prove(stack, rows[:4], Tightest()).values())
        for proof in proofs:
            if isinstance(proof, Refused):  # what is not the same is no example
                raise proof
        ratios = steps_alone(stack, seconds) | {"loaded": measured(stack)[0]}
        cells[cell] = {
            "at_once": at_once,
            **{key: dataclasses.asdict(ratio) for key, ratio in ratios.items()},
            "sameness": worst(proofs).sentence,
        }
        told = (
            f"{key} {found.estimate:.2f} ({found.low:.2f}-{found.high:.2f})" for key, found in ratios.items()
        )
        print(f"{cell:20}", *told, sep="  ", flush=True)
        _record.write(record)


def steps_alone(stack: Stack, seconds: float) -> dict[str, Ratio]:
    """Forward, backward and update on batches at hand. How many times as fast as the rows one after another
    are the stack (`steps`) and one by hand (`by_hand`), and the stack as the one by hand (`over_by_hand`).
    """
    saved, clock = stack.saved(), clock_of(stack.rows[0].device)
    singles = [next(row.batches(0)) for row in stack.rows]
    leaves = next(stack.feed.epoch(stack.rows))

    def alone() -> None:
        for row, batch in zip(stack.rows, singles, strict=True):
            row.session.step(batch)

    def block(step: Any, steps: int) -> float:
        begin = clock()
        for _ in range(steps):
            step()
        return (clock() - begin) / steps

    def together() -> None:
        stack.step(leaves)

    steps = (alone, together, stacked_by_hand(stack, leaves))
    sizes = [max(1, round(seconds / block(step, 3))) for step in steps]
    turns = [[block(step, size) for step, size in zip(steps, sizes, strict=True)] for _ in range(PAIRS)]
    stack.put_back(saved)
    wanted = {"steps": (0, 1), "by_hand": (0, 2), "over_by_hand": (2, 1)}
    return {key: speed_ratio([(turn[a], turn[b]) for turn in turns]) for key, (a, b) in wanted.items()}


def stacked_by_hand(stack: Stack, leaves: Any) -> Callable[[], None]:
    """A step of as many models, which share one learning rate, as one writes it after torch.func's tutorial
    on ensembles.
    """
    first = stack.rows[0]
    copies = [copy.deepcopy(first.model) for _ in stack.rows]
    stacked, buffers = torch.func.stack_module_state(copies)
    weights = {name: weight.detach().requires_grad_() for name, weight in stacked.items()}
    optimizer = torch.optim.SGD(weights.values(), lr=0.01, momentum=0.9, fused=True)

    def one(own: Any, held: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = torch.func.functional_call(copies[0], (own, held), (x,))
        return torch.nn.functional.cross_entropy(found, y)

    losses = torch.func.vmap(one)

    def step() -> None:
        optimizer.zero_grad()
        losses(weights, buffers, *leaves).sum().backward()
        optimizer.step()

    return step


def engines(cells: dict[str, Any], record: dict[str, Any], chosen: argparse.Namespace) -> None:
    """Equal minutes for each engine in turn, in another order each heat."""
    runs = {"vivace": run_vivace, "optuna": run_optuna, "ray": run_ray}
    for heat in range(chosen.heats):
        order = [list(runs)[(heat + turn) % len(runs)] for turn in range(len(runs))]
        for job, engine in itertools.product(chosen.jobs, order):
            cell = f"{job}, {engine}, heat {heat}"
            if cells.get(cell, {}).get("minutes") == chosen.minutes:
                continue
            found = runs[engine](job, 60 * chosen.minutes, heat)
            cells[cell] = {"minutes": chosen.minutes, **found}
            print(cell, cells[cell], flush=True)
            _record.write(record)


def run_vivace(job: str, seconds: float, seed: int) -> dict[str, Any]:
    """As many trials as end in the given time."""
    with tempfile.TemporaryDirectory(prefix="vivace-sweep-") as folder:
        arguments = [sys.executable, "-m", "vivace", "sweep", f"{sweep_jobs.__file__}:{job}", *SPACE]
        arguments += ["--trials", "100000", "--seeds", "0", "--seed", str(seed), "--out", f"{folder}/out"]
        begin, process = time.monotonic(), subprocess.Popen([*arguments, "--quiet"])
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
                sys.exit(f"the sweep ended with {process.returncode} before its {seconds:.0f} s were over")
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
        found = {"trials": [], "packing": {"sentence": ""}, "fusing": []}
        with contextlib.suppress(FileNotFoundError):  # it ended before its first trial began
            found = json.loads((Path(folder) / "out" / "sweep.json").read_text(encoding="utf-8"))
        ended = [t for t in found["trials"] if t["state"] in ("complete", "pruned")]
        told = {"packing": found["packing"]["sentence"], "fusing": found["fusing"]}
        ended = [{**trial, "epochs": len(trial["curve"])} for trial in ended]
        return {**figures(ended, time.monotonic() - begin), **told}


def run_optuna(job: str, seconds: float, seed: int) -> dict[str, Any]:
    """Plain Optuna: as many processes as cores, one journal for all."""
    with tempfile.TemporaryDirectory(prefix="optuna-") as folder:
        journal, begin = f"{folder}/journal", time.monotonic()
        cores = range(vivace.inspect().num_cores)
        children([(optuna_worker, (job, journal, begin + seconds, seed + number)) for number in cores])
        ended = [
            {
                "state": t.state.name.lower(),
                "metric": t.value,
                "fused": 1,
                "epochs": len(t.intermediate_values),
            }
            for t in optuna_study(journal, seed).trials
            if t.state.name in ("COMPLETE", "PRUNED")  # what the end cut off is no trial
        ]
        return figures(ended, time.monotonic() - begin)


def run_ray(job: str, seconds: float, seed: int) -> dict[str, Any]:
    """Ray Tune on as many places as cores; the start of its cluster takes none of its time."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        found = Path(folder, "found.json")
        children([(ray_tune, (job, seconds, seed, folder, str(found)))])
        return figures(json.loads(found.read_text(encoding="utf-8")), seconds)


def children(calls: list[tuple[Any, tuple[Any, ...]]]) -> None:
    """Run functions in processes side by side; where this one is ended, they and theirs end with it."""
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=function, args=arguments) for function, arguments in calls]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    finally:
        for worker in workers:
            if worker.is_alive():
                for process in psutil.Process(worker.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                worker.kill()
                worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit(f"{calls[0][0].__name__} failed: {[worker.exitcode for worker in workers]}")


def figures(ended: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """What counts of an engine."""
    complete = [t["metric"] for t in ended if t["state"] == "complete" and t["metric"] is not None]
    return {
        "trials_an_hour": len(ended) * 3600 / seconds,
        "trials": len(ended),
        "complete": len(complete),
        "epochs_an_hour": sum(t["epochs"] for t in ended) * 3600 / seconds,
        "fused": sum(t["fused"] > 1 for t in ended),
        "best": max(complete, default=None),
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
