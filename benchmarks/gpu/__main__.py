"""The parts one after the other, each within its time; see benchmarks/gpu.sh."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import cnn
import correctness
import feeding
import others
import speed
from book import Book, facts, read
from summary import write

import vivace
from vivace.errors import InputError
from vivace.processes.launch import preload
from vivace.words import count

# Seconds. These are the commands for a GPU that is lent for half an hour, ten minutes a command. What matters
# most comes first, and what one does not reach of a part goes on in the next.
CALLS = {
    "first": {"correctness": 260, "cnn": 280},
    "second": {"ceilings": 50, "cnn": 250, "correctness": 180, "feed": 60},
    "third": {"tune": 330, "speed": 210},
}
ALONE = 540  # a part that is named
NO_GPU = """torch trains on no NVIDIA GPU here. What runs without one:

  python tests/cuda_stand_in benchmarks/gpu.sh --dry-run
"""
FUNCTIONS = {
    "ceilings": others.ceilings,
    "correctness": correctness.correctness,
    "speed": speed.speed,
    "tune": others.tune,
    "peer": others.peer,
    "memory": others.memory,
    "verdicts": others.verdicts,
    "cnn": cnn.cnn,
    "feed": feeding.feed,
}


def main() -> int:
    """Run these calls and parts, or all calls; exit code 1 where a case failed or a promise was broken."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.sh", description=__doc__)
    wanted = [*CALLS, *FUNCTIONS]
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(wanted))
    parser.add_argument("--dry-run", action="store_true", help="every path, with tiny shapes")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="where results lie and go")
    parser.add_argument("--limit", type=float, help="seconds for each part")
    chosen = parser.parse_args()
    unknown = sorted(set(chosen.parts) - set(wanted))
    if unknown:
        parser.error(f"there is no part '{unknown[0]}'; there are: {', '.join(wanted)}")
    now = facts(chosen.dry_run)
    if now["kind"] != "cuda":
        for finding in vivace.inspect().findings:
            print(f"gpu.sh: {finding.problem}: {finding.next}", file=sys.stderr)
        print(f"gpu.sh: {NO_GPU}", file=sys.stderr)
        return 2
    os.environ["VIVACE_GPU_DRY"] = str(int(chosen.dry_run))
    compiled = Path(tempfile.gettempdir()) / f"vivace-gpu-compiled-{os.getuid()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    chosen.out.mkdir(parents=True, exist_ok=True)
    planned, bad = list(_planned(chosen.parts or list(CALLS))), list[str]()
    preload(["torchvision", "sklearn.datasets"])  # which dozens of children import
    try:
        for part, seconds in planned:
            begin = time.monotonic()
            book = Book(chosen.out, part, chosen.limit or seconds, now, partial(write, chosen.out))
            stopped = book.whole(FUNCTIONS[part])
            bad += [f"{part}: stopped: {stopped}"] if stopped else []
            missing = f", not reached: {', '.join(book.unreached)}" if book.unreached else ""
            print(f"== {part}: {time.monotonic() - begin:.0f} s{missing}", flush=True)
    except InputError as error:
        print(f"gpu.sh: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    write(chosen.out)
    print((chosen.out / "results.md").read_text(encoding="utf-8"))
    cases = read(chosen.out)[1]
    bad += [
        f"{part}: {name}"
        for part in dict(planned)
        for name, case in cases.get(part, {}).items()
        if case["status"] in ("failed", "broken")
    ]
    unsteady = sum(
        case["status"] == "unsteady" for part in dict(planned) for case in cases.get(part, {}).values()
    )
    if unsteady:
        print(f"the machine was too unsteady for {count(unsteady, 'case')}; the same call measures again")
    print("\n".join(["failed or broken:", *bad]) if bad else "nothing failed, no promise was broken")
    return 1 if bad else 0


def _planned(words: list[str]) -> Iterator[tuple[str, float]]:
    """The parts of these calls and parts, with their seconds."""
    for word in words:
        yield from CALLS[word].items() if word in CALLS else ((word, ALONE),)


if __name__ == "__main__":
    sys.exit(main())
