"""What befalls a training, and what Vivace makes of it: a fault a row, provoked in a real launch.

    scripts/bench faults [ROW ...] [--record]

Every row starts `vivace train`, several ranks through torchrun, on a job of a few milliseconds a step with
dropout and shuffled data, and lets the fault happen. *Equal* means that model.pt is bit for bit that of a run
without the fault. Rows that are not provoked here name the test that does, or say that nothing does.
--record writes the table to records/ and to records/faults/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _record
import torch
from PIL import Image

import vivace

JOB = Path(__file__).resolve().parent / "faults" / "job.py"
DDP = "format = 1\n[techniques.ddp]\n"
LIMIT_SECONDS = 240
ROWS: dict[int, Row] = {}


@dataclasses.dataclass
class Row:
    """One fault: what it is, how it is provoked, and the function that does, or why there is none."""

    number: int
    fault: str
    how: str
    provoke: Callable[[Stage], str] | None = None
    elsewhere: str = ""


@dataclasses.dataclass
class Done:
    """A launch that has ended."""

    code: int
    text: str
    out: Path

    @property
    def sentence(self) -> str:
        """The last sentence of Vivace's own."""
        return next((line for line in reversed(self.text.splitlines()) if line.startswith("vivace: ")), "")

    @property
    def kept(self) -> list[str]:
        """The checkpoints, by name."""
        return sorted(path.name for path in (self.out / "checkpoints").glob("step_*"))


class Unexpected(Exception):
    """The fault was not survived as it has to be; the message says what happened."""


def need(holds: object, what: str, done: Done | None = None) -> None:
    """Raise Unexpected unless `holds`."""
    if not holds:
        raise Unexpected(what + (f" (exit {done.code}: {done.sentence or done.text[-300:]})" if done else ""))


class Stage:
    """A folder in which launches of one row run."""

    def __init__(self, folder: Path, references: dict[int, str]) -> None:
        self.folder, self.references = folder, references
        (folder / "ddp.toml").write_text(DDP)

    def start(
        self, *options: str, ranks: int = 1, agent: tuple[str, ...] = (), **env: Any
    ) -> subprocess.Popen:
        """Begin `vivace train`; `options` are its own, `agent` are torchrun's."""
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *agent]
        command += ["-m", "vivace", "train", str(JOB), "--out", str(self.folder / "run"), *options]
        if ranks > 1 and "--resume" not in options:
            command += ["--plan", str(self.folder / "ddp.toml")]
        size = env.pop("file_bytes", None)

        def limited() -> None:
            if size is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

        variables = {key.upper(): str(value) for key, value in env.items()}
        self.log = self.folder / f"log_{time.monotonic_ns()}"
        with self.log.open("w") as log:
            return subprocess.Popen(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1", "FOLDER": str(self.folder), **variables},
                stdout=log,
                stderr=log,
                preexec_fn=limited,
            )

    def train(self, *options: str, **how: Any) -> Done:
        """Run `vivace train` to its end."""
        process = self.start(*options, **how)
        try:
            code = process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            raise Unexpected(f"it hangs for {LIMIT_SECONDS} s") from None
        return Done(code, self.log.read_text(errors="replace"), self.folder / "run")

    def until(self, condition: Callable[[], bool], seconds: float = 90) -> None:
        """Wait until `condition()` holds. Raises Unexpected after so many seconds."""
        deadline = time.monotonic() + seconds
        while not condition():
            need(time.monotonic() < deadline, f"waited {seconds:.0f} s in vain")
            time.sleep(0.02)

    def steps(self, least: int = 1) -> bool:
        """Has the run logged a step so far?"""
        path = self.folder / "run" / "metrics.jsonl"
        return path.is_file() and path.read_text().count("\n") >= least

    def equal(self, done: Done, ranks: int = 1) -> str:
        """Require the model to be that of a run without the fault."""
        need(done.code == 0, "it did not end well", done)
        need(weights(done.out) == self.references[ranks], "the model differs")
        return "equal"

    def resumed(self, ranks: int = 1) -> str:
        """Go on without the fault and require the same model."""
        return self.equal(self.train("--resume", ranks=ranks), ranks)

    def save(self) -> None:
        """A run of 12 steps that was stopped and saved, beside a checkpoint of 6."""
        need(self.train("--max-steps", "6").code == 0, "it did not train")
        need(self.train("--resume", "--max-steps", "12").code == 0, "it did not go on")


