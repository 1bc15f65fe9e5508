"""What a profile costs a script: wall and processor seconds of the same training, with and without.

    scripts/bench profile_cost [--steps 1800] [--rounds 4] [--keep FILE] [--record]

The script trains a fixed number of steps of a small network, about a minute: `alone`, `recorded` (with the
hooks that a profile injects), and as a `whole` command (vivace profile -- python script.py), which also
starts Vivace before the script and writes the page after it. The three run through the same minutes: each
for a slice of time while the others are stopped, so that a machine which others slow down slows all of them.
All keep the memory that the C library would give back to the system: how often it does so differs from run to
run of one script, and makes one as much as 25 % slower than another.
Demanded: at most 3 % of the script, which is `recorded` over `alone`.

--keep holds the rounds between runs: what stands there is not run again, and rounds of another machine or of
other versions are refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import _record

import vivace
from vivace.measuring.statistics import speed_ratio

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "planted" / "healthy_cnn.py"
INJECT = HERE.parent / "src" / "vivace" / "processes" / "inject"
DEMANDED = 1.03
SLICE_SECONDS = 0.5
TIMED_SECONDS = 4.0  # the default of `vivace profile`
WAYS = ("alone", "recorded", "whole")
WARMING_STEPS = 150
FEWEST_ROUNDS = 3
KEEPING = {  # names of glibc; another C library does not know them
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    "MALLOC_TOP_PAD_": str(2**26),
}


def main() -> None:
    """Run the rounds, print the ratios, and leave with 1 where the script takes more than demanded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--keep", type=Path, help="read and write the rounds here")
    parser.add_argument("--record", action="store_true", help="write the result to records/")
    chosen = parser.parse_args()
    rounds = _record.kept(chosen.keep, steps=chosen.steps) or []
    if len(rounds) < chosen.rounds:
        in_turns(WARMING_STEPS, ("whole",))  # measures this machine's ceilings where none are stored
    while len(rounds) < chosen.rounds:
        first = len(rounds) % len(WAYS)
        rounds.append(in_turns(chosen.steps, (*WAYS[first:], *WAYS[:first])))
        print({way: [round(seconds, 2) for seconds in rounds[-1][way]] for way in WAYS}, flush=True)
        _record.keep(chosen.keep, rounds, steps=chosen.steps)
    if len(rounds) < FEWEST_ROUNDS:
        raise SystemExit(f"{len(rounds)} rounds: an interval needs at least {FEWEST_ROUNDS}")
    found = {way: summary(rounds, way) for way in WAYS[1:]}
    for way, figures in found.items():
        for clock, figure in figures.items():
            interval = f"{figure['estimate']:.3f} ({figure['low']:.3f}-{figure['high']:.3f})"
            print(f"{way}, {clock} time: {interval}, {figure['extra_seconds']:+.2f} s")
    if chosen.record:
        record = _record.opened("profile_cost", "scripts/bench profile_cost", vivace.inspect())
        _record.write({**record, "demanded": DEMANDED, "steps": chosen.steps, **found, "rounds": rounds})
    if found["recorded"]["wall"]["estimate"] > DEMANDED:
        raise SystemExit(f"more than the {DEMANDED:.2f} that are demanded")


def summary(rounds: list[dict], way: str) -> dict[str, dict[str, float]]:
    """Of wall and processor time: the ratio to the script alone with its interval, and the seconds added."""
    found = {}
    for number, clock in enumerate(("wall", "processor")):
        pairs = [(each[way][number], each["alone"][number]) for each in rounds]
        extra = statistics.median(longer - alone for longer, alone in pairs)
        found[clock] = {**dataclasses.asdict(speed_ratio(pairs)), "extra_seconds": extra}
    return found


def in_turns(steps: int, ways: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Wall and processor seconds of each way to run the script; a stopped process's wall does not count."""
    with tempfile.TemporaryDirectory() as folder:
        walls = dict.fromkeys(ways, 0.0)
        processors = {}
        running = {way: start(way, steps, Path(folder) / way, len(ways)) for way in ways}
        try:
            while running:
                for way, process in list(running.items()):
                    begin = time.perf_counter()
                    over = run_slice(process)
                    walls[way] += time.perf_counter() - begin
                    if over:
                        del running[way]
                        _, status, usage = os.wait4(process.pid, 0)
                        process.returncode = os.waitstatus_to_exitcode(status)
                        assert process.returncode == 0, f"{way} ended with {process.returncode}"
                        processors[way] = usage.ru_utime + usage.ru_stime
        finally:
            for process in running.values():  # else they would stay, stopped
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return {way: (walls[way], processors[way]) for way in ways}


def start(way: str, steps: int, folder: Path, ways: int) -> subprocess.Popen:
    """The script's process, stopped. Its own clock runs on while it is stopped, so its window is longer."""
    timed = str(TIMED_SECONDS * ways)
    command = [sys.executable, str(SCRIPT)]
    environment = {**os.environ, **KEEPING, "PLANTED_STEPS": str(steps)}
    if way == "recorded":
        before = os.environ.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(INJECT), before]))
        environment |= {"VIVACE_PROFILE": str(folder), "VIVACE_PROFILE_SECONDS": timed}
    elif way == "whole":
        options = ["--quiet", "--out", str(folder)]
        command = [sys.executable, "-m", "vivace", "profile", *options, "--", sys.executable, str(SCRIPT)]
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(
        command, env=environment, stdout=nothing, stderr=nothing, start_new_session=True
    )
    os.killpg(process.pid, signal.SIGSTOP)
    return process


def run_slice(process: subprocess.Popen) -> bool:
    """Let a process and its children go on for a slice; has it ended?"""
    os.killpg(process.pid, signal.SIGCONT)
    handle = os.pidfd_open(process.pid)
    try:
        over = bool(select.select([handle], [], [], SLICE_SECONDS)[0])
    finally:
        os.close(handle)
    if not over:
        os.killpg(process.pid, signal.SIGSTOP)
    return over


if __name__ == "__main__":
    main()
