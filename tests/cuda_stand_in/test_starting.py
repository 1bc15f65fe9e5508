"""The driver shows a GPU: does training use it, and what is said where it does not?"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

JOB = f"{Path(__file__).with_name('job.py')}:job"
NOT_READY = 802  # what CUDA answers on servers with NVSwitch until the fabric manager runs
REASON = "Error 802: system not yet initialized"
WAY_ON = 'set CUDA_VISIBLE_DEVICES="" to train on the processor'


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "plan.toml").write_text("format = 1\n\n[techniques.fused_optimizer]\n")
    return tmp_path / "plan.toml"


def test_a_working_gpu_is_what_a_job_trains_on(stand_in, tmp_path):
    machine = json.loads(stand_in.vivace("inspect", "--json").stdout)
    assert (machine["devices"][0]["kind"], machine["devices"][0]["served"]) == ("cuda", True)
    trained = stand_in.vivace("train", JOB, "--out", tmp_path / "run", "--json", computes=True)
    assert trained.returncode == 0, trained.stderr
    assert "on the processor" not in trained.stderr


def test_a_gpu_that_torch_cannot_use_is_said_before_its_minutes_begin(stand_in, tmp_path):
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.sh"
    environment = stand_in.environment(cuda=12080) | {"PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", script, "first", "--out", tmp_path / "out"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "serves CUDA up to 12.8, and torch" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", ["tune", "train", "verify", "profile"])
def test_where_cuda_does_not_start_a_verb_stops_with_torchs_reason(stand_in, tmp_path, plan, verb):
    more = {"tune": ["--budget", "5"], "verify": ["--plan", plan]}.get(verb, [])
    folder = [] if verb == "verify" else ["--out", tmp_path / "out"]
    done = stand_in.vivace(verb, JOB, *more, *folder, "--json", start_error=NOT_READY)
    assert done.returncode == 2, done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == "InputError"
    assert error["message"].startswith("torch cannot use the NVIDIA H100 80GB HBM3 that the driver shows")
    assert REASON in error["message"]
    assert WAY_ON in error["message"]


def test_the_way_on_is_open(stand_in, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = stand_in.vivace("train", JOB, "--out", tmp_path / "run", "--json", start_error=NOT_READY)
    assert done.returncode == 0, done.stderr


def test_inspect_finds_a_cuda_that_does_not_start(stand_in):
    machine = json.loads(stand_in.vivace("inspect", "--json", start_error=NOT_READY).stdout)
    assert machine["devices"][0]["kind"] == "cpu"
    finding = machine["findings"][0]
    assert REASON in finding["problem"]
    assert WAY_ON in finding["next"]
    row = next(row for row in machine["backends"] if row["name"] == "cuda")
    assert (row["torch"], REASON in row["reason"]) == (False, True)


def test_a_gpu_whose_memory_others_use_is_not_broken(stand_in):
    machine = json.loads(stand_in.vivace("inspect", "--json", full_after=0).stdout)
    assert (machine["devices"][0]["kind"], machine["devices"][0]["served"]) == ("cuda", True)
    assert not any("torch cannot use" in finding["problem"] for finding in machine["findings"])


def test_attach_stops_where_the_model_is_on_the_cpu_for_want_of_cuda(stand_in):
    printed = stand_in.python(
        """
import warnings
import torch, vivace
warnings.simplefilter("ignore")  # torch's own, at the first question for a GPU
model = torch.nn.Linear(4, 4).to("cuda" if torch.cuda.is_available() else "cpu")
optimizer = torch.optim.SGD(model.parameters())
try:
    vivace.attach(vivace.Plan(), model=model, optimizer=optimizer, loss=lambda m, b: m(b).sum())
except vivace.VivaceError as error:
    print(error)
""",
        start_error=NOT_READY,
    )
    assert REASON in printed
    assert WAY_ON in printed


@pytest.mark.parametrize(
    ("settings", "problem"),
    [({"capability": 70}, "has no code for"), ({"cuda": 12040}, "serves CUDA up to 12.4")],
)
def test_a_gpu_that_torch_cannot_serve_is_left_alone_and_named(stand_in, tmp_path, settings, problem):
    """inspect's rows, the training and what it tells agree."""
    machine = json.loads(stand_in.vivace("inspect", "--json", **settings).stdout)
    assert [(device["kind"], device["served"]) for device in machine["devices"]] == [
        ("cpu", True),
        ("cuda", False),
    ]
    assert not next(row for row in machine["backends"] if row["name"] == "cuda")["torch"]
    printed = stand_in.python(
        """
import sys
from vivace.session.opening import start, training_device
from vivace import inspect
from vivace.plan import Plan
from vivace.job import load
machine = inspect()
with start(load(sys.argv[1]), Plan(), machine) as session:
    print(training_device(machine), session.build.device, machine.passed_over)
""",
        JOB,
        **settings,
    )
    assert printed.startswith("cpu cpu training on the processor, not on the NVIDIA H100 80GB HBM3: ")
    assert problem in printed
    trained = stand_in.vivace("train", JOB, "--out", tmp_path / "run", **settings)
    assert problem in trained.stderr


def test_a_rank_for_which_there_is_no_gpu_says_so(stand_in, tmp_path, monkeypatch):
    (tmp_path / "plan.toml").write_text("format = 1\n\n[techniques.ddp]\n")
    for name, value in {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "RANK": 1, "LOCAL_RANK": 1}.items():
        monkeypatch.setenv(name, str(value))
    words = ("train", JOB, "--plan", tmp_path / "plan.toml", "--out", tmp_path / "run")
    done = stand_in.vivace(*words)
    assert done.returncode == 2
    assert done.stderr.startswith("vivace: rank 1 of this machine has no GPU, as torch shows 1 GPU: start as")
