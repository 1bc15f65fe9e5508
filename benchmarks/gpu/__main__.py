"""The parts one after the other, each within its time; see benchmarks/gpu.sh."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import cnn
import correctness
import feeding
import others
import speed
from book import Book, facts, read
from summary import write

from vivace.errors import InputError

# Seconds; 25 minutes in all. A part that runs alone may take longer, so that it fits a ten-minute command;
# what stands in FUNCTIONS only runs where it is named.
PARTS = {"ceilings": 100, "correctness": 350, "speed": 460, "tune": 430, "peer": 160}
ALONE = 540
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
    """Run the named parts, or all; exit code 1 where a case failed or a promise was broken."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.sh", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(FUNCTIONS))
    parser.add_argument("--dry-run", action="store_true", help="every path on a CPU, with tiny shapes")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="where results lie and go")
    parser.add_argument("--limit", type=float, help="seconds for each part named")
    chosen = parser.parse_args()
    unknown = sorted(set(chosen.parts) - set(FUNCTIONS))
    if unknown:
        parser.error(f"there is no part '{unknown[0]}'; there are: {', '.join(FUNCTIONS)}")
    if chosen.dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    now = facts(chosen.dry_run)
    if not chosen.dry_run and now["kind"] != "cuda":
        print("gpu.sh: this machine has no NVIDIA GPU that its driver shows; try --dry-run", file=sys.stderr)
        return 2
    os.environ["VIVACE_GPU_DRY"] = str(int(chosen.dry_run))
    compiled = Path(tempfile.gettempdir()) / f"vivace-gpu-compiled-{os.getuid()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    chosen.out.mkdir(parents=True, exist_ok=True)
    try:
        for part in chosen.parts or PARTS:
            seconds = chosen.limit or (ALONE if len(chosen.parts) == 1 else PARTS.get(part, ALONE))
            begin = time.monotonic()
            book = Book(chosen.out, part, seconds, now)
            try:
                FUNCTIONS[part](book)
            finally:
                write(chosen.out, FUNCTIONS)
            missing = f", not reached: {', '.join(book.unreached)}" if book.unreached else ""
            print(f"== {part}: {time.monotonic() - begin:.0f} s{missing}", flush=True)
    except InputError as error:
        print(f"gpu.sh: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print((chosen.out / "results.md").read_text(encoding="utf-8"))
    bad = [
        f"{part}: {name}"
        for part in chosen.parts or PARTS
        for name, case in read(chosen.out / f"{part}.jsonl")[1].items()
        if case["status"] in ("failed", "broken")
    ]
    print("\n".join(["failed or broken:", *bad]) if bad else "nothing failed, no promise was broken")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
