"""Unmodified public scripts, alone and under `vivace run`, from the command to its end.

    scripts/bench scripts FOLDER [NAME ...] [--pairs 3] [--minutes 60] [--fresh]

FOLDER holds copies of the repositories below, each in a folder called ``owner+name``. Each script runs in a
fresh copy, alone and under `vivace run` in turn, so that what the machine does meanwhile meets both; the
ratio of whole wall times has a 95 % interval across the pairs, and the processor's seconds stand beside it. A
run that ends with another exit code is reported as broken, one that takes longer than its limit as too long.

It can be ended at any time: pairs that are done lie in runs/scripts, and the next call goes on from there. A
script whose pairs are complete has its record. MNIST's place is taken by scikit-learn's handwritten digits,
enlarged to 28 pixels, where a script reads it, and that of texts by the source of Python's standard library.

What is run (benchmarks/scripts.toml holds the whole commands):

    mnist                pytorch/examples mnist/main.py --epochs 3
    vae                  pytorch/examples vae/main.py --epochs 6
    siamese_network      pytorch/examples siamese_network/main.py --epochs 1
    mnist_rnn            pytorch/examples mnist_rnn/main.py --epochs 3
    mnist_hogwild        pytorch/examples mnist_hogwild/main.py --epochs 2
    dcgan                pytorch/examples dcgan/main.py --dataset fake --niter 1 --batchSize 16
    word_language_model  pytorch/examples word_language_model/main.py --model LSTM --epochs 1 --batch_size 80
    mingpt_adder         karpathy/minGPT projects/adder/adder.py --trainer.max_iters=600
    nanogpt              karpathy/nanoGPT train.py config/train_shakespeare_char.py, 128 wide, 600 steps
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
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
DONE = HERE.parent / "runs" / "scripts"
PAIRS, REPEATED, HELD_OUT = 3, 12, 360
LIMIT_SECONDS = 900.0
TOO_LONG = -1  # in the place of an exit code
SHOWN = (
    "outcome",
    "reason",
    "ratio",
    "clock",
    "saved_seconds",
    "own_seconds",
    "lost_seconds",
    "plan",
    "steps",
    "worst",
)

Pair = dict[str, Any]


def main() -> None:
    """Run the scripts that were asked for, and write a record of each."""
    listed = tomllib.loads(LISTED.read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no pair after so long")
    parser.add_argument("--fresh", action="store_true", help="forget the pairs that are done")
    asked = parser.parse_args()
    if asked.pairs < PAIRS:
        parser.error(f"an interval needs at least {PAIRS} pairs, not {asked.pairs}")
    deadline = time.monotonic() + 60 * asked.minutes
    machine = vivace.inspect()
    for name in named_jobs(parser, asked.names, listed):
        journal = DONE / machine.fingerprint / f"{name}.jsonl"
        if asked.fresh:
            journal.unlink(missing_ok=True)
        pairs = measured(asked.folder, listed[name], asked.pairs, journal, deadline)
        if len(pairs) < asked.pairs:
            print(f"{name:20} {len(pairs)} of {asked.pairs} pairs are done; the same command goes on")
            continue
        record = opened("scripts", f"scripts/bench scripts FOLDER {name}", machine, f"script_{name}")
        record |= summarised(listed[name], pairs)
        write(record)
        print(f"{name:20} {told(record)}", flush=True)


def measured(folder: Path, script: dict[str, Any], count: int, journal: Path, deadline: float) -> list[Pair]:
    """Pairs of whole runs in turn: those of the journal, and new ones until enough or time is up."""
    journal.parent.mkdir(parents=True, exist_ok=True)
    lines = journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []
    pairs: list[Pair] = [json.loads(line) for line in lines]
    pairs = [
        pair
        for pair in pairs
        if pair["command"] == script["command"] and pair["vivace"] == vivace.__version__
    ]
    while len(pairs) < count and time.monotonic() < deadline:
        order = (False, True) if len(pairs) % 2 == 0 else (True, False)
        found = {under: once(folder, script, under) for under in order}
        pair = {"command": script["command"], "vivace": vivace.__version__, "load": os.getloadavg()[0]}
        pairs.append({**pair, "alone": found[False], "under": found[True]})
        with journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps(pairs[-1]) + "\n")
    return pairs[:count]


def summarised(script: dict[str, Any], pairs: list[Pair]) -> dict[str, Any]:
    """Seconds by both clocks, exit codes, and what `vivace run` found each time."""
    codes = [[pair["alone"]["code"], pair["under"]["code"]] for pair in pairs]
    same = all(alone == under != TOO_LONG for alone, under in codes)

    def ratio(clock: str) -> dict[str, float] | None:
        if not same:
            return None
        found = speed_ratio([(pair["alone"][clock], pair["under"][clock]) for pair in pairs])
        return {"estimate": found.estimate, "low": found.low, "high": found.high}

    return {
        "script": {key: script[key] for key in ("repository", "folder", "command")},
        "pairs": [[pair["alone"]["seconds"], pair["under"]["seconds"]] for pair in pairs],
        "cpu_pairs": [[pair["alone"]["cpu_seconds"], pair["under"]["cpu_seconds"]] for pair in pairs],
        "load": [pair["load"] for pair in pairs],
        "exit_codes": codes,
        "ratio": ratio("seconds"),
        "cpu_ratio": ratio("cpu_seconds"),
        "outcomes": [{key: pair["under"]["document"].get(key) for key in SHOWN} for pair in pairs],
        "said": [pair["under"]["said"] for pair in pairs],
    }


def told(record: dict[str, Any]) -> str:
    """A line of the terminal."""
    codes = record["exit_codes"]
    if record["ratio"] is None:
        return f"{'too long' if any(TOO_LONG in pair for pair in codes) else 'broken'}: exit codes {codes}"
    wall, cpu = (
        f"{ratio['estimate']:.2f}x ({ratio['low']:.2f}-{ratio['high']:.2f})"
        for ratio in (record["ratio"], record["cpu_ratio"])
    )
    return f"{wall}, processor {cpu}; {record['outcomes'][-1]['outcome']}: {record['said'][-1]}"


def once(folder: Path, script: dict[str, Any], under: bool) -> dict[str, Any]:
    """One run in a fresh copy of its folder."""
    with tempfile.TemporaryDirectory(prefix="vivace-") as place:
        root = Path(place, "copy")
        shutil.copytree(folder / script["repository"].replace("/", "+"), root)
        working = root / script["folder"]
        if script.get("needs") == "mnist":
            digits(root / script.get("data", "data") / "MNIST" / "raw")
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
        seconds, cpu_seconds, code, errors = timed(
            command, working, environment, script.get("limit", LIMIT_SECONDS)
        )
        said = [line for line in errors.splitlines() if line.startswith("vivace: ")]
        file = out / "run.json"
        document = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if code:
            print(errors[-2000:], file=sys.stderr)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "code": code,
        "document": document,
        "said": "; ".join(said),
    }


def timed(
    command: list[str], working: Path, environment: dict[str, str], limit: float
) -> tuple[float, float, int, str]:
    """Wall seconds, the processor's seconds, exit code and standard error of a whole run."""
    begin, before = time.perf_counter(), processor_seconds()
    try:
        done = subprocess.run(
            command, cwd=working, env=environment, capture_output=True, text=True, check=False, timeout=limit
        )
        code, errors = done.returncode, done.stderr
    except subprocess.TimeoutExpired:
        code, errors = TOO_LONG, ""
    return time.perf_counter() - begin, processor_seconds() - before, code, errors


def processor_seconds() -> float:
    """Of all processes that were started and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


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
