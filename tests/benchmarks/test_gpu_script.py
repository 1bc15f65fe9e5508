"""benchmarks/gpu.sh: its files, its times, and going on where it stopped."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from unittest.mock import Mock

import pytest

import vivace
from vivace.errors import ChildFailed, Code, InputError, JobError, Refused, Unsteady
from vivace.machine import Device
from vivace.measuring import paired
from vivace.verifying.verdict import Verdict

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "benchmarks" / "gpu"
PARTS = ("ceilings", "correctness", "speed", "tune", "peer", "memory", "verdicts", "cnn", "feed")
FACTS = {"device": "H100", "torch": "2.11.0", "dry": False}


def test_bytes_and_bounds_of_resnet50_are_the_published_ones(module):
    """474 MB an image in bf16 and NHWC, 367 with BatchNorm, ReLU and addition fused, from another count.

    That count knows neither forks, of which 15 of 16 have their gradients added in the backward kernels, nor
    the four shortcuts whose BatchNorm runs with the one that it is added to.
    """
    import torch
    from torchvision import models

    traffic = module("traffic")
    plain, fused = (
        traffic.traffic(models.resnet50, 224, torch.bfloat16, fused=f, batch=256) for f in (False, True)
    )
    assert plain.flops == fused.flops == pytest.approx(24.30e9, rel=1e-3)
    assert plain.bytes == pytest.approx(474e6, rel=0.03)
    forks, shortcuts = 5.42e6, 1.51e6  # elements of an image
    spared = 2 * (2 * forks + 4 * shortcuts)
    assert fused.bytes + spared == pytest.approx(367e6, rel=0.03)
    assert plain.bound(*traffic.H200) == pytest.approx(9341, rel=0.03)
    assert fused.bound(*traffic.H200) == pytest.approx(12569, rel=0.01)
    names = [one.name for one in fused.passes]
    assert names.count("batch_norm_apply") == names.count("batch_norm_backward_apply") == 49
    assert names.count("batch_norm_statistics") == 53
    assert names.count("add") == 1  # behind the max-pooling, which is not fused
    products = traffic.traffic(models.resnet50, 224, torch.bfloat16, fused=True, products=True, batch=256)
    assert products.flops == fused.flops
    elements = 8.2e6  # an image's, behind the 33 convolutions: read once less, but for partial sums
    assert fused.bytes - products.bytes == pytest.approx(2 * elements, rel=0.03)


def test_counters_are_read_from_what_ncu_prints(module):
    head = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    rows = [
        f'"{number}","batch_norm_apply(args)","{metric}","byte","{value}"'
        for number, metric, value in (
            (0, "dram__bytes_read.sum", "1,000"),
            (0, "dram__bytes_write.sum", "500"),
            (1, "dram__bytes_read.sum", "10"),
        )
    ]
    printed = "\n".join(["==PROF== Connected", head, *rows, "done"])
    assert module("counters").summed(printed) == {"batch_norm_apply": 1510.0}
    assert module("counters").summed("==ERROR== no permission") == {}


def test_kernels_of_one_norm_move_what_the_count_says(module):
    """Two counts of one BatchNorm with addition and ReLU: by the shape, and from the operators that run."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.relu = nn.Conv2d(3, 64, 1), nn.BatchNorm2d(64), nn.ReLU()

        def forward(self, x):
            x = self.conv(x)
            return self.relu(self.norm(x) + x)

    traffic = module("traffic")
    counted = traffic.traffic(Block, 32, torch.bfloat16, fused=True, batch=4)
    wanted = traffic.norm_bytes(4 * 32 * 32, 64, 2, residual=True)
    found = {one.name: one.bytes for one in counted.passes if one.name in wanted}
    assert found == pytest.approx(wanted, rel=0.01)


@pytest.fixture
def module(monkeypatch):
    """Loads a file of the script under its own name, as the script does."""
    monkeypatch.syspath_prepend(str(GPU))
    monkeypatch.setattr(paired, "WORKER", paired.WORKER)  # the script has one of its own
    yield importlib.import_module
    for path in GPU.glob("[a-z]*.py"):
        sys.modules.pop(path.stem, None)


def run(*arguments, python=sys.executable, **environment):
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHON": str(python), **environment},
    )


