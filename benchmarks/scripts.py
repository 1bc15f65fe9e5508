"""Unmodified public scripts, alone and under `vivace run`, from the command to its end.

    scripts/bench scripts FOLDER [NAME ...] [--pairs 3] [--minutes 60] [--fresh]

FOLDER holds copies of the repositories below, each in a folder called ``owner+name``. Each script runs in a
fresh copy, alone and under `vivace run` in turn, so that what the machine does meanwhile meets both; the
ratio of whole wall times has a 95 % interval across the pairs, and the processor's seconds stand beside it. A
script of which a run does not end with 0 is reported as broken, one that takes longer than its limit as too
long, alone too.

It can be ended at any time: pairs that are done lie in runs/scripts, and the next call goes on from there. A
script whose pairs are complete has its record. What the scripts read is made from what packages ship
(benchmarks/_script_data.py): digits, photographs, the source of Python's standard library, models that have
learned nothing. A script that needs a package which is missing says so and is left out.

What is run (benchmarks/scripts.toml holds the whole commands):

    mnist                   pytorch/examples mnist/main.py --epochs 3
    vae                     pytorch/examples vae/main.py --epochs 40
    siamese_network         pytorch/examples siamese_network/main.py --epochs 1
    mnist_rnn               pytorch/examples mnist_rnn/main.py --epochs 14
    mnist_hogwild           pytorch/examples mnist_hogwild/main.py --epochs 2
    dcgan                   pytorch/examples dcgan/main.py --dataset fake --niter 1 --batchSize 16
    word_language_model     pytorch/examples word_language_model/main.py --model LSTM --epochs 1
    mingpt_adder            karpathy/minGPT projects/adder/adder.py --trainer.max_iters=3000
    mingpt_characters       karpathy/minGPT projects/chargpt/chargpt.py, 240 steps
    nanogpt                 karpathy/nanoGPT train.py config/train_shakespeare_char.py, as its README on a CPU
    imagenet                pytorch/examples imagenet/main.py -a resnet18, 640 photographs
    super_resolution        pytorch/examples super_resolution/main.py --upscale_factor 3, 200 photographs
    mnist_forward_forward   pytorch/examples mnist_forward_forward/main.py --epochs 200
    convolutional_network   yunjey/pytorch-tutorial convolutional_neural_network/main.py
    recurrent_network       yunjey/pytorch-tutorial recurrent_neural_network/main.py
    bidirectional_network   yunjey/pytorch-tutorial bidirectional_recurrent_neural_network/main.py
    language_model          yunjey/pytorch-tutorial language_model/main.py, 30,000 words
    makemore                karpathy/makemore makemore.py --max-steps 3000
    unet                    milesial/Pytorch-UNet train.py, 160 photographs
    torchvision             pytorch/vision references/classification/train.py --model mobilenet_v3_small
    timm                    huggingface/pytorch-image-models train.py --model resnet26
    trainer                 huggingface/transformers run_classification.py, a small BERT, two epochs
    trainer_language_model  huggingface/transformers run_clm.py, a small Llama, 150,000 words
    trainer_images          huggingface/transformers run_image_classification.py, a small ViT, four epochs
    accelerate_nlp          huggingface/accelerate nlp_example.py, a small BERT
    accelerate_nlp_two      huggingface/accelerate -m torch.distributed.run nlp_example.py, two processes
    accelerate_accumulation huggingface/accelerate by_feature/gradient_accumulation.py, a small BERT
    lightning               Lightning-AI/pytorch-lightning basics/autoencoder.py through LightningCLI
    fabric                  Lightning-AI/pytorch-lightning image_classifier/train_fabric.py --epochs 3
    keras                   keras-team/keras demo_functional.py on torch
    trl_sft                 huggingface/trl trl/scripts/sft.py, LoRA of a small Llama, bfloat16
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import importlib.util
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

from _record import named_jobs, opened, where, write
from _script_data import make

import vivace
from vivace.ledger import Ledger
from vivace.measuring.statistics import speed_ratio

HERE = Path(__file__).parent
LISTED = HERE / "scripts.toml"
DONE = HERE.parent / "runs" / "scripts"
PAIRS = 3
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
    as_installed(Path(vivace.__file__).parent)
    for name in named_jobs(parser, asked.names, listed):
        missing = lacking(listed[name])
        if missing:
            print(f"{name:24} needs packages that this environment lacks: pip install {' '.join(missing)}")
            continue
        if not (place := copy_of(asked.folder, listed[name])).is_dir():
            print(f"{name:24} needs a copy of {listed[name]['repository']} in '{place}'")
            continue
        journal = DONE / machine.fingerprint / f"{name}.jsonl"
        if asked.fresh:
            journal.unlink(missing_ok=True)
        pairs = measured(asked.folder, listed[name], asked.pairs, journal, deadline)
        if len(pairs) < asked.pairs:
            print(f"{name:24} {len(pairs)} of {asked.pairs} pairs are done; the same command goes on")
            continue
        record = opened("scripts", f"scripts/bench scripts FOLDER {name}", machine, f"script_{name}")
        record |= summarised(listed[name], pairs)
        if not too_long(record):  # which says nothing of Vivace
            write(record)
        print(f"{name:24} {told(record)}", flush=True)


def as_installed(package: Path) -> None:
    """Compile a package, as pip does and as its first use would: where PYTHONDONTWRITEBYTECODE is set, every
    run would else compile Vivace anew, and nothing of what the script imports.
    """
    compileall.compile_dir(package, quiet=2)


def lacking(script: dict[str, Any]) -> list[str]:
    """The packages that a script needs and this environment does not have."""
    return [name for name in script.get("packages", ()) if importlib.util.find_spec(name) is None]


def measured(folder: Path, script: dict[str, Any], count: int, journal: Path, deadline: float) -> list[Pair]:
    """Pairs of whole runs in turn: those of the journal, and new ones until enough or time is up."""
    journal.parent.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(journal)
    same = {"command": script["command"], **where()}
    pairs: list[Pair] = [pair for pair in ledger.read() if {key: pair.get(key) for key in same} == same]
    while len(pairs) < count and time.monotonic() < deadline:
        order = (False, True) if len(pairs) % 2 == 0 else (True, False)
        found = {under: once(folder, script, under) for under in order}
        pair = {**same, "load": os.getloadavg()[0]}
        pairs.append({**pair, "alone": found[False], "under": found[True]})
        ledger.append("pair", pairs[-1])
    return pairs[:count]


def summarised(script: dict[str, Any], pairs: list[Pair]) -> dict[str, Any]:
    """Seconds by both clocks, exit codes, and what `vivace run` found each time."""
    codes = [[pair["alone"]["code"], pair["under"]["code"]] for pair in pairs]

    def ratio(clock: str) -> dict[str, float] | None:
        if any(code != 0 for pair in codes for code in pair):
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


def too_long(record: dict[str, Any]) -> bool:
    """Did a run take longer than the script may?"""
    return any(TOO_LONG in pair for pair in record["exit_codes"])


def told(record: dict[str, Any]) -> str:
    """A line of the terminal."""
    codes = record["exit_codes"]
    if record["ratio"] is None:
        return f"{'too long' if too_long(record) else 'broken'}: exit codes {codes}"
    wall, cpu = (
        f"{ratio['estimate']:.2f}x ({ratio['low']:.2f}-{ratio['high']:.2f})"
        for ratio in (record["ratio"], record["cpu_ratio"])
    )
    return f"{wall}, processor {cpu}; {record['outcomes'][-1]['outcome']}: {record['said'][-1]}"


def once(folder: Path, script: dict[str, Any], under: bool) -> dict[str, Any]:
    """One run in a fresh copy of its folder."""
    with tempfile.TemporaryDirectory(prefix="vivace-") as place:
        working, command, environment = prepared(folder, script, Path(place, "copy"))
        out = Path(place, "run")
        if under:
            command = [sys.executable, "-m", "vivace", "run", "--out", str(out), "--", *command]
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


def copy_of(folder: Path, script: dict[str, Any]) -> Path:
    """Where the copy of a script's repository lies."""
    return folder / str(script["repository"]).replace("/", "+")


