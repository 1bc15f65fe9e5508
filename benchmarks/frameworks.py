"""The same training in each framework: PyTorch, Keras on three backends, JAX; writes a dated record.

    scripts/bench frameworks [JOB ...] [--quick] [--check] [--work DIR]

Initial weights, batches and optimizer are one; before anything is timed, the losses of the first 20 steps in
fp32 must agree with PyTorch's within rounding. Each contender then trains in a process and an environment of
its own up to one accuracy, and steps in turns with PyTorch eager. Environments, losses and rows lie in DIR:
a run that was stopped goes on with what is missing. `--check` does what needs no quiet machine, and times
nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _record
from _frameworks import (
    ALLOWED,
    CHECKED_STEPS,
    CONTENDERS,
    FOLDER,
    NOISES,
    REFERENCE,
    VERSIONS,
    Contender,
    Failed,
    Worker,
    distance,
    python_of,
    timed,
)

import vivace
from vivace.advising.demand import Demand
from vivace.advising.software import kind_of

JOBS = ("cnn", "resnet18", "lstm", "transformer")
TUNE_SECONDS, QUICK_TUNE_SECONDS = 75.0, 60.0


class Comparison:
    """The rows of a record, one at a time; each is written down when it is known."""

    def __init__(self, work: Path, quick: bool) -> None:
        self.environments, self.quick = work / "environments", quick
        self.machine = vivace.inspect()
        sources = [path.read_text() for path in (VERSIONS, *sorted(FOLDER.glob("*.py")))]
        same = [self.machine.fingerprint, sorted(self.machine.versions.items()), quick, sources]
        self.work = work / hashlib.sha256(json.dumps(same).encode()).hexdigest()[:12]  # rows of others stay
        self.work.mkdir(parents=True, exist_ok=True)
        self.given = ["--quick"] if quick else []
        sys.path.insert(0, str(FOLDER))
        import common

        self.tasks, self.accuracy = common.tasks(quick), common.ACCURACY

    def rows(self, job: str) -> list[dict[str, Any]]:
        """A row of each contender: from an earlier run, or measured now beside one process of PyTorch."""
        with contextlib.ExitStack() as stack:
            begun: list[Worker] = []

            def beside() -> Worker:
                if not begun:
                    worker = stack.enter_context(self._worker(job, REFERENCE, self.given, "beside"))
                    worker.ask("begin")
                    begun.append(worker)
                return begun[0]

            return [self._row(job, contender, beside) for contender in CONTENDERS]

    def is_complete(self, job: str) -> bool:
        """Has an earlier run measured all of its rows?"""
        return all((self.work / f"{job}-{contender.key}.json").exists() for contender in CONTENDERS)

    def _row(self, job: str, contender: Contender, beside: Callable[[], Worker]) -> dict[str, Any]:
        path = self.work / f"{job}-{contender.key}.json"
        before = json.loads(path.read_text()) if path.exists() else {}
        if before.get("status") == "measured":  # what failed is tried again
            return dict(before)
        print(f"{job}: {contender.name}", file=sys.stderr, flush=True)
        row: dict[str, Any] = {"job": job, "contender": contender.name, "setting": contender.setting}
        row |= {"framework": contender.framework}
        try:
            row |= {"status": "measured", "envelopes": self.envelopes(job, contender)}
            given = [*self.given, *(["--plan", str(self._plan(job))] if contender.setting == "tuned" else [])]
            with self._worker(job, contender, given) as mine:
                row |= timed(mine, beside(), self.tasks[job].batch)
        except Failed as failed:
            row |= {"status": "failed", "reason": str(failed)}
        path.write_text(json.dumps(_record.clean(row)))
        return row

    def envelopes(self, job: str, contender: Contender) -> float | None:
        """How far its losses in fp32 are from PyTorch's, in roundings; None of a setting that is not fp32.

        Raises Failed where they are too far. Makes the contender's environment, where it is missing.
        """
        python_of(contender.environment, self.environments)
        if not contender.is_strict:  # tune has proven its plan by itself
            return None
        losses, *noisy = self._losses(job, REFERENCE, (None, *range(NOISES)))
        mine = losses if contender == REFERENCE else self._losses(job, contender, (None,))[0]
        found = distance(mine, losses, noisy)
        if not found <= ALLOWED:
            raise Failed(f"its losses are not PyTorch's: {found:.3g} times what rounding explains")
        return found

    def _losses(self, job: str, contender: Contender, seeds: tuple[int | None, ...]) -> list[list[float]]:
        """Of the first steps, for each seed from weights that are off by a rounding."""
        path = self.work / f"{job}-{contender.key}-losses.json"
        if not path.exists():
            with self._worker(job, contender, self.given) as worker:
                found = [worker.ask("losses", steps=CHECKED_STEPS, noise_seed=seed) for seed in seeds]
            path.write_text(json.dumps(found))
        return list(json.loads(path.read_text()))

    def _worker(self, job: str, contender: Contender, given: list[str], log: str = "") -> Worker:
        python = python_of(contender.environment, self.environments)
        return Worker(contender, job, python, self.work / f"{log or contender.key}.log", given)

    def _plan(self, job: str) -> Path:
        """The plan that `tune` finds."""
        folder = self.work / f"{job}-tune"
        path = folder / "plan.toml"
        if not path.exists():
            seconds = QUICK_TUNE_SECONDS if self.quick else TUNE_SECONDS
            _record.tuned(self._job(job), seconds, folder).plan.save(path)
        return path

    def work_of(self, job: str) -> dict[str, Any]:
        """What kind of network it is, and the operations of one step: which other jobs the rows tell of."""
        from vivace.memory.imagine import imagine

        demand = Demand.from_dict(imagine(self._job(job), job)["demand"])
        return {"kind": kind_of(demand), "flops_per_step": demand.flops * self.tasks[job].batch}

    def _job(self, name: str) -> vivace.Job:
        import of_torch

        return of_torch.job_of(name, self.tasks[name])


def main() -> None:
    """Compare the named jobs, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=", ".join(JOBS))
    parser.add_argument(
        "--quick", action="store_true", help="small batches: tries the benchmark, tells little"
    )
    parser.add_argument("--check", action="store_true", help="make environments and compare losses alone")
    parser.add_argument("--work", type=Path, default=Path("runs/frameworks"))
    chosen = parser.parse_args()
    names = _record.named_jobs(parser, chosen.jobs, JOBS)
    comparison = Comparison(chosen.work.resolve(), chosen.quick)
    if comparison.machine.device.kind != "cpu":
        parser.error(
            f"the environments are made for processors, and on the {comparison.machine.device.name} PyTorch "
            "alone would train: hide it with CUDA_VISIBLE_DEVICES=''"
        )
    if chosen.check:
        check(comparison, names)
        return
    before = os.getloadavg()[0]
    names = [job for job in JOBS if job in names or comparison.is_complete(job)]
    rows = [row for job in names for row in comparison.rows(job)]
    record = _record.opened("frameworks", "scripts/bench frameworks", comparison.machine)
    record |= {
        "load_before": before,
        "pins": tomllib.loads(VERSIONS.read_text()),
        "allowed_envelopes": ALLOWED,
        "accuracy": comparison.accuracy,
        "batches": {name: comparison.tasks[name].batch for name in names},
        "work": {name: comparison.work_of(name) for name in names},
        "rows": rows,
    }
    if not chosen.quick:
        _record.write(record)
    print(json.dumps(_record.clean(rows), indent=1))


def check(comparison: Comparison, names: list[str]) -> None:
    """Say of each contender how far its losses are; leaves with exit code 1 where one is too far."""
    failed = False
    for job in names:
        for contender in CONTENDERS:
            try:
                far = comparison.envelopes(job, contender)
            except Failed as reason:
                failed = True
                print(f"{job}: {contender.name}: {reason}", flush=True)
            else:
                if far is not None:
                    print(f"{job}: {contender.name}: {far:.2g} of {ALLOWED:.0f}", flush=True)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
