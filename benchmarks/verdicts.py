"""Does `vivace profile` find what is wrong? Scripts with one planted fault each; healthy ones.

    scripts/bench verdicts [SCRIPT ...] [--seconds 4] [--keep FILE] [--record]

Each script runs unmodified under the profile, then with ``--mended``, which undoes the fault, and once more
as it is: the measured gain is the mended speed over the geometric mean of the two around it, over all steps.
Right is a planted script whose first verdict names its cause, a healthy one without any, and a predicted gain
whose interval holds the measured one, within the 7 % by which two runs of one script differ. The scripts in
``planted/`` were at hand when the rules were written; those in ``aside/`` were written later, without a look
at what the rules would say of them. Those in ``on_cuda/`` need a GPU, where ``benchmarks/gpu.sh verdicts``
runs them.

--keep holds the rows between runs: what stands there is not run again, and rows of another machine or of
other versions are refused. --record writes the rows of all scripts to records/.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from pathlib import Path

import _record

import vivace
from vivace.errors import VivaceError

HERE = Path(__file__).resolve().parent
FOLDERS = ("planted", "aside", "on_cuda")
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
    "parallel": "multi_gpu",
    "effect": "no_effect",
    "healthy": "healthy",
}
SEVERAL_CORES = ("workers_threads",)
WARM_SECONDS, WATCHED_SECONDS = 2.5, 6.0  # before the timed window, and for all windows after it
STARTING_SECONDS = 6.0  # of two ranks on one core, before the first step
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
    found = scripts()
    known = sorted(found, key=lambda name: (FOLDERS.index(found[name].parent.name), name))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scripts", nargs="*", help=", ".join(known))
    parser.add_argument("--seconds", type=float, default=4.0, help="length of the timed window")
    parser.add_argument("--no-gain", action="store_true", help="leave the mended runs out")
    parser.add_argument("--keep", type=Path, help="read and write the rows here")
    parser.add_argument("--record", action="store_true", help="write the rows of all scripts to records/")
    chosen = parser.parse_args()
    unknown = sorted(set(chosen.scripts) - set(known))
    if unknown:
        parser.error(f"there is no script '{unknown[0]}'; there are: {', '.join(known)}")
    options = {"seconds": chosen.seconds, "gain": not chosen.no_gain}
    rows = [Row(**row) for row in _record.kept(chosen.keep, **options) or ()]
    if chosen.record and (
        chosen.scripts or options != {"seconds": parser.get_default("seconds"), "gain": True}
    ):
        parser.error("--record writes the rows of all scripts, tried without other options")
    for name in chosen.scripts or known:
        if needed := lacks(name):
            print(f"-   {name:22} needs {needed}", flush=True)
        elif name not in [row.script for row in rows]:
            rows.append(try_out(name, chosen.seconds, not chosen.no_gain))
            show(rows[-1])
            _record.keep(chosen.keep, [dataclasses.asdict(row) for row in rows], **options)
    for folder, scores in score(rows).items():
        for words, count in scores.items():
            share = f"{count['count'] / count['of']:.0%}; demanded {count['demanded']:.0%}"
            print(f"{folder}: {count['count']} of {count['of']} {words} ({share})")
    if chosen.record:
        write_record(rows)


def scripts() -> dict[str, Path]:
    """All of them by name."""
    return {path.stem: path for folder in FOLDERS for path in (HERE / folder).glob("*_*.py")}


def lacks(name: str) -> str:
    """What a script needs and this machine has not; empty where it has all."""
    if name in SEVERAL_CORES and num_cores() < 2:
        return "two cores"
    return "a CUDA device" if on_cuda(name) and not has_cuda() else ""


def on_cuda(name: str) -> bool:
    """Does it need a GPU?"""
    return scripts()[name].parent.name == "on_cuda"


def has_cuda() -> bool:
    """Does this machine have an NVIDIA GPU?"""
    return vivace.inspect().device.kind == "cuda"


def starting_seconds(name: str) -> float:
    """What passes of a script's time before its first step."""
    return STARTING_SECONDS if name.startswith("ranks") else 0.0


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def show(row: Row) -> None:
    """Two lines a script."""
    gain = f"{row.low:.2f}-{row.high:.2f}"
    measured = "-" if row.measured is None else f"{row.measured:.2f}"
    held = {True: "held", False: "NOT HELD", None: ""}[row.held]
    mark = "ok " if row.right else "NO "
    print(f"{mark} {row.script:22} {','.join(row.said):28} {gain:12} {measured:6} {held}")
    print(f"      {row.evidence}", flush=True)