def test_without_a_gpu_it_says_how_to_rehearse(tmp_path):
    done = run("--dry-run", "--out", tmp_path / "out", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "python tests/cuda_stand_in benchmarks/gpu.sh --dry-run" in done.stderr
    assert not (tmp_path / "out").exists()


def test_bad_input_is_one_sentence(tmp_path):
    done = run("velocity", "--dry-run", "--out", tmp_path)
    assert done.returncode == 2
    assert "there is no part 'velocity'" in done.stderr
    done = run("--dry-run", "--wheels", tmp_path / "none")
    assert done.returncode == 2
    assert "there is no folder" in done.stderr


@pytest.mark.parametrize("brought", [False, True])
def test_wheels_and_kernels_are_unpacked_before_anything_runs(tmp_path, brought):
    """A Python that only notes the script's own files stands for the machine's, which need not have pip."""
    python, log, site = tmp_path / "python", tmp_path / "log", tmp_path / f"vivace-gpu-wheels-{os.getuid()}"
    python.write_text(f'#!/bin/sh\ncase $1 in -*) exec "{sys.executable}" "$@" ;; esac\necho "$@" >> {log}\n')
    python.chmod(0o755)
    with zipfile.ZipFile(tmp_path / "a-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("a/__init__.py", "")
    site.mkdir()
    (site / "an_older_call.py").touch()
    if brought:
        (tmp_path / "kernels.tar.gz").touch()
    assert run("--wheels", tmp_path, python=python, TMPDIR=str(tmp_path)).returncode == 0
    assert [file.name for file in site.iterdir()] == ["a"]
    asked = [line.split()[0] for line in log.read_text().splitlines()]
    unpacking = ["benchmarks/gpu/ahead.py"] if brought else []
    assert asked == ["benchmarks/gpu/needs.py", *unpacking, "benchmarks/gpu"]


def test_kernels_that_cannot_be_unpacked_stop_nothing(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\ncase $1 in *ahead.py) exit 1 ;; esac\n")
    python.chmod(0o755)
    (tmp_path / "kernels.tar.gz").touch()
    done = run("--wheels", tmp_path, python=python, TMPDIR=str(tmp_path))
    assert done.returncode == 0
    assert "kernels.tar.gz' cannot be used: kernels are compiled here" in done.stderr


def test_what_compiling_ahead_needs_is_named(module, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pytest", None)
    monkeypatch.setattr(sys, "argv", ["ahead.py", str(tmp_path / "wheels")])
    assert module("ahead").main() == 2
    said = capsys.readouterr().err
    assert said == "ahead.py: this Python lacks pytest: install with python -m pip install pytest\n"
    assert not (tmp_path / "wheels").exists()


def test_a_python_that_is_too_old_or_not_there_is_named(tmp_path):
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    for python in (old, tmp_path / "none"):
        done = run(python=python)
        assert done.returncode == 2
        assert done.stderr.startswith(f"gpu.sh: '{python}' is not Python 3.11 or newer")
        assert done.stderr.count("\n") == 1


def test_a_failing_case_is_written_and_the_next_one_runs(module, tmp_path):
    book = module("book")
    part = book.Book(tmp_path, "speed", 60, FACTS)

    def fail():
        raise ChildFailed("the process died from SIGSEGV")

    def refuse():
        raise Refused("cuda_graph_step: no")

    def hesitate():
        raise Unsteady("too unsteady to conclude")

    assert part.case("a", fail)["status"] == "failed"
    assert part.case("b", refuse)["status"] == "refused"
    assert part.case("d", hesitate) | {"seconds": 0} == {
        "status": "unsteady",
        "reason": "too unsteady to conclude",
        "seconds": 0,
    }
    assert part.case("c", lambda: {"value": 1})["value"] == 1
    again = book.Book(tmp_path, "speed", 60, FACTS)
    assert again.case("c", fail)["value"] == 1, "done already"
    for name in ("a", "d"):
        assert again.case(name, lambda: {"value": 2})["value"] == 2, "these are tried again"
    facts, parts = book.read(tmp_path)
    assert facts == FACTS
    statuses = {name: case["status"] for name, case in parts["speed"].items()}
    assert statuses == {"a": "ok", "b": "refused", "c": "ok", "d": "ok"}


@pytest.mark.parametrize("part", ["ceilings", "cnn", "feed"])
@pytest.mark.parametrize("error", [ChildFailed, JobError])
def test_a_cuda_error_stays_in_its_process_and_the_next_case_has_another(
    module, tmp_path, monkeypatch, part, error
):
    """After an illegal access each call of that process fails, by whatever class it is reported."""

    class Child:
        def __init__(self, *_):
            self.broken = False

        def ask(self, command, timeout, **arguments):
            if self.broken or command in ("matmul", "overlap"):
                self.broken = True
                raise error("CUDA error: an illegal memory access was encountered")
            return {"seconds": 1.0}

        def close(self):
            pass

    loaded, book = module({"cnn": "cnn", "feed": "feeding"}.get(part, "others")), module("book")
    monkeypatch.setattr(loaded, "Child", Child)
    monkeypatch.setattr(loaded, "_inspect", lambda _: {}, raising=False)
    for name in ("_waterfall", "_contract"):
        monkeypatch.setattr(loaded, name, lambda *_: None, raising=False)
    its = book.Book(tmp_path, part, 60, FACTS | {"dry": True})
    getattr(loaded, part)(its)
    statuses = [case["status"] for case in its.cases.values()]
    assert statuses.count("failed") == 1
    assert statuses[0] == "failed"
    assert len(statuses) > 1


def test_a_feed_whose_bits_differ_is_broken(module):
    judged = module("feeding").judged
    equal = {"float32_seconds": 2.0, "uint8_seconds": 1.0, "bits_equal": 1.0}
    assert judged(equal) == {"found": equal}
    assert judged(equal | {"bits_equal": 0.0})["status"] == "broken"
    assert judged({"hidden_share": 0.97}) == {"found": {"hidden_share": 0.97}}


def test_what_was_done_before_a_death_in_mid_line_is_kept_and_what_comes_after_too(module, tmp_path):
    book, write = module("book"), module("summary").write
    part = book.Book(tmp_path, "feed", 60, FACTS, lambda: write(tmp_path))
    part.case("a", lambda: {"found": {"hidden_share": 0.5}})
    assert "| a | hidden_share | 50% |" in (tmp_path / "results.md").read_text(), "as each case ends"
    with (tmp_path / "cases.jsonl").open("a") as file:
        file.write('{"part": "feed", "case": "b", "sta')
    book.Book(tmp_path, "feed", 60, FACTS).case("c", dict)
    assert list(book.read(tmp_path)[1]["feed"]) == ["a", "c"]


def test_a_commands_folder_becomes_one_file(module, tmp_path, monkeypatch):
    """Also while the command runs, and where it is cut off: its ledger holds what it had measured."""
    book, others = module("book"), module("others")
    archive = tmp_path / "tune-mlp.tar.gz"

    def ledger():
        with tarfile.open(archive) as file:
            return file.extractfile("tune-mlp/ledger.jsonl").read()

    def killed(command, timeout):
        out = Path(command[command.index("--out") + 1])
        out.mkdir()
        (out / "ledger.jsonl").write_text("one\n")
        deadline = time.monotonic() + 60
        while not archive.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert ledger() == b"one\n"
        (out / "ledger.jsonl").write_text("one\ntwo\n")
        raise ChildFailed("exit code -9 after 3 s")

    monkeypatch.setattr(others, "_run", killed)
    monkeypatch.setattr(others, "KEPT_EVERY", 0.05)
    part = book.Book(tmp_path, "tune", 1000, FACTS)
    case = part.case("mlp", lambda: others._tune(part, "mlp", 5))
    assert case["reason"] == "exit code -9 after 3 s"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cases.jsonl", "tune-mlp.tar.gz"]
    assert ledger() == b"one\ntwo\n"


def test_a_part_that_stops_between_its_cases_is_said_and_the_next_one_runs(module, tmp_path):
    book = module("book")

    def part(its):
        its.case("a", dict)
        raise KeyError("ceiling copy")

    assert book.Book(tmp_path, "cnn", 60, FACTS).whole(part) == "KeyError: 'ceiling copy'"
    assert book.Book(tmp_path, "feed", 60, FACTS).whole(lambda its: its.case("b", dict)) == ""
    assert {name: list(cases) for name, cases in book.read(tmp_path)[1].items()} == {
        "cnn": ["a"],
        "feed": ["b"],
    }
    assert "KeyError" in (tmp_path / "cases.jsonl").read_text()


def test_what_is_missing_is_named_in_the_first_second(tmp_path):
    """A Python with nothing in it stands for a machine's that lacks something."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    done = run("--dry-run", "--out", tmp_path / "out", python=bare)
    assert done.returncode == 2
    assert "lacks cloudpickle, " in done.stderr
    assert "torch, torchvision, scikit-learn: choose with PYTHON=" in done.stderr
    line = next(line for line in done.stderr.splitlines() if "tomlkit typer" in line)
    assert {"pydantic", "pydantic-core", "annotated-types", "torchao"} <= set(line.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("package", "wrong", "said", "fetched"),
    [
        ("pydantic", "1.10.13", "1.10.13 is too old, 2.7 or newer is needed", True),
        (
            "psutil",
            ImportError("for another Python"),
            "it cannot be imported here: ImportError: for an",
            True,
        ),
        ("torch", "2.8.0+cu128", "2.8.0+cu128 is too old, 2.11 or newer is needed", False),
        ("torch", "2.11.0+cu130", "", False),
    ],
)
def test_what_is_there_and_does_not_serve_is_named(
    module, monkeypatch, capsys, package, wrong, said, fetched
):
    needs = module("needs")
    version, imported = needs.version, needs.importlib.import_module

    def other(name):
        if name == package and isinstance(wrong, Exception):
            raise wrong
        return wrong if name == package else None

    if isinstance(wrong, str):
        monkeypatch.setattr(needs, "version", lambda name: other(name) or version(name))
    else:
        monkeypatch.setattr(needs.importlib, "import_module", lambda name: other(name) or imported(name))
    assert needs.main() == (2 if said else 0)
    told = capsys.readouterr().err
    assert (f"gpu.sh: {package}: {said}" in told) == bool(said)
    assert bool(re.search(rf" {package}\s", told)) == fetched
    assert (f"gpu.sh: {package}: choose with PYTHON=..." in told) == bool(said and not fetched)


def test_without_torchao_the_minutes_begin_and_what_is_lost_is_said(module, monkeypatch, capsys):
    needs = module("needs")
    real = needs.requires

    def requires(name):
        if name == "torchao":
            raise needs.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(needs, "requires", requires)
    assert needs.main() == 0
    assert "without torchao, fp8_linear is refused" in capsys.readouterr().err


def test_what_a_missing_package_would_need_is_asked_for_too(module):
    needs = module("needs")
    assert needs.missing(["pydantic", "numpy"]) == []
    assert needs.missing(["rich", "no-such-package"]) == ["no-such-package"]
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert {name for names in needs.NEEDED_BY.values() for name in names} <= set(pinned)


def test_no_case_begins_after_the_parts_time(module, tmp_path):
    part = module("book").Book(tmp_path, "tune", 1, FACTS)
    assert part.case("long", dict, seconds=5)["status"] == "unreached"
    assert part.unreached == ["long"]
    assert "long" not in (tmp_path / "cases.jsonl").read_text()


def test_a_table_that_cannot_be_made_stops_no_case(module, tmp_path):
    write = module("summary").write
    for part, case in (("speed", {"peak_bytes": None}), ("feed", {"found": {"hidden_share": 0.5}})):
        book = module("book").Book(tmp_path, part, 60, FACTS, lambda: write(tmp_path))
        book.case("mlp | strict fp32", lambda case=case: case)
        assert book.case("b", dict)["status"] == "ok"
    text = (tmp_path / "results.md").read_text()
    assert "no table could be made of them (TypeError: " in text
    assert "| hidden_share | 50% |" in text


def test_a_plan_that_is_too_large_beside_the_reference_is_refused_and_not_tried_again(
    module, tmp_path, monkeypatch
):
    speed, book = module("speed"), module("book").Book(tmp_path, "speed", 60, FACTS)
    monkeypatch.setattr(speed.Track, "reference", lambda _: Mock())
    for name, code, status in (("a", Code.OUT_OF_MEMORY, "refused"), ("b", Code.KILLED, "failed")):
        lacking = Mock(open=Mock(side_effect=ChildFailed("out of memory", code=code)))
        monkeypatch.setattr(speed.Track, "_contestant", lambda _, made=lacking: made)
        track = speed.Track(book, "resnet50_512")
        assert book.case(name, lambda track=track: track.plan_case({"tf32": {}}))["status"] == status
        assert lacking.close.called
    assert book.done("a")
    assert not book.done("b")


def test_a_plan_that_could_not_be_judged_is_not_called_broken(module, tmp_path, monkeypatch):
    correctness, book = module("correctness"), module("book").Book(tmp_path, "correctness", 60, FACTS)
    verdict = Verdict(None, "rounding", 0.0, 0.0, 0, 0, "no step was the same twice")
    monkeypatch.setattr(correctness, "Verifier", lambda *_, **__: Mock(judge=lambda *_, **__: verdict))
    correctness._rule(book, "mlp", [{"tf32": {}}])
    case = book.cases["ruler tf32 on mlp"]
    assert (case["status"], case["reason"]) == ("failed", "no step was the same twice")


def test_results_of_another_machine_are_not_mixed_in(module, tmp_path):
    book = module("book")
    book.Book(tmp_path, "tune", 1, FACTS)
    with pytest.raises(InputError, match="H200"):
        book.Book(tmp_path, "tune", 1, {**FACTS, "device": "H200"})


def test_reasons_name_no_folder(module):
    assert module("book")._clean("no file\n /home/me/src/job.py here") == "no file job.py here"


def test_every_scene_is_played(module):
    listed = module("correctness").SCENES
    tree = ast.parse((GPU / "scenes.py").read_text())
    (scenes,) = [node for node in tree.body if getattr(node, "name", "") == "Scenes"]
    methods = [node.name for node in scenes.body if hasattr(node, "name") and not node.name.startswith("_")]
    assert sorted(methods) == sorted(listed)


def test_ceilings_stand_in_their_units(module):
    rates = {
        "jpeg_decode_per_core": 754.2,
        "matmul_int8": 1.5e15,
        "copy_device": 3e12,
        "launch_seconds": 5e-6,
    }
    told = "\n".join(module("summary")._ceilings({}, rates))
    for figure in ("754 images/s", "1500.0 TOP/s", "3000.0 GB/s", "5.00 us"):
        assert figure in told


def test_the_share_of_the_roofline_is_the_larger_bound(module):
    summary = module("summary")
    rates = {"matmul_bfloat16": 800e12, "matmul_float32": 50e12, "copy_device": 3e12}
    strict = {"flops_per_sample": 24.3e9}
    plan = {"samples_per_second": 3000.0, "plan": {"bf16_autocast": {}}}
    assert summary._share("resnet50_256", plan, strict, rates) == "37% (bytes)"
    assert summary._share("gpt", plan, strict, rates) == "9% (operations)"
    slow = {"samples_per_second": 1000.0}
    assert summary._share("resnet50_256", slow, strict, rates) == "49% (operations)"
    assert summary._share("gpt", plan, strict, {}) == "no ceiling"


def times():
    """The seconds of each part of a call, and of a part that is named alone."""
    tree = ast.parse((GPU / "__main__.py").read_text())
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id in ("CALLS", "ALONE")
    }


@pytest.mark.parametrize("part", PARTS)
def test_every_case_fits_into_its_part(module, tmp_path, monkeypatch, part):
    """A case that asks for more than the whole part has is never reached, on no GPU."""
    asked = {}

    class Asked(module("book").Book):
        """Runs no case, and notes what each asks for."""

        def case(self, name, measure, *, seconds=2.0):
            asked[name] = seconds
            self.cases[name] = {"status": "ok", "plans": [{"tf32": {}}, {"fused_optimizer": {}}]}
            return self.cases[name]

    files = {"cnn": "cnn", "correctness": "correctness", "feed": "feeding", "speed": "speed"}
    loaded, found = module(files.get(part, "others")), times()
    monkeypatch.setattr(loaded, "Child", Mock(), raising=False)
    least = min([call[part] for call in found["CALLS"].values() if part in call] or [found["ALONE"]])
    getattr(loaded, part)(Asked(tmp_path, part, least, FACTS | {"fingerprint": "", "date": ""}))
    assert asked
    assert {name: seconds for name, seconds in asked.items() if seconds > least} == {}


def test_a_tune_of_the_gpu_minutes_is_given_the_time_that_it_asks_for(module, tmp_path, monkeypatch):
    others, given = module("others"), {}

    def run(command, timeout):
        given[Path(command[command.index("--out") + 1]).name] = timeout
        raise ChildFailed("not run here")

    monkeypatch.setattr(others, "_run", run)
    others.tune(module("book").Book(tmp_path, "tune", times()["CALLS"]["third"]["tune"], FACTS))
    wanted = {f"tune-{name}": 1.1 * full + 30 for name, full in others.TUNED.items()}
    assert given == pytest.approx(wanted)


def test_each_call_stays_below_ten_minutes_and_all_three_below_thirty():
    values = times()
    calls = [sum(parts.values()) for parts in values["CALLS"].values()]
    assert max([values["ALONE"], *calls]) <= 9 * 60
    assert sum(calls) <= 27 * 60
    assert next(iter(values["CALLS"]["first"])) == "correctness", "first of all: is it the same model?"


def test_the_drivers_version_is_among_the_facts(module, monkeypatch):
    machine = vivace.Machine((Device("cuda", "a card", 1),), 1, {"driver": "580.95.05"}, {})
    book = module("book")
    monkeypatch.setattr(book.vivace, "inspect", lambda: machine)
    assert book.facts(dry=True)["driver"] == "580.95.05"
