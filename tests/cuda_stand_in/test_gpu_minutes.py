"""benchmarks/gpu.sh on a stand-in that computes: its three calls with tiny shapes, two killed on the way."""

import contextlib
import json
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import psutil
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.sh"
PARTS = ("ceilings", "correctness", "speed", "tune", "peer", "memory", "verdicts", "cnn", "feed")
# What is called, and by what it is killed the first time: the cases that are there, or the file.
CALLS = {
    ("first",): 6,
    ("second", "peer", "memory", "verdicts"): None,
    ("third",): "tune-mlp.tar.gz",
}
TIMED = ("speed", "cnn")
MOST_FILES = 8  # come back from where GPUs are lent by the command
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def lines_of(out):
    """All but a torn last one."""
    file = out / "cases.jsonl"
    written = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [line for line in written if line.endswith("\n")]


def entries_of(out):
    """What the lines say; a torn one, which stands alone, is left out."""
    found = []
    for line in lines_of(out):
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def cases_of(out, part):
    """The newest of each case of a part."""
    return {entry["case"]: entry for entry in entries_of(out) if entry.get("part") == part}


class Script:
    """The script on the stand-in, whose results go to one folder."""

    def __init__(self, stand_in, out, log):
        self.out, self.log = out, log
        self.environment = stand_in.environment(computes=True) | {"PYTHON": sys.executable}

    def begin(self, words):
        """Start a call."""
        command = ["bash", SCRIPT, *words, "--dry-run", "--limit", "900", "--out", self.out]
        with self.log.open("w") as log:
            return subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)

    def kill(self, words, reached):
        """Start a call and kill it with all its children once so much is reached."""
        before = len(lines_of(self.out))
        process = self.begin(words)
        while process.poll() is None:
            there = len(lines_of(self.out)) - before
            if (self.out / reached).exists() if isinstance(reached, str) else there >= reached:
                break
            time.sleep(0.02)
        assert process.poll() is None, self.log.read_text()[-3000:]
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            one.kill()
        process.wait()

    def end(self, words):
        """Make a call to its end."""
        assert self.begin(words).wait() == 0, self.log.read_text()[-3000:]


@pytest.fixture(scope="module")
def rehearsed(stand_in, tmp_path_factory):
    """The folder of results, after all calls."""
    out, log = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("log") / "log"
    script = Script(stand_in, out, log)
    for words, reached in CALLS.items():
        if reached is not None:
            script.kill(words, reached)
        left = lines_of(out)
        files = list(out.iterdir())
        assert len(files) <= MOST_FILES
        assert all(file.is_file() for file in files)
        for archive in out.glob("*.tar.gz"):
            with tarfile.open(archive) as file:
                assert file.getnames()
        assert (out / "results.md").exists()
        script.end(words)
        assert lines_of(out)[: len(left)] == left, "what was there stays"
    kept = [entry for entry in entries_of(out) if entry.get("status") != "unsteady"]
    names = [(entry.get("part"), entry.get("case")) for entry in kept]
    assert len(names) == len(set(names)), "nothing was done twice"
    return out


@pytest.mark.parametrize("part", PARTS)
def test_every_case_of_a_part_is_kept_or_refused(rehearsed, part):
    cases = cases_of(rehearsed, part)
    assert cases
    told = ("ok", "refused", "unsteady") if part in TIMED else ("ok", "refused")  # beside other processes
    assert {name: case for name, case in cases.items() if case["status"] not in told} == {}
    scenes = {case["status"] for name, case in cases.items() if "scene" in name}
    assert scenes == ({"ok"} if part == "correctness" else set())


def test_it_leaves_a_few_files_and_a_table(rehearsed):
    assert len(list(rehearsed.iterdir())) <= MOST_FILES
    table = (rehearsed / "results.md").read_text()
    assert "NVIDIA H100 80GB HBM3" in table
    for line in ("| mlp | ", "| unet_256 | + fused_batchnorm | ", "| floats against bytes | uint8_seconds |"):
        assert line in table


def test_what_a_gpu_alone_can_tell_comes_first(rehearsed):
    kinds = [n.partition(" ")[0] for n in cases_of(rehearsed, "correctness") if n != "contract variants"]
    assert list(dict.fromkeys(kinds)) == ["scene", "ruler", "contract"]


def test_a_graph_was_timed_and_bytes_were_counted(rehearsed):
    cases = cases_of(rehearsed, "cnn")
    assert cases["resnet50_256 | graph without compile"]["status"] in ("ok", "unsteady")
    found = cases["resnet50_256 | bytes"]["found"]
    steps = [found[way]["bytes"] for way in ("bfloat16 products", "bfloat16 fused", "bfloat16", "float32")]
    assert steps == sorted(set(steps))
    assert max(cases["products float32"]["found"]["worst"].values()) > 0


def test_batches_as_bytes_give_the_same_bits(rehearsed):
    cases = cases_of(rehearsed, "feed")
    assert cases["floats against bytes"]["found"]["bits_equal"] == 1.0
    found = cases["overlap of ResNet-50"]["found"]
    takes_time = found["coming_seconds"] > found["there_seconds"]  # else there is nothing to hide a share of
    assert ("hidden_share" in found) is takes_time


def test_the_trials_of_a_tune_are_kept(rehearsed):
    with tarfile.open(rehearsed / "tune-mlp.tar.gz") as file:
        assert "tune-mlp/ledger.jsonl" in file.getnames()