def try_out(name: str, seconds: float, with_gain: bool) -> Row:
    """Profile one script, its mended twin, and the script once more."""
    begin = time.monotonic()
    cause = CAUSES[name.partition("_")[0]]
    document = profile(name, seconds)
    first = document["verdicts"][0]
    measured = None
    if with_gain and cause != "healthy" and first["cause"] == cause:
        only_timed = {"PLANTED_SECONDS": str(starting_seconds(name) + seconds + WARM_SECONDS)}
        mended, again = (profile(name, seconds, *words, **only_timed) for words in (["--mended"], []))
        first_speed, speed, last_speed = (
            each.get("samples_per_second_in_all", 0.0) for each in (document, mended, again)
        )
        before = (first_speed * last_speed) ** 0.5
        measured = speed / before if before else 0.0  # where a run failed: no interval holds it
    said = [verdict["cause"] for verdict in document["verdicts"]]
    gain = first["gain"]
    seconds = time.monotonic() - begin
    return Row(name, cause, said, first["evidence"], gain["low"], gain["high"], measured, seconds)


def profile(name: str, seconds: float, *arguments: str, **environment: str) -> dict:
    """The document of one run; a script that cannot be profiled says so in its verdict."""
    whole = starting_seconds(name) + seconds + min(WATCHED_SECONDS, 1 + 2 * seconds)
    launcher = [sys.executable]
    if name.startswith("ranks"):
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    os.environ.update({"PLANTED_SECONDS": str(whole), **environment})
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nothing:
        try:
            return vivace.profile(
                command=[*launcher, str(scripts()[name]), *arguments],
                out=folder,
                machine=vivace.inspect(),
                timed_seconds=seconds,
                script_output=nothing.fileno(),
            ).to_dict()
        except VivaceError as error:
            verdict = {"cause": "failed", "evidence": str(error), "gain": {"low": 1.0, "high": 1.0}}
            return {"verdicts": [verdict]}


def score(rows: list[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """The three shares of each folder beside what is demanded."""
    found = {}
    for folder in FOLDERS:
        here = [row for row in rows if scripts()[row.script].parent.name == folder]
        planted = [row for row in here if row.cause != "healthy"]
        healthy = [row for row in here if row.cause == "healthy"]
        gains = [row for row in planted if row.held is not None]
        scores = {
            "planted causes named first": (sum(r.right for r in planted), len(planted), 0.9),
            "healthy scripts without a verdict": (sum(r.right for r in healthy), len(healthy), 1.0),
            "gains inside of their interval": (sum(bool(r.held) for r in gains), len(gains), 0.8),
        }
        found[folder] = {
            words: dict(zip(("count", "of", "demanded"), score, strict=True))
            for words, score in scores.items()
            if score[1]
        }
    return {folder: scores for folder, scores in found.items() if scores}


def write_record(rows: list[Row]) -> None:
    """Write the rows and the scores to records/verdicts/<machine>/<date>.json."""
    record = _record.opened("verdicts", "scripts/bench verdicts", vivace.inspect())
    record["machine"]["cores"] = num_cores()
    rows_found = [dataclasses.asdict(row) for row in rows]
    _record.write({**record, "spread": SPREAD, "scores": score(rows), "rows": rows_found})
    print(f"written: {_record.path_of(record)}")


if __name__ == "__main__":
    main()
