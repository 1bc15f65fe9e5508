"""Which framework and API: answers rest on a record that fits, or there is no figure and a command."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from vivace.advising import software
from vivace.advising.demand import Bin, Demand
from vivace.advising.software import advise_on_software, kind_of
from vivace.errors import InputError
from vivace.inspection import inspect
from vivace.machine import Backend, Device
from vivace.pages.answer import ending

FLOPS_PER_STEP = 8e11  # of the profile
ATTENTION = {"attention": {"flops": 8e11, "bytes": 1e9, "count": 12, "seconds": 0.1}}


@pytest.fixture(autouse=True)
def _own_store(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def machine():
    return inspect()


@pytest.fixture
def records(tmp_path, machine):
    """Writes a record of this machine, with rows of (name, framework, interval), and returns its folder."""

    def write(*rows, date="2026-01-02", kind="convolutional", flops=FLOPS_PER_STEP, reached=True, **changes):
        record = {
            "date": date,
            "command": "scripts/bench frameworks",
            "machine": {"device": machine.device.name, "cores": machine.num_cores},
            "versions": dict(machine.versions),
            "pins": {},
            "accuracy": 0.95,
            "work": {"net": {"kind": kind, "flops_per_step": flops}},
            "rows": [row(*each, reached=reached) for each in rows],
        }
        folder = tmp_path / "records" / "frameworks" / "a_machine"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{date}.json").write_text(json.dumps({**record, **changes}))
        return tmp_path / "records"

    return write


def row(name, framework, low, estimate, high, reached=True):
    ratio = {"estimate": estimate, "low": low, "high": high}
    found = {"job": "net", "contender": name, "framework": framework, "status": "measured", "ratio": ratio}
    return {**found, "to_first_step_seconds": 3.0, "accuracy_seconds": 20.0 if reached else None}


EAGER = ("PyTorch, eager", "torch", 0.99, 1.0, 1.01)
PLAN = ("PyTorch under tune's plan", "torch", 1.9, 2.0, 2.1)


def test_the_answer_is_to_stay_unless_another_is_faster_beyond_noise(profile, records):
    near = ("JAX", "jax", 1.95, 2.2, 2.5)
    advice = advise_on_software(profile(), records=records(EAGER, PLAN, near))
    assert (advice.answer, advice.exit_code) == ("stay", 0)
    assert advice.best.name == PLAN[0]
    assert advice.over_staying.low == pytest.approx(1.95 / 2.1)
    assert advice.over_staying.high == pytest.approx(2.5 / 1.9)
    one_process = ("JAX", "jax", 2.2, 2.25, 2.3)
    assert advise_on_software(profile(), records=records(EAGER, PLAN, one_process)).answer == "stay"
    far = ("JAX", "jax", 2.9, 3.0, 3.1)
    advice = advise_on_software(profile(), records=records(EAGER, PLAN, far))
    assert advice.answer == "move"
    assert advice.best.name == "JAX"
    assert advice.over_staying.estimate == pytest.approx(1.5)
    assert [option.name for option in advice.options] == ["JAX", PLAN[0], EAGER[0]]


def test_what_did_not_learn_or_was_not_measured_is_no_answer(profile, records):
    folder = records(EAGER, PLAN, ("JAX", "jax", 2.9, 3.0, 3.1))
    path = folder / "frameworks" / "a_machine" / "2026-01-02.json"
    record = json.loads(path.read_text())
    record["rows"][2]["accuracy_seconds"] = None
    record["rows"].append({"job": "net", "contender": "Keras", "status": "failed", "reason": "no wheel"})
    path.write_text(json.dumps(record))
    advice = advise_on_software(profile(), records=folder)
    assert (advice.answer, advice.best.name) == ("stay", PLAN[0])
    assert "JAX: it did not reach the accuracy of 95 %" in advice.reasons
    advice = advise_on_software(profile(), records=records(EAGER, PLAN, reached=False))
    assert (advice.answer, advice.exit_code, advice.best) == ("unknown", 1, None)


def no_figure(advice):
    return (advice.answer, advice.exit_code, advice.options, advice.record) == ("unknown", 1, (), {})


def test_without_a_record_that_fits_there_is_no_figure_and_a_command(profile, records, machine):
    folder = records(EAGER, PLAN)
    for wrong in (
        {"flops": FLOPS_PER_STEP * 11},
        {"flops": FLOPS_PER_STEP / 11},
        {"kind": "recurrent"},
        {"machine": {"device": "another", "cores": machine.num_cores}},
        {"machine": {"device": machine.device.name, "cores": machine.num_cores + 1}},
    ):
        assert no_figure(advise_on_software(profile(), records=records(EAGER, PLAN, **wrong))), wrong
    assert not no_figure(advise_on_software(profile(), records=records(EAGER, PLAN)))
    advice = advise_on_software(profile(operators=ATTENTION), records=folder)
    assert no_figure(advice)
    assert advice.next == "scripts/bench frameworks transformer"
    dense = {"matmul": {"flops": 8e11, "bytes": 1e9, "count": 12, "seconds": 0.1}}
    advice = advise_on_software(profile(operators=dense), records=folder)
    assert no_figure(advice)
    assert advice.next == "vivace tune JOB"
    assert "(dense)" in advice.reasons[0]


def test_who_has_the_package_alone_is_not_sent_to_a_script_of_the_source_code(
    profile, records, tmp_path, monkeypatch
):
    monkeypatch.setattr(software, "CHECKOUT", tmp_path)
    advice = advise_on_software(profile(operators=ATTENTION), records=records(EAGER, PLAN))
    assert advice.next == "vivace tune JOB"
    assert "comes with Vivace's source code" in advice.reasons[0]
    assert "--records" in advice.reasons[0]


def test_the_newest_record_counts_and_other_versions_are_said(profile, records, machine):
    records(EAGER, PLAN, date="2026-01-02")
    versions = {**machine.versions, "torch": "1.0"}
    advice = advise_on_software(profile(), records=records(EAGER, date="2026-01-03", versions=versions))
    assert advice.record["date"] == "2026-01-03"
    assert any("torch 1.0 then" in reason for reason in advice.reasons)


def test_the_nearest_network_of_the_kind_is_taken(profile, records):
    sizes = {"small": FLOPS_PER_STEP / 8, "net": FLOPS_PER_STEP * 2, "large": FLOPS_PER_STEP * 9}
    work = {name: {"kind": "convolutional", "flops_per_step": size} for name, size in sizes.items()}
    assert advise_on_software(profile(), records=records(EAGER, PLAN, work=work)).record["job"] == "net"


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (("conv", "matmul"), "convolutional"),
        (("recurrent", "matmul"), "recurrent"),
        (("attention", "matmul"), "transformer"),
        (("batched", "softmax", "matmul"), "transformer"),
        (("matmul", "softmax"), "dense"),
    ],
)
def test_kinds_of_networks(kinds, expected):
    flops = {"conv": 10.0}
    bins = tuple(Bin(kind, 1, flops.get(kind, 1.0), 1.0) for kind in kinds)
    assert kind_of(Demand(bins, 1, 1, 1.0)) == expected


def test_the_api_is_that_of_the_device_and_a_gpu_that_is_passed_over_is_said(profile, records, machine):
    folder = records(EAGER, PLAN)
    advice = advise_on_software(profile(), dataclasses.replace(machine, backends=()), folder)
    assert advice.api == (machine.device.kind, machine.device.name)
    assert any("vivace inspect --measure" in reason for reason in advice.api_reasons)
    card = Device("cuda", "a card", 2**30, served=True)
    backends = (Backend("cuda", reason="no NVIDIA GPU"), Backend("rocm", ("a card",), torch=True))
    advice = advise_on_software(
        profile(), dataclasses.replace(machine, devices=(card, *machine.devices), backends=backends), folder
    )
    assert advice.api == ("rocm", "a card")
    assert advice.answer == "unknown"  # the record is the processor's
    idle = dataclasses.replace(card, served=False)
    advice = advise_on_software(
        profile(), dataclasses.replace(machine, devices=(*machine.devices, idle)), folder
    )
    if machine.device.kind == "cpu":
        assert any("a card" in reason for reason in advice.api_reasons)


def run(*words):
    command = [sys.executable, "-m", "vivace", "advise", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_ends_within_its_lines_and_its_document_is_json(profile, records):
    rows = [(f"way {number}", "jax", 0.9, 1.0, 1.1) for number in range(9)]
    folder = records(EAGER, PLAN, *rows)
    console = Console(file=io.StringIO(), width=100)
    ending(advise_on_software(profile(), records=folder).ending(), console)
    shown = console.file.getvalue()
    assert len(shown.splitlines()) <= 12
    assert shown.startswith("Stay on PyTorch: ")
    done = run(profile(), "--software", "--records", str(folder), "--json")
    document = json.loads(done.stdout)["software"]
    assert (done.returncode, document["answer"], document["kind"]) == (0, "stay", "convolutional")
    done = run(profile(), "--software", "--records", str(folder), "--details")
    said = done.stdout + done.stderr
    assert all(f"way {number}" in said for number in range(9)), said
    assert said.endswith(shown[shown.index("Next: ") :])
    done = run(profile(operators=ATTENTION), "--software", "--records", str(folder))
    assert done.returncode == 1
    assert "Next: scripts/bench frameworks transformer" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--software"], "give a JOB"),
        (["JOB", "--software", "--on", "RTX 4090"], "give a JOB, and no --on"),
        (["JOB", "--software", "--epochs", "3"], "--epochs says nothing"),
        (["JOB", "--records", "."], "give --software too"),
        (["JOB", "--software", "--records", "no/such/folder"], "not 'no/such/folder'"),
        (["no_such_file.py:job", "--software"], "no_such_file.py"),
    ],
)
def test_bad_input_is_one_sentence(given, told, profile):
    done = run(*(profile() if word == "JOB" else word for word in given))
    assert done.returncode == 2
    assert told in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": 3}', 100_000 * "["], ids=range(5))
def test_a_damaged_record_is_named(text, profile, records):
    folder = records(EAGER)
    path = Path(folder, "frameworks", "a_machine", "2026-01-05.json")
    path.write_text(text)
    with pytest.raises(InputError, match=r"2026-01-05\.json"):
        advise_on_software(profile(), records=folder)
