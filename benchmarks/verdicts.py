"""Does `vivace profile` find what is wrong? Scripts with one planted fault each; healthy ones.

    scripts/bench verdicts [SCRIPT ...] [--seconds 4]

Each script runs unmodified under the profile, and a second time with ``--mended``, which undoes the fault.
Right is a planted script whose first verdict names its cause, a healthy one without any, and a predicted
gain whose interval holds the measured ratio of the two.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import vivace
from vivace.errors import VivaceError

HERE = Path(__file__).resolve().parent / "planted"
CAUSES = {
    "input": "input",
    "workers": "workers",
    "precision": "precision_no_gain",
    "overflow": "overflow",
    "misuse": "amp_misuse",
    "recompiles": "recompiles",
    "sync": "sync",
    "memory": "memory",
    "ranks": "multi_gpu",
    "effect": "no_effect",
    "healthy": "healthy",
}
SEVERAL_CORES = ("workers_threads",)
SPREAD = 0.07  # two runs of one script differ by as much


@dataclasses.dataclass(frozen=True)
class Row:
    """One script: what was planted, what was said, and the gain predicted and measured."""

    script: str
    cause: str
    said: list[str]
    evidence: str
    low: float
    high: float
    measured: float | None
    seconds: float

    @property
    def right(self) -> bool:
        """Is the first verdict the planted cause?"""
        return self.said[:1] == [self.cause]

    @property
    def held(self) -> bool | None:
        """Does the interval hold the measured gain? None where no gain was measured."""
        if self.measured is None:
            return None
        return self.low * (1 - SPREAD) <= self.measured <= self.high * (1 + SPREAD)


def main() -> None:
    """Profile the scripts, print a line each, and the three scores."""
    known = sorted(path.stem for path in HERE.glob("*_*.py"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scripts", nargs="*", help=", ".join(known))
    parser.add_argument("--seconds", type=float, default=4.0, help="length of the timed window")
    parser.add_argument("--no-gain", action="store_true", help="leave the mended runs out")
    parser.add_argument("--json", type=Path, help="write the rows here")
    chosen = parser.parse_args()
    unknown = sorted(set(chosen.scripts) - set(known))
    if unknown:
        parser.error(f"there is no script '{unknown[0]}'; there are: {', '.join(known)}")
    rows = []
    for name in chosen.scripts or known:
        if name in SEVERAL_CORES and len(os.sched_getaffinity(0)) < 2:
            print(f"-   {name:22} needs two cores", flush=True)
            continue
        rows.append(row := try_out(name, chosen.seconds, not chosen.no_gain))
        gain = f"{row.low:.2f}-{row.high:.2f}"
        measured = f"{row.measured:.2f}" if row.measured else "-"
        print(
            f"{'ok ' if row.right else 'NO '} {name:22} {','.join(row.said):28} {gain:12} {measured:6}",
            flush=True,
        )
        print(f"      {row.evidence}", flush=True)
        if chosen.json:
            chosen.json.write_text(json.dumps([dataclasses.asdict(r) for r in rows], indent=1) + "\n")
    score(rows)


def try_out(name: str, seconds: float, with_gain: bool) -> Row:
    """Profile one script, and its mended twin."""
    begin = time.monotonic()
    cause = CAUSES[name.partition("_")[0]]
    document = profile(name, seconds)
    first = document["verdicts"][0]
    measured = None
    if with_gain and cause != "healthy" and first["cause"] == cause:
        mended = profile(name, seconds, "--mended")
        measured = per_sample(document) / per_sample(mended)
    said = [verdict["cause"] for verdict in document["verdicts"]]
    gain = first["gain"]
    seconds = time.monotonic() - begin
    return Row(name, cause, said, first["evidence"], gain["low"], gain["high"], measured, seconds)


def profile(name: str, seconds: float, *arguments: str) -> dict:
    """The document of one run; a script that cannot be profiled says so in its verdict."""
    launcher = [sys.executable]
    if name.startswith("ranks"):
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nothing:
        try:
            return vivace.profile(
                command=[*launcher, str(HERE / f"{name}.py"), *arguments],
                out=folder,
                machine=vivace.inspect(),
                timed_seconds=seconds,
                script_output=nothing.fileno(),
            ).to_dict()
        except VivaceError as error:
            verdict = {"cause": "failed", "evidence": str(error), "gain": {"low": 1.0, "high": 1.0}}
            return {"verdicts": [verdict], "samples_per_second": 1.0, "shares": {"idle": 0.0}}


def per_sample(document: dict) -> float:
    """Seconds a sample."""
    return 1 / document["samples_per_second"]


def score(rows: list[Row]) -> None:
    """Print the three shares beside what is demanded."""
    planted = [row for row in rows if row.cause != "healthy"]
    healthy = [row for row in rows if row.cause == "healthy"]
    gains = [row for row in planted if row.held is not None]
    for words, part, of, demanded in (
        ("planted causes named first", sum(r.right for r in planted), len(planted), 0.9),
        ("healthy scripts without a verdict", sum(r.right for r in healthy), len(healthy), 1.0),
        ("gains inside of their interval", sum(bool(r.held) for r in gains), len(gains), 0.8),
    ):
        if of:
            print(f"{part} of {of} {words} ({part / of:.0%}; demanded {demanded:.0%})")


if __name__ == "__main__":
    main()