def weights(out: Path) -> str:
    """sha256 over all tensors of a run's model."""
    digest = hashlib.sha256()
    for name, tensor in sorted(torch.load(out / "model.pt", weights_only=True).items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def row(number: int, fault: str, how: str) -> Callable[[Callable[[Stage], str]], Callable[[Stage], str]]:
    """Make a function the one that provokes a fault; it returns what happened, or raises Unexpected."""

    def add(provoke: Callable[[Stage], str]) -> Callable[[Stage], str]:
        ROWS[number] = Row(number, fault, how, provoke)
        return provoke

    return add


def elsewhere(number: int, fault: str, where: str) -> None:
    """A row that nothing here provokes."""
    ROWS[number] = Row(number, fault, "", None, where)


@row(1, "SIGKILL at any step", "the process kills itself in steps 1, 13 and 24 of three runs")
def killed(stage: Stage) -> str:
    for at in (1, 13, 24):
        shutil.rmtree(stage.folder / "run", ignore_errors=True)
        need(stage.train(fault="kill", at=at).code == -9, "it was not killed")
        stage.resumed()
    return "3 of 3 equal after --resume"


def torn(stage: Stage, fault: str) -> str:
    stage.train("--max-steps", "6")
    process = stage.start("--resume", vivace_fault=fault)
    checkpoints = stage.folder / "run" / "checkpoints"
    written = "model.pt" if fault == "slow_write" else "MANIFEST.json"
    stage.until(lambda: any(checkpoints.glob(f"*.tmp.*/{written}")))
    process.kill()
    process.wait()
    found = stage.resumed()
    need(not list(checkpoints.glob("*.tmp.*")), "a torn checkpoint stays")
    return f"{found}, the torn one is removed"


@row(2, "SIGKILL while a checkpoint is written", "killed between its two files")
def killed_writing(stage: Stage) -> str:
    return torn(stage, "slow_write")


@row(3, "SIGKILL between manifest and rename", "killed there")
def killed_before_rename(stage: Stage) -> str:
    return torn(stage, "before_rename")


@row(4, "several kills in one epoch", "killed in steps 3, 6 and 9, each after a checkpoint")
def killed_thrice(stage: Stage) -> str:
    for number, until in enumerate((2, 5, 8)):
        stage.train(*(["--resume"] if number else []), "--max-steps", str(until))
        need(stage.train("--resume", fault="kill", at=1).code == -9, "it was not killed")
    return stage.resumed()


@row(5, "SIGTERM, SIGHUP, SIGUSR1", "each in step 9")
def asked(stage: Stage) -> str:
    for fault, code in (("terminate", 143), ("hang_up", 129), ("slurm", 138)):
        shutil.rmtree(stage.folder / "run", ignore_errors=True)
        done = stage.train(fault=fault, at=9)
        need(done.code == code and done.kept == ["step_9"], f"not exit {code} with step_9", done)
        stage.resumed()
    return "exits 143, 129, 138, each with step_9; equal after --resume"


@row(6, "SIGTERM to torchrun", "two ranks, after their first steps")
def agent_asked(stage: Stage) -> str:
    process = stage.start(ranks=2)
    stage.until(stage.steps)
    process.terminate()
    process.wait(60)
    kept = sorted(path.name for path in (stage.folder / "run" / "checkpoints").glob("step_*"))
    need(len(kept) == 1, f"checkpoints: {kept}")
    return f"one checkpoint; {stage.resumed(2)} after --resume"


@row(7, "SIGTERM to one rank", "rank 1 in step 9")
def rank_asked(stage: Stage) -> str:
    done = stage.train(ranks=2, fault="terminate", at=9, who=1)
    need(len(done.kept) == 1, f"checkpoints: {done.kept}", done)
    return f"both stop at one step; {stage.resumed(2)} after --resume"


@row(9, "a second Ctrl-C", "two SIGINTs in step 9")
def twice(stage: Stage) -> str:
    done = stage.train(fault="interrupt_twice", at=9)
    need(done.code == 130, "not exit 130", done)
    return f"exit 130 at once; {stage.resumed()} after --resume"


@row(10, "torchrun itself is killed", "SIGKILL after the first steps of two ranks")
def agent_killed(stage: Stage) -> str:
    process = stage.start(ranks=2)
    stage.until(stage.steps)
    process.kill()
    process.wait()
    lock = stage.folder / "run" / "lock"
    stage.until(lambda: lock.read_text() == "", 60)
    return f"no rank outlives it by a minute, a checkpoint; {stage.resumed(2)} after --resume"


@row(11, "one rank is killed", "rank 1 in step 9, --max-restarts 1")
def rank_killed(stage: Stage) -> str:
    done = stage.train(ranks=2, agent=("--max-restarts=1",), fault="kill", at=9, who=1)
    found = stage.equal(done, 2)
    need("rank 1 (process" in done.text and "has died" in done.text, "nobody names the rank", done)
    run = json.loads((done.out / "run.json").read_text())
    need(run["resumed_from_step"] == 8, f"went on from step {run['resumed_from_step']}")
    return f"named; goes on from step 8 of 8, {found}"


@row(12, "one rank raises", "ValueError on rank 1 in step 9")
def rank_raises(stage: Stage) -> str:
    done = stage.train(ranks=2, fault="raise", at=9, who=1)
    need("ValueError: the sky" in done.text and done.kept == ["step_8"], "not told or not kept", done)
    need("rank 1 has ended: step 9 of the training failed" in done.text, "rank 0 does not say who", done)
    return f"its line comes first, rank 0 names it and keeps step_8; {stage.resumed(2)} after --resume"


@row(13, "one rank hangs", "rank 1 sleeps in step 9, --rank-timeout 15s")
def rank_hangs(stage: Stage) -> str:
    done = stage.train("--rank-timeout", "15s", ranks=2, fault="hang", at=9, who=1)
    need("stands still at job.py" in done.text and done.kept == ["step_8"], "not told or not kept", done)
    return f"named with its line, step_8 kept, stacks.txt; {stage.resumed(2)} after --resume"


@row(14, "a hang in the loader", "a worker sleeps; the DataLoader has timeout=5")
def loader_hangs(stage: Stage) -> str:
    done = stage.train(fault="worker_hangs")
    need(done.code == 2 and "timed out" in done.sentence, "not told", done)
    return "exit 2 with the batch"


@row(15, "a worker of the loader is killed", "SIGKILL to itself, once")
def worker_killed(stage: Stage) -> str:
    done = stage.train(fault="worker_killed")
    need("was replaced" in done.text, "no notice", done)
    return f"replaced, {stage.equal(done)}"


@row(16, "a worker raises", "ValueError at one sample")
def worker_raises(stage: Stage) -> str:
    done = stage.train(fault="worker_raises")
    need(done.code == 2 and "this sample is odd" in done.sentence and "41" in done.sentence, "not told", done)
    return "exit 2 with type, sample and line"


@row(17, "truncated and empty pictures", "two files of 96, damaged='replace'")
def pictures(stage: Stage) -> str:
    draw(stage)
    (stage.folder / "pictures" / "3.png").write_bytes(b"")
    cut = stage.folder / "pictures" / "5.png"
    cut.write_bytes(cut.read_bytes()[:60])
    done = stage.train(fault="pictures_damaged")
    need(done.code == 0, "it did not end well", done)
    found = json.loads((done.out / "run.json").read_text())["damaged"]
    need(sorted(one["index"] for one in found) == [3, 5], f"listed: {found}")
    return "replaced, both listed with path and reason"


@row(20, "the data vanish", "the folder is removed in step 9")
def vanish(stage: Stage) -> str:
    draw(stage)
    stage.train("--max-steps", "6", fault="pictures")
    done = stage.train("--resume", fault="pictures_vanish", at=3)
    need(done.code == 2 and ".png" in done.sentence and done.kept, "not told or not kept", done)
    return f"exit 2 with the file, {done.kept[-1]} kept"


def draw(stage: Stage) -> None:
    (stage.folder / "pictures").mkdir()
    for index in range(96):
        Image.new("L", (4, 4), index * 2).save(stage.folder / "pictures" / f"{index}.png")


@row(21, "out of memory", "above a quarter of the batch, from step 9 on")
def memory(stage: Stage) -> str:
    done = stage.train(fault="memory", at=9)
    need(done.code == 0 and "runs in 4 pieces" in done.text, "no smaller pieces", done)
    return "goes on in 4 pieces, told"


@row(22, "out of memory on one rank", "rank 1 of 2, above a quarter of the batch, from step 9 on")
def rank_memory(stage: Stage) -> str:
    done = stage.train(ranks=2, fault="memory", at=9, who=1)
    need(done.code == 0 and "(another rank did)" in done.text, "they do not go on together", done)
    return "both go on in 2 pieces, told"


@row(24, "the loss is NaN once", "in step 9")
def nan(stage: Stage) -> str:
    done = stage.train(fault="nan", at=9)
    need("back to the beginning" in done.text, "no word", done)
    return f"goes back to the last good state, told; {stage.equal(done)}"


@row(25, "an infinite gradient on one rank", "rank 1 in step 9, fp32")
def infinite(stage: Stage) -> str:
    done = stage.train(ranks=2, fault="inf_gradient", at=9, who=1)
    need("back to the beginning" in done.text, "no word", done)
    return f"all go back together, told; {stage.equal(done, 2)}"


@row(26, "the loss stays NaN", "from step 9 on")
def nan_always(stage: Stage) -> str:
    done = stage.train(fault="nan_always", at=9)
    need(done.code == 1 and "it is the loss that is not" in done.sentence, "not named", done)
    return "back once, then exit 1 with the place where it begins"


@row(27, "divergence without NaN", "learning rate 1000")
def diverges(stage: Stage) -> str:
    done = stage.train(lr=1e6)
    need(done.code == 1 and "began at" in done.sentence, "no word", done)
    return "exit 1 with the loss and where it began"


@row(28, "the disk is full at a save", "files may have 4,000 bytes (RLIMIT_FSIZE)")
def full(stage: Stage) -> str:
    done = stage.train(file_bytes=4000)
    need(done.code == 2 and "is full" in done.sentence, "not told", done)
    return f"exit 2 with the bytes; {stage.resumed()} after --resume"


def damaged(stage: Stage, *ways: Callable[[Path], object]) -> str:
    for way in ways:
        shutil.rmtree(stage.folder / "run", ignore_errors=True)
        stage.save()
        way(stage.folder / "run" / "checkpoints" / "step_12")
        done = stage.train("--resume")
        need("skipped a checkpoint" in done.text, "no notice", done)
        stage.equal(done)
    return f"{len(ways)} of {len(ways)} skipped with the reason, equal from the one before"


def flip(path: Path) -> None:
    content = bytearray((path / "model.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "model.pt").write_bytes(content)


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


@row(30, "a flipped bit in a checkpoint", "in the middle of model.pt")
def flipped(stage: Stage) -> str:
    return damaged(stage, flip)


@row(31, "a checkpoint truncated, without manifest, empty", "one after the other")
def cut(stage: Stage) -> str:
    return damaged(
        stage,
        lambda path: os.truncate(path / "state.pt", 100),
        lambda p: (p / "MANIFEST.json").unlink(),
        empty,
    )


@row(32, "all checkpoints bad, or gone", "both flipped; then the folder removed")
def all_bad(stage: Stage) -> str:
    stage.save()
    checkpoints = stage.folder / "run" / "checkpoints"
    for path in checkpoints.iterdir():
        flip(path)
    done = stage.train("--resume")
    need(done.code == 2 and "can be trusted" in done.sentence, "not refused", done)
    for path in checkpoints.iterdir():
        shutil.rmtree(path)
    need("are gone" in stage.train("--resume").sentence, "emptied, and not refused")
    checkpoints.rmdir()
    need("is gone" in stage.train("--resume").sentence, "removed, and not refused")
    return "refused 3 of 3 times, with every reason; never from zero"


class Malice:
    """Runs code where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.marker), "w"))


@row(33, "a malicious checkpoint", "a pickle that runs code, with the right hash in the manifest")
def malicious(stage: Stage) -> str:
    from vivace.training.checkpoints import _digest

    marker = stage.folder / "marker"

    def plant(path: Path) -> None:
        (path / "state.pt").write_bytes(pickle.dumps(Malice(marker)))
        manifest = json.loads((path / "MANIFEST.json").read_text())
        content = (path / "state.pt").read_bytes()
        manifest["files"]["state.pt"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        del manifest["digest"]
        manifest["digest"] = _digest(manifest)
        (path / "MANIFEST.json").write_text(json.dumps(manifest))

    found = damaged(stage, plant)
    need(not marker.exists(), "the code ran")
    return f"no code ran; {found}"


@row(34, "another seed, learning rate or number of processes", "one after the other")
def changed(stage: Stage) -> str:
    stage.save()
    need("has seed 0" in stage.train("--resume", "--seed", "1").sentence, "another seed was taken")
    done = stage.train("--resume", lr=0.5)
    need(done.code == 2 and "optimizer lr: 0.01 -> 0.5" in done.sentence, "not refused", done)
    for ranks, options in ((2, ("--max-steps", "15")), (1, ())):
        done = stage.train("--resume", *options, ranks=ranks)
        need(done.code == 0 and "not bit-exact" in done.text, f"not on {ranks}", done)
    return "seed and rate refused with the difference; 1 to 2 and 2 to 1 processes go on, told"


@row(35, "two runs on one folder", "a second run beside the first")
def two(stage: Stage) -> str:
    process = stage.start(fault="hang", at=3)
    stage.until(stage.steps)
    done = stage.train("--resume")
    process.kill()
    process.wait()
    need(done.code == 2 and "another run (process" in done.sentence, "not refused", done)
    return f"refused with process and host; {stage.resumed()} once the first is killed"


@row(41, "hostile names", "terminal escapes in an exception's text")
def hostile(stage: Stage) -> str:
    done = stage.train(fault="raise", at=2)
    need("\x1b" not in done.text and "\x07" not in done.text and "the sky" in done.text, "printed raw", done)
    return "no control character is printed"


@row(42, "SIGSTOP, then SIGCONT", "rank 1 for 6 s")
def stopped(stage: Stage) -> str:
    process = stage.start(ranks=2, fault="stop", at=9, who=1)
    tasks = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    state = lambda pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]  # noqa: E731
    find = lambda: [int(pid) for pid in tasks.read_text().split() if state(pid) == "T"]  # noqa: E731
    stage.until(lambda: bool(find()))
    (pid,) = find()
    time.sleep(6)
    os.kill(pid, signal.SIGCONT)
    code = process.wait(LIMIT_SECONDS)
    done = Done(code, stage.log.read_text(), stage.folder / "run")
    need("no sign of life" not in done.text, "a false alarm", done)
    return f"no verdict; {stage.equal(done, 2)}"


SURVIVAL, CHECKPOINTS = "tests/training/test_survival.py", "tests/training/test_checkpoints.py"
elsewhere(
    8,
    "a save slower than torchrun's 30 s of grace",
    "nothing: the last checkpoint stays; no word names the 30 s",
)
elsewhere(18, "a flipped bit in a picture", "nothing can: it decodes without complaint (docs/train.md)")
elsewhere(19, "empty and foreign files", "row 17, tests/training/test_damage.py")
elsewhere(23, "the host's memory", SURVIVAL)
elsewhere(29, "the disk is full for logs", "tests/training/test_training.py")
elsewhere(36, "a folder that cannot be written or renamed in", "tests/training/test_folder.py")
elsewhere(37, "a trial of a search is killed", "tests/tuning")
elsewhere(38, "torch.compile fails", "nothing: one sentence and exit 2, no falling back to eager")
elsewhere(39, "a probe segfaults", "tests/training/test_launch.py")
elsewhere(40, "clock jumps, no compiler, small shared memory", "nothing here")


def main() -> None:
    """Provoke the rows that are asked for, or all, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rows", nargs="*", type=int)
    parser.add_argument("--record", action="store_true", help="write records/faults")
    asked_for = parser.parse_args()
    command = " ".join(["scripts/bench faults", *map(str, asked_for.rows), *["--record"][: asked_for.record]])
    record = _record.opened("faults", command, vivace.inspect())
    with tempfile.TemporaryDirectory(prefix="vivace-faults-") as folder:
        record["rows"] = provoked(Path(folder), sorted(asked_for.rows or ROWS))
    print(table(record["rows"]))
    if asked_for.record:
        _record.write(record)
        text = f"# Faults\n\nWritten by `{command}` on {record['date']}. {HEAD}\n\n{table(record['rows'])}"
        (_record.RECORDS / "faults" / "README.md").write_text(text)
    raise SystemExit(any(one["survived"] is False for one in record["rows"]))


HEAD = "*Equal*: the model is bit for bit that of a run without the fault."


def provoked(folder: Path, numbers: list[int]) -> list[dict[str, Any]]:
    """What became of each row."""
    references: dict[int, str] = {}
    for ranks in (1, 2):
        (folder / f"clean_{ranks}").mkdir()
        done = Stage(folder / f"clean_{ranks}", {}).train(ranks=ranks)
        need(done.code == 0, "the job does not train without a fault", done)
        references[ranks] = weights(done.out)
    found = []
    for number in numbers:
        one = ROWS[number]
        entry: dict[str, Any] = {
            "row": number,
            "fault": one.fault,
            "how": one.how,
            "elsewhere": one.elsewhere,
        }
        begin = time.monotonic()
        entry |= {"happened": "", "survived": None}
        if one.provoke is not None:
            place = folder / f"row_{number}"
            place.mkdir()
            try:
                entry |= {"happened": one.provoke(Stage(place, references)), "survived": True}
            except Unexpected as error:
                entry |= {"happened": str(error).replace(str(place), "..."), "survived": False}
            with contextlib.suppress(OSError):
                shutil.rmtree(place)
        entry["seconds"] = round(time.monotonic() - begin, 1)
        print(
            f"{number}: {entry['survived']} {entry['happened'] or one.elsewhere}", file=sys.stderr, flush=True
        )
        found.append(entry)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| # | fault | provoked by | what happened | survived |", "|---|---|---|---|---|"]
    for one in rows:
        survived = {True: "yes", False: "**no**", None: "not provoked here"}[one["survived"]]
        happened = one["happened"] or f"see {one['elsewhere']}"
        lines.append(f"| {one['row']} | {one['fault']} | {one['how']} | {happened} | {survived} |")
    yes = sum(one["survived"] is True for one in rows)
    no = sum(one["survived"] is False for one in rows)
    return "\n".join([*lines, "", f"{yes} survived, {no} not, {len(rows) - yes - no} not provoked here.", ""])


if __name__ == "__main__":
    main()
