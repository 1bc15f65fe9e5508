"""Contenders of `frameworks`: environments, processes, and what one shows beside the reference."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import statistics
import subprocess
import sys
import time
import tomllib
import venv
from pathlib import Path
from typing import Any

from vivace.measuring.statistics import speed_ratio

FOLDER = Path(__file__).resolve().parent / "in_frameworks"
VERSIONS = FOLDER / "versions.toml"
ANSWER_SECONDS = 600.0
CHECKED_STEPS, NOISES = 20, 4
ALLOWED = 10.0  # times what one rounding of the initial weights does to the loss by then
RESOLUTION = 1e-6  # of a loss: what fp32 cannot tell apart
BLOCK_SECONDS, TURNS, WARM_STEPS = 0.5, 6, 3
MOST_STEPS, EVALUATED_EVERY = 120, 5  # of training up to the accuracy


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to train: a name for people, the environment, what the worker loads, and how it is set."""

    name: str
    environment: str
    framework: str
    setting: str
    backend: str = ""

    @property
    def key(self) -> str:
        """What its files are called."""
        return f"{self.environment}-{self.framework}-{self.setting}"

    @property
    def is_strict(self) -> bool:
        """Does it compute in fp32 as the reference does, so that its losses must agree?"""
        return self.setting == "strict"


REFERENCE = Contender("PyTorch, eager", "torch", "torch", "strict")
CONTENDERS = (
    REFERENCE,
    Contender("PyTorch, compiled, bfloat16", "torch", "torch", "fast"),
    Contender("PyTorch under tune's plan", "torch", "torch", "tuned"),
    Contender("Keras on PyTorch", "keras_torch", "keras", "strict", "torch"),
    Contender("Keras on PyTorch, compiled, bfloat16", "keras_torch", "keras", "fast", "torch"),
    Contender("Keras on TensorFlow", "tensorflow", "keras", "strict", "tensorflow"),
    Contender("Keras on TensorFlow, XLA, bfloat16", "tensorflow", "keras", "fast", "tensorflow"),
    Contender("Keras on JAX", "jax", "keras", "strict", "jax"),
    Contender("Keras on JAX, bfloat16", "jax", "keras", "fast", "jax"),
    Contender("JAX (flax, optax)", "jax", "jax", "strict"),
    Contender("JAX (flax, optax), bfloat16", "jax", "jax", "fast"),
)


class Failed(Exception):
    """A contender cannot take part; the message says why."""


def python_of(environment: str, folder: Path) -> Path:
    """The interpreter of an environment, which is made first where it is missing.

    Raises Failed where its packages cannot be installed.
    """
    if environment == "torch":
        return Path(sys.executable)
    pins = tomllib.loads(VERSIONS.read_text())[environment]
    place = folder / environment
    python, done = place / "bin" / "python", place / "installed.json"
    if done.exists() and json.loads(done.read_text()) == pins:
        return python
    print(f"installing {', '.join(pins)} into {place.name}", file=sys.stderr)
    venv.create(place, with_pip=True, clear=True)
    wanted = [f"{name}=={version}" for name, version in pins.items()]
    installed = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", *wanted], capture_output=True, text=True, check=False
    )
    if installed.returncode:
        raise Failed(f"pip install failed: {installed.stderr.strip().splitlines()[-1]}")
    if environment == "keras_torch":  # only now: pip takes what it sees for installed
        own = [path for path in sys.path if path.endswith("site-packages")]
        (next(place.glob("lib/*/site-packages")) / "torch.pth").write_text("\n".join(own) + "\n")
    done.write_text(json.dumps(pins))
    return python


class Worker:
    """A contender's process. Raises Failed where it ends, or does not answer."""

    def __init__(self, contender: Contender, job: str, python: Path, log: Path, given: list[str]) -> None:
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
        if contender.backend:
            environment["KERAS_BACKEND"] = contender.backend
        words = [python, FOLDER / "worker.py", contender.framework, job, contender.setting, *given]
        self.log = log
        self._errors = log.open("w")
        self._process = subprocess.Popen(
            list(map(str, words)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            text=True,
        )

    def ask(self, command: str, **arguments: Any) -> Any:
        """Send one command and wait for its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Failed(self._why()) from None
        if not select.select([self._process.stdout], [], [], ANSWER_SECONDS)[0]:
            raise Failed(f"no answer within {ANSWER_SECONDS:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise Failed(self._why())
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._errors.close()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _why(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it ended without a word"


def distance(losses: list[float], reference: list[float], noisy: list[list[float]]) -> float:
    """The largest distance of a step's loss from the reference's, in what rounding alone did by then."""
    worst = envelope = 0.0
    for step, (mine, theirs) in enumerate(zip(losses, reference, strict=True)):
        envelope = max([envelope, RESOLUTION * abs(theirs), *(abs(run[step] - theirs) for run in noisy)])
        gap = abs(mine - theirs) / envelope
        worst = max(worst, gap) if gap == gap else float("inf")
    return worst


def timed(mine: Worker, reference: Worker, samples: int) -> dict[str, Any]:
    """Mine trains up to the accuracy, then both step in turns; the other one waits, and has begun before.

    Ratios above 1: faster than the reference.
    """
    found = mine.ask("begin") | mine.ask("learn", steps=MOST_STEPS, every=EVALUATED_EVERY)
    workers = {"reference": reference, "mine": mine}
    steps = {}
    for name, worker in workers.items():
        once = worker.ask("steps", steps=WARM_STEPS)["seconds"] / WARM_STEPS
        steps[name] = max(1, round(BLOCK_SECONDS / max(once, 1e-6)))
    pairs, cpu_pairs, seconds = [], [], []
    for turn in range(TURNS):
        order = list(workers) if turn % 2 == 0 else list(reversed(workers))
        seen = {name: workers[name].ask("steps", steps=steps[name]) for name in order}
        per = {name: seen[name]["seconds"] / steps[name] for name in seen}
        cpu = {name: seen[name]["cpu_seconds"] / steps[name] for name in seen}
        pairs.append((per["reference"], per["mine"]))
        cpu_pairs.append((cpu["reference"], cpu["mine"]))
        seconds.append(per["mine"])
    step = statistics.median(seconds)
    return {
        **found,
        "peak_bytes": seen["mine"]["peak_bytes"],
        "samples_per_second": samples / step,
        "compile_seconds": max(0.0, found["first_step_seconds"] - step),
        "ratio": dataclasses.asdict(speed_ratio(pairs)),
        "cpu_ratio": dataclasses.asdict(speed_ratio(cpu_pairs)),
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
    }