def prepared(folder: Path, script: dict[str, Any], root: Path) -> tuple[Path, list[str], dict[str, str]]:
    """Copy a script's repository to `root`, with what it reads: folder, command and environment of a run."""
    shutil.copytree(copy_of(folder, script), root, ignore=shutil.ignore_patterns(".git"))
    working = root / script["folder"]
    for place, wanted in script.get("makes", {}).items():
        make(wanted["kind"], working / place, **{k: v for k, v in wanted.items() if k != "kind"})
    paths = [str(root / script["path"])] if "path" in script else []
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*paths, *([before] if before else [])])
    environment = {**os.environ, **script.get("environment", {}), "PYTHONPATH": path}
    if "prepare" in script:
        prepare = [sys.executable, *script["prepare"][1:]]
        subprocess.run(prepare, cwd=working, env=environment, check=True, capture_output=True)
    return working, [sys.executable, *script["command"][1:]], environment


def timed(
    command: list[str], working: Path, environment: dict[str, str], limit: float
) -> tuple[float, float, int, str]:
    """Wall seconds, the processor's seconds, exit code and standard error of a whole run."""
    begin, before = time.perf_counter(), processor_seconds()
    with subprocess.Popen(
        command,
        cwd=working,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            errors = process.communicate(timeout=limit)[1]
            code = process.returncode
        except subprocess.TimeoutExpired:
            code, errors = TOO_LONG, ""
        finally:
            with contextlib.suppress(ProcessLookupError):  # what it started must not run beside the next one
                os.killpg(process.pid, signal.SIGKILL)
    return time.perf_counter() - begin, processor_seconds() - before, code, errors


def processor_seconds() -> float:
    """Of all processes that were started and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
