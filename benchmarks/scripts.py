"""Unmodified public scripts, alone and under `vivace run`, from the command to its end.

    scripts/bench scripts FOLDER [NAME ...]

FOLDER holds copies of the repositories that benchmarks/scripts.toml names, each in a folder called
``owner+name``. Each script runs in a fresh copy, alone and under `vivace run` in turn, so that what the
machine does meanwhile meets both; the ratio of whole wall times has a 95 % interval across the pairs. MNIST's
place is taken by scikit-learn's handwritten digits, enlarged to 28 pixels, where a script reads it, and that
of texts by the source of Python's standard library. A run that ends with another exit code is reported as
broken.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy
from _record import named_jobs, opened, write

import vivace
from vivace.measuring.statistics import speed_ratio

HERE = Path(__file__).parent
LISTED = HERE / "scripts.toml"
PAIRS, REPEATED, HELD_OUT = 3, 12, 360


def main() -> None:
    """Run the scripts that were asked for, and write a record of each."""
    listed = tomllib.loads(LISTED.read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    asked = parser.parse_args()
    if asked.pairs < PAIRS:
        parser.error(f"an interval needs at least {PAIRS} pairs, not {asked.pairs}")
    for name in named_jobs(parser, asked.names, listed):
        record = opened("scripts", f"scripts/bench scripts FOLDER {name}", vivace.inspect(), f"script_{name}")
        record |= measured(asked.folder, listed[name], asked.pairs)
        write(record)
        ratio = record["ratio"]
        shown = f"{ratio['estimate']:.2f}x ({ratio['low']:.2f}-{ratio['high']:.2f})" if ratio else "broken"
        print(f"{name:24} {shown:22} {record['outcomes'][-1]['outcome']}: {record['said'][-1]}", flush=True)


def measured(folder: Path, script: dict[str, Any], pairs: int) -> dict[str, Any]:
    """Whole runs in turn: seconds, exit codes, and what `vivace run` found each time."""
    seconds: list[tuple[float, float]] = []
    outcomes, said, codes = [], [], []
    for number in range(pairs):
        order = (False, True) if number % 2 == 0 else (True, False)
        found = {under: once(folder, script, under) for under in order}
        seconds.append((found[False]["seconds"], found[True]["seconds"]))
        codes.append([found[False]["code"], found[True]["code"]])
        outcomes.append(found[True]["document"])
        said.append(found[True]["said"])
    same = all(alone == under for alone, under in codes)
    ratio = speed_ratio(seconds) if same else None
    kept = ("outcome", "reason", "ratio", "clock", "saved_seconds", "own_seconds", "plan", "steps", "worst")
    return {
        "script": {key: script[key] for key in ("repository", "folder", "command")},
        "pairs": seconds,
        "exit_codes": codes,
        "ratio": None
        if ratio is None
        else {"estimate": ratio.estimate, "low": ratio.low, "high": ratio.high},
        "outcomes": [{key: document.get(key) for key in kept} for document in outcomes],
        "said": said,
    }


def once(folder: Path, script: dict[str, Any], under: bool) -> dict[str, Any]:
    """One run in a fresh copy of its folder."""
    with tempfile.TemporaryDirectory(prefix="vivace-") as place:
        root = Path(place, "copy")
        shutil.copytree(folder / script["repository"].replace("/", "+"), root)
        working = root / script["folder"]
        if script.get("needs") == "mnist":
            digits(root / "data" / "MNIST" / "raw")
        for name, words in script.get("text", {}).items():
            (working / name).parent.mkdir(parents=True, exist_ok=True)
            (working / name).write_text(library_text(words), encoding="utf-8")
        if "prepare" in script:
            prepare = [sys.executable, *script["prepare"][1:]]
            subprocess.run(prepare, cwd=working, check=True, capture_output=True)
        command = [sys.executable, *script["command"][1:]]
        out = Path(place, "run")
        if under:
            command = [sys.executable, "-m", "vivace", "run", "--out", str(out), "--", *command]
        paths = [str(root / script["path"])] if "path" in script else []
        before = os.environ.get("PYTHONPATH")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *([before] if before else [])])}
        begin = time.perf_counter()
        done = subprocess.run(
            command, cwd=working, env=environment, capture_output=True, text=True, check=False
        )
        seconds = time.perf_counter() - begin
        told = [line for line in done.stderr.splitlines() if line.startswith("vivace: ")]
        file = out / "run.json"
        document = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if done.returncode:
            print(done.stderr[-2000:], file=sys.stderr)
    return {"seconds": seconds, "code": done.returncode, "document": document, "said": "; ".join(told)}


def digits(folder: Path) -> None:
    """Write scikit-learn's digits as the files of MNIST that torchvision reads."""
    from sklearn.datasets import load_digits

    folder.mkdir(parents=True)
    found = load_digits()
    order = numpy.random.default_rng(0).permutation(len(found.images))
    large = numpy.kron(found.images[order], numpy.ones((3, 3)))
    pictures = numpy.pad(large * 15.9, ((0, 0), (2, 2), (2, 2))).astype(numpy.uint8)
    labels = found.target[order].astype(numpy.uint8)
    cut = len(labels) - HELD_OUT
    parts = {
        "train": (numpy.tile(pictures[:cut], (REPEATED, 1, 1)), numpy.tile(labels[:cut], REPEATED)),
        "t10k": (pictures[cut:], labels[cut:]),
    }
    for name, (images, classes) in parts.items():
        head = struct.pack(">IIII", 0x803, len(images), 28, 28)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(
            struct.pack(">II", 0x801, len(classes)) + classes.tobytes()
        )


@functools.cache
def library_text(words: int) -> str:
    """So many words of the files of Python's standard library, in lines as they stand there."""
    lines, count = [], 0
    for file in sorted(Path(os.__file__).parent.glob("*.py")):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            lines.append(line)
            count += len(line.split())
            if count >= words:
                return "\n".join(lines) + "\n"
    raise RuntimeError(f"the standard library has only {count} words, not {words}")


if __name__ == "__main__":
    main()
