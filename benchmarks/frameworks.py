"""The same training in each framework: PyTorch, Keras on three backends, JAX; writes a dated record.

    scripts/bench frameworks [JOB ...] [--quick] [--environments DIR] [--work DIR]

Initial weights, batches and optimizer are one; before anything is timed, the losses of the first 20 steps in
fp32 must agree with PyTorch's within rounding. Each contender then runs in a process and an environment of
its own, in turns with PyTorch eager. A run that was stopped goes on with the rows that are missing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tomllib
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

JOBS = ("cnn", "resnet18", "lstm", "transformer")
TUNE_SECONDS, QUICK_TUNE_SECONDS = 240.0, 60.0


class Comparison:
    """The rows of a record, one at a time; each is written down when it is known."""

    def __init__(self, work: Path, environments: Path, quick: bool) -> None:
        self.work, self.environments, self.quick = work, environments, quick
        self.machine = vivace.inspect()
        same = [self.machine.fingerprint, sorted(self.machine.versions.items()), VERSIONS.read_text()]
        self.work = work = (
            work / hashlib.sha256(json.dumps(same).encode()).hexdigest()[:12]
        )  # rows of others stay
        self.given = ["--quick"] if quick else []
        sys.path.insert(0, str(FOLDER))
        import common

        self.tasks = common.tasks(quick)
        work.mkdir(parents=True, exist_ok=True)

    def row(self, job: str, contender: Contender) -> dict[str, Any]:
        """The row of a contender: from an earlier run, or measured now."""
        path = self.work / f"{job}-{contender.environment}-{contender.framework}-{contender.setting}.json"
        before = json.loads(path.read_text()) if path.exists() else {}
        if before.get("status") == "measured":  # what failed is tried again
            return dict(before)
        print(f"{job}: {contender.name}", file=sys.stderr, flush=True)
        row: dict[str, Any] = {"job": job, "contender": contender.name, "setting": contender.setting}
        try:
            row |= self._measured(job, contender)
        except Failed as failed:
            row |= {"status": "failed", "reason": str(failed)}
        path.write_text(json.dumps(_record.clean(row)))
        return row

    def _measured(self, job: str, contender: Contender) -> dict[str, Any]:
        given = [*self.given, "--plan", str(self._plan(job))] if contender.setting == "tuned" else self.given
        found: dict[str, Any] = {"status": "measured"}
        if contender.setting != "tuned":  # tune has proven its plan by itself
            with self._worker(job, contender, given) as worker:
                losses = worker.ask("losses", steps=CHECKED_STEPS, noise_seed=None)
            known = self._known_losses(job)
            found["envelopes"] = distance(losses, known["losses"], known["noisy"])
            if contender.is_strict and not found["envelopes"] <= ALLOWED:
                raise Failed(
                    f"its losses are not PyTorch's: {found['envelopes']:.3g} times what rounding explains"
                )
        with self._worker(job, contender, given) as mine, self._worker(job, REFERENCE, self.given) as other:
            found |= timed(mine, other, self.tasks[job].batch)
        return found

    def _worker(self, job: str, contender: Contender, given: list[str]) -> Worker:
        python = python_of(contender.environment, self.environments)
        return Worker(
            contender, job, python, self.work / f"{contender.environment}-{contender.framework}.log", given
        )

    def _known_losses(self, job: str) -> dict[str, Any]:
        """PyTorch's losses, and those from initial weights that are off by a rounding."""
        path = self.work / f"{job}-losses.json"
        if not path.exists():
            with self._worker(job, REFERENCE, self.given) as worker:
                found = [
                    worker.ask("losses", steps=CHECKED_STEPS, noise_seed=seed)
                    for seed in (None, *range(NOISES))
                ]
            path.write_text(json.dumps({"losses": found[0], "noisy": found[1:]}))
        return dict(json.loads(path.read_text()))

    def _plan(self, job: str) -> Path:
        """The plan that `tune` finds."""
        folder = self.work / f"{job}-tune"
        path = folder / "plan.toml"
        if not path.exists():
            import of_torch

            seconds = QUICK_TUNE_SECONDS if self.quick else TUNE_SECONDS
            result = vivace.tune(of_torch.job_of(job, self.tasks[job]), budget=seconds, out=folder)
            result.plan.save(path)
        return path


def main() -> None:
    """Compare the named jobs, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=", ".join(JOBS))
    parser.add_argument(
        "--quick", action="store_true", help="small batches: tries the benchmark, tells little"
    )
    parser.add_argument("--environments", type=Path, default=Path("runs/frameworks/environments"))
    parser.add_argument("--work", type=Path, default=None, help="where rows are kept until all are there")
    chosen = parser.parse_args()
    names = _record.named_jobs(parser, chosen.jobs, JOBS)
    work = chosen.work or Path("runs/frameworks/quick" if chosen.quick else "runs/frameworks/rows")
    comparison = Comparison(work.resolve(), chosen.environments.resolve(), chosen.quick)
    before = os.getloadavg()[0]
    rows = [comparison.row(job, contender) for job in names for contender in CONTENDERS]
    command = "scripts/bench frameworks" + (" --quick" if chosen.quick else "")
    record = _record.opened("frameworks", command, comparison.machine)
    record |= {
        "quick": chosen.quick,
        "load_before": before,
        "pins": tomllib.loads(VERSIONS.read_text()),
        "allowed_envelopes": ALLOWED,
        "batches": {name: comparison.tasks[name].batch for name in names},
        "rows": rows,
    }
    if not chosen.quick:
        _record.write(record)
    print(json.dumps(_record.clean(rows), indent=1))


if __name__ == "__main__":
    main()
