"""Running out of memory while training: faults 21 to 23."""

import dataclasses
import io
import json
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import vivace
from vivace import Card, Numerics, Seam, Stage, Technique
from vivace.errors import JobError, OutOfMemory
from vivace.tensors import randomness
from vivace.tensors.randomness import capture
from vivace.training.ranks import Ranks
from vivace.training.survival import Smaller, Survival

CROWDED = Path(__file__).parent / "scenes" / "crowded.py"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def crowded():
    return SimpleNamespace(**runpy.run_path(str(CROWDED)))


def trained(job, plan, out, digest, **more):
    run = vivace.train(job, vivace.Plan.from_dict(plan), out=out, **more)
    return run, digest(out / "model.pt")


@pytest.mark.fault(21)
@pytest.mark.parametrize(("fails", "how"), [("forward", "class"), ("forward", "text"), ("backward", "host")])
def test_it_goes_on_as_a_run_that_was_started_with_smaller_pieces(
    crowded, tmp_path, digest, monkeypatch, fails, how
):
    monkeypatch.setenv("FAILS", "nothing")
    _, wanted = trained(crowded.job, {"micro_batches": {"num": 4}}, tmp_path / "wanted", digest)
    monkeypatch.setenv("FAILS", fails)
    monkeypatch.setenv("HOW", how)
    monkeypatch.setenv("MOST", "2")
    run, found = trained(crowded.job, {}, tmp_path / "run", digest)
    assert found == wanted
    assert [notice.rpartition(": ")[2] for notice in run.notices] == [
        "from here on each batch of 8 runs in 2 pieces (micro_batches)",
        "from here on each batch of 8 runs in 4 pieces (micro_batches)",
    ]
    assert vivace.Plan.load(tmp_path / "run").to_dict() == {"micro_batches": {"num": 4}}
    assert json.loads((tmp_path / "run" / "run.json").read_text())["notices"] == list(run.notices)


def test_a_failure_in_the_middle_goes_on_like_a_resumed_run(crowded, tmp_path, digest, monkeypatch):
    monkeypatch.setenv("FAILS", "nothing")

    def shrink(event):
        if event.kind == "checkpoint" and event.payload["step"] == 3:
            monkeypatch.setenv("FAILS", "backward")

    run, found = trained(crowded.job, {}, tmp_path / "run", digest, checkpoint_every_steps=3, on_event=shrink)
    assert run.steps == 8
    assert len(run.notices) == 1
    again, same = trained(crowded.job, {"micro_batches": {}}, tmp_path / "run", digest, resume=True)
    assert (again.resumed_from_step, same) == (8, found)


@pytest.mark.fault(21, 30)
def test_damage_after_a_change_of_plan_goes_back_to_the_plan_of_the_one_before(
    crowded, tmp_path, monkeypatch
):
    def shrink_and_end(event):
        if event.kind == "checkpoint" and event.payload["step"] == 4:
            if os.environ["FAILS"] == "backward":  # it is kept again, under the smaller plan
                raise KeyboardInterrupt
            monkeypatch.setenv("FAILS", "backward")

    monkeypatch.setenv("FAILS", "nothing")
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        vivace.train(crowded.job, out=out, checkpoint_every_steps=2, on_event=shrink_and_end)
    assert vivace.Plan.load(out).names == ("micro_batches",)
    model = out / "checkpoints" / "step_4" / "model.pt"
    model.write_bytes(model.read_bytes()[::-1])
    monkeypatch.setenv("FAILS", "nothing")
    run = vivace.train(crowded.job, out=out, resume=True)
    assert (run.resumed_from_step, run.steps, run.plan) == (2, 8, {})
    assert run.notices[0].startswith("skipped a checkpoint: step_4: the sha256 of model.pt differs")


@pytest.mark.fault(21)
def test_batch_norm_keeps_its_statistics_by_recomputing_instead(crowded, tmp_path, digest, monkeypatch):
    class Blocks(torch.nn.Sequential):
        def forward(self, x):
            if len(x) > 4 and self[1].forward.__name__ == "forward" and "forward" not in vars(self[0]):
                raise crowded.TEXTS["class"]
            return super().forward(x)

    def model():
        part = torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.3)
        inner = [torch.nn.Sequential(*part) for _ in range(2)]
        return Blocks(*inner, torch.nn.Linear(6, 3))

    monkeypatch.setenv("FAILS", "nothing")
    job = crowded.make(model=model)
    _, wanted = trained(job, {"checkpoint": {}}, tmp_path / "wanted", digest)
    run, found = trained(job, {}, tmp_path / "run", digest)
    assert found == wanted
    assert "fewer activations are kept (checkpoint), which changes no number" in run.notices[0]


def test_a_batch_whose_samples_look_at_each_other_is_not_cut(crowded, tmp_path, monkeypatch):
    monkeypatch.setenv("FAILS", "backward")
    with pytest.raises(OutOfMemory, match=r"the loss is no mean over samples: it is .* so it is not cut"):
        vivace.train(crowded.contrastive, out=tmp_path / "run")


def test_what_keeps_fewer_activations_goes_again_where_it_refuses(crowded, tmp_path, digest, monkeypatch):
    class Looping(torch.nn.Module):
        def __init__(self):
            super().__init__()
            widths = 6, 16, 16, 16, 3
            self.parts = torch.nn.Sequential(*map(torch.nn.Linear, widths[:-1], widths[1:]))

        def forward(self, x):
            for part in self.parts:
                x = part(x)
            return crowded.Crowded.apply(x, "backward")

    monkeypatch.setenv("FAILS", "nothing")
    job = crowded.make(model=Looping)
    _, wanted = trained(job, {"micro_batches": {}}, tmp_path / "wanted", digest)
    monkeypatch.setenv("FAILS", "backward")
    run, found = trained(job, {}, tmp_path / "run", digest)
    assert found == wanted
    told = ("fewer activations are kept", "cannot be one block", "runs in 2 pieces")
    assert all(part in notice for part, notice in zip(told, run.notices, strict=True)), run.notices
    assert run.plan == {"micro_batches": {}}


def test_a_run_ends_where_its_plan_lets_no_batch_be_cut(crowded, tmp_path, monkeypatch):
    def apply(self, build):
        def gradients(batch):
            loss = build.seams.forward(batch)
            build.seams.backward(loss)
            return loss.detach()

        build.replace(Seam.GRADIENTS, gradients)

    card = Card(Stage.MEMORY, Numerics.ROUNDING, "gradients of one's own", "tests", unit_roundoff=2.0**-20)
    cls = dataclasses.dataclass(frozen=True)(
        type("Gradients", (Technique,), {"card": card, "name": "own_gradients", "apply": apply})
    )
    monkeypatch.setenv("FAILS", "backward")
    with pytest.raises(OutOfMemory, match=r"in 2 pieces .*, which is refused: own_gradients"):
        vivace.train(crowded.job, vivace.Plan([cls()]), out=tmp_path / "run", watch=0)
    assert [one.name for one in (tmp_path / "run" / "checkpoints").iterdir()]  # nothing is lost


@pytest.mark.fault(21)
@pytest.mark.parametrize(
    ("fails", "plan", "sentence"),
    [
        ("forward", {}, "with one sample at a time: what may fit is a plan with checkpoint or optimizer"),
        ("update", {}, "while the weights were being updated.*a smaller batch, or a device with more memory"),
    ],
)
def test_a_storm_of_retries_ends_with_what_would_fit(crowded, tmp_path, monkeypatch, fails, plan, sentence):
    monkeypatch.setenv("FAILS", fails)
    monkeypatch.setenv("MOST", "0")
    with pytest.raises(OutOfMemory, match=sentence) as found:
        vivace.train(crowded.job, vivace.Plan.from_dict(plan), out=tmp_path / "run")
    assert found.value.exit_code == 1


def test_a_step_that_broke_the_device_is_told_as_it_failed(tmp_path, monkeypatch):
    """After an assertion that failed in a kernel, nothing works there any more."""

    def gone(self):
        raise RuntimeError("CUDA error: device-side assert triggered")

    def loss(model, batch):
        raise ValueError("bad labels")

    monkeypatch.setattr(Survival, "_free", gone)
    job = vivace.Job(
        model=lambda: torch.nn.Linear(1, 1),
        data=lambda: [torch.ones(4, 1)],
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    with pytest.raises(JobError, match="step 1 of the training failed: ValueError: bad labels"):
        vivace.train(job, out=tmp_path / "run")


def test_an_own_step_cannot_be_cut(tmp_path):
    def step(model, optimizer, batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    job = vivace.Job(
        model=lambda: torch.nn.Linear(1, 1),
        data=lambda: [torch.ones(4, 1)],
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        step=step,
    )
    with pytest.raises(JobError, match="your own step cannot be cut into pieces"):
        vivace.train(job, out=tmp_path / "run")


class Counting(torch.nn.Linear):
    """Its `change` acts in every forward pass; once `fails`, the pass then runs out of memory."""

    def __init__(self):
        super().__init__(4, 1)
        self.register_buffer("count", torch.arange(3.0))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.change, self.fails = (lambda model: None), False

    def forward(self, x):
        self.change(self)
        if self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(x)


@pytest.fixture
def counting(monkeypatch):
    """``(*changes) -> (model, survival)``: one good step with each change, and then one that fails with the
    last. Streams that no step moves are noted in the first steps alone.
    """
    monkeypatch.setattr(randomness, "MOST_SHARE", 1e-9)
    sessions = []

    def start(*changes):
        model = Counting()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sessions.append(
            vivace.attach(
                vivace.Plan(), model=model, optimizer=optimizer, loss=lambda model, x: model(x).mean()
            )
        )
        survival = Survival(sessions[-1], Ranks())
        for model.change in changes:
            survival.step(torch.ones(2, 4))
        model.fails = True
        return model, survival

    yield start
    for session in sessions:
        session.close()


def none(model): ...


def in_place(model):
    model.count.add_(1)


def by_data(model):
    model.count.data.add_(1)


def replaced(model):
    model.count = model.count + 1


def added(model):
    model.register_buffer(f"more_{len(model._buffers)}", torch.ones(1))


def mask_flipped(model):
    model.mask.logical_not_()


@pytest.mark.parametrize(
    "changes",
    [
        [none, none, in_place],
        [in_place, in_place],
        [by_data, by_data],
        [none, none, replaced],
        [replaced, replaced],
        [none, replaced, in_place],
        [none, added],
        [in_place, none, none, mask_flipped],
    ],
)
def test_buffers_are_put_back_whenever_and_however_a_step_writes_them(counting, changes):
    *before, last = changes
    model, survival = counting(*before)
    model.change = last
    wanted, held = {name: buffer.clone() for name, buffer in model.named_buffers()}, list(model.buffers())
    with pytest.raises(Smaller):
        survival.step(torch.ones(2, 4))
    assert list(dict(model.named_buffers())) == list(wanted)
    assert all(now is then for now, then in zip(model.buffers(), held, strict=True))
    assert all(torch.equal(buffer, wanted[name]) for name, buffer in model.named_buffers())
    assert survival.inexact == ""


def test_buffers_are_put_back_before_the_plan_closes(counting):
    """A technique that closes may give the model other buffers, made of those that it finds."""
    model, survival = counting(none, none)
    model.change = in_place
    found = []
    survival.session.build.close_callbacks.append(lambda: found.append(model.count.clone()))
    with pytest.raises(Smaller):
        survival.step(torch.ones(2, 4))
    survival.session.close()
    assert torch.equal(found[0], torch.arange(3.0))


def draws(model):
    random.random(), numpy.random.rand(), torch.rand(1)


@pytest.mark.parametrize("num_steps", [1, 30])
@pytest.mark.parametrize("before", [none, draws])
def test_random_streams_are_put_back(counting, before, num_steps):
    model, survival = counting(*[before] * num_steps)
    model.change, wanted = before, capture()
    with pytest.raises(Smaller):
        survival.step(torch.ones(2, 4))
    assert survival.inexact == ""
    random.random()  # while another plan is opened
    survival.resume(survival.session)
    now = capture()
    assert now["python"] == wanted["python"]
    assert numpy.array_equal(now["numpy"][1], wanted["numpy"][1])
    assert now["numpy"][2] == wanted["numpy"][2]
    assert torch.equal(now["torch"], wanted["torch"])


@pytest.mark.parametrize(("late", "sentence"), [(draws, "random stream began"), (by_data, "through `.data`")])
def test_what_cannot_be_put_back_is_said(counting, late, sentence):
    """Streams and buffers that no step had changed are noted seldom; then the run does not go on by guess."""
    model, survival = counting(*[none] * 30)
    model.change = late
    with pytest.raises(Smaller):
        survival.step(torch.ones(2, 4))
    assert sentence in survival.inexact


def test_a_run_ends_rather_than_take_a_step_again_inexactly(crowded, tmp_path, monkeypatch):
    monkeypatch.setattr(randomness, "FIRST_STEPS", 0)
    monkeypatch.setattr(randomness, "MOST_SHARE", 1e-9)
    monkeypatch.setenv("FAILS", "nothing")
    steps = []

    def loss(model, batch):
        steps.append(random.random() if len(steps) > 2 else 0)
        monkeypatch.setenv("FAILS", "forward" if len(steps) == 4 else "nothing")
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    job = dataclasses.replace(crowded.job, loss=loss)
    before = torch.backends.cuda.matmul.fp32_precision
    with pytest.raises(OutOfMemory, match=r"random stream began to move.*last checkpoint: --resume"):
        vivace.train(job, out=tmp_path / "run")
    assert torch.backends.cuda.matmul.fp32_precision == before, "its session is closed"
    assert not list((tmp_path / "run" / "checkpoints").iterdir()), "nor is what is inexact kept"


class Pictures(Dataset):
    def __init__(self):
        file = io.BytesIO()
        Image.new("L", (8, 8), 9).save(file, "jpeg")
        self.files = [file.getvalue()] * 32

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return torch.tensor([Image.open(io.BytesIO(self.files[index])).getpixel((4, 4)) / 9])


@pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:This process")
def test_a_smaller_plan_reads_by_new_workers(tmp_path):
    """Those that run already do not have what the plan brings into them."""
    steps = []

    def loss(model, batch):
        steps.append(len(batch))
        if len(steps) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model(batch).square().mean()

    job = vivace.Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(1, 1)),
        data=lambda: DataLoader(Pictures(), batch_size=4, num_workers=1, persistent_workers=True),
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    run = vivace.train(job, vivace.Plan.from_dict({"decoded_cache": {}}), out=tmp_path / "run")
    assert run.steps == 8
    assert {*run.plan} == {"decoded_cache", "micro_batches"}


@pytest.fixture
def ranks(start_scene, places, tmp_path, digest):
    """``(name, plan, job, scenes, **environment) -> (digest, answers)`` of a run on two ranks."""

    def start(name, plan, job="job", scenes=({}, {}), **environment):
        children = []
        answers = [tmp_path / f"{name}_{rank}.json" for rank in range(2)]
        for rank, place in enumerate(places()):
            scene = {
                "job": f"{CROWDED}:{job}",
                "arguments": {"out": str(tmp_path / name)},
                "plan": plan,
                "environment": {**place, **environment},
                "answer": str(answers[rank]),
                **scenes[rank],
            }
            children.append(start_scene(CROWDED.with_name("child.py"), SCENE=scene))
        for child in children:
            child.join(200)
            if child.exitcode is None:
                child.kill()
        found = [json.loads(answer.read_text()) for answer in answers]
        assert [child.exitcode for child in children] == [0, 0], found
        return digest(tmp_path / name / "model.pt"), found

    return start


DDP = "format = 1\n[techniques.ddp]\n"


@pytest.mark.fault(22)
def test_all_ranks_go_on_together_when_one_runs_out(ranks):
    wanted, _ = ranks("wanted", f"{DDP}[techniques.micro_batches]\n", FAILS="nothing")
    for fails in ("forward", "backward"):
        found, answers = ranks(fails, DDP, FAILS=fails, FAILING_RANK="1", MOST="2")
        assert found == wanted
        notices = [answer["notices"] for answer in answers]
        assert notices[0][0].endswith("from here on each batch of 4 runs in 2 pieces (micro_batches)")
        assert "another rank did" in notices[0][0]
        assert "CUDA out of memory" in notices[1][0]


def test_where_a_rank_may_not_cut_its_part_all_end_with_its_reason(launch_ranks, tmp_path):
    failing = {"FAILS": "backward", "FAILING_RANK": "1", "MOST": "2"}
    children = launch_ranks("contrastive", {"out": str(tmp_path / "run")}, file=CROWDED, environment=failing)
    assert [child.wait() for child in children] == [1, 1]
    for child in children:
        text = child.answer["error"]["message"]
        assert text.startswith("rank 1: the step ran out of memory (OutOfMemoryError: CUDA out of memory")
        assert "the loss is no mean over samples: it is" in text


@pytest.fixture
def torchrun(tmp_path):
    """``(*options, out, **environment) -> (exit code, output)`` of torchrun: `vivace train` on two ranks."""
    agents = []

    def start(*options, out, **environment):
        (tmp_path / "ddp.toml").write_text(DDP)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += [*options, "-m", "vivace", "train", f"{CROWDED}:job", "--plan", str(tmp_path / "ddp.toml")]
        shared = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        with (tmp_path / "output").open("w") as output:
            agents.append(
                subprocess.Popen(
                    [*command, "--out", str(out)], env=shared, stdout=output, stderr=subprocess.STDOUT
                )
            )
        try:
            code = agents[-1].wait(400)
        except subprocess.TimeoutExpired:
            code = "it hangs"
        return code, (tmp_path / "output").read_text()

    yield start
    for agent in agents:
        for pid in reversed(with_descendants(agent.pid)):
            os.kill(pid, signal.SIGKILL)
        agent.wait()


@pytest.fixture
def ranks_of(forked_torchrun, tmp_path):
    """``(out, job, more) -> (exit code, output)``: the same, forked; `more` are options of `train`."""
    (tmp_path / "ddp.toml").write_text(DDP)

    def start(*, out, job, more=()):
        words = ["train", job, "--plan", str(tmp_path / "ddp.toml"), *more, "--out", str(out)]
        code, output, errors = forked_torchrun(words)
        return code, output + errors

    return start


def with_descendants(pid):
    """The ids of a process that is not yet waited for and of all below it, it first."""
    found = [pid] if Path(f"/proc/{pid}/stat").exists() else []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += with_descendants(int(child))
    return found


@pytest.mark.fault(11, 22)
@pytest.mark.slow
def test_a_rank_that_is_killed_costs_a_restart_and_no_bit(ranks, torchrun, tmp_path, digest):
    """One rank runs out of memory, and later dies. The restarted ranks find addresses of the dead, a folder
    with a run, and a plan other than theirs.

    The ranks of a launch import parts of torch that keep the process group only after they have joined it.
    The rank that is left keeps the step that the dead one had begun to take, with that one's random streams.
    """
    memory = {"FAILS": "backward", "FAILING_RANK": "1", "MOST": "2", "FAILS_AFTER": "3"}
    wanted, _ = ranks("wanted", DDP, **memory)
    out = tmp_path / "run"
    code, output = torchrun("--max-restarts", "1", out=out, DIES_AFTER="5", **memory)
    assert code == 0, output
    assert json.loads((out / "run.json").read_text())["resumed_from_step"] == 5
    assert vivace.Plan.load(out).to_dict() == {"ddp": {}, "micro_batches": {}}
    assert digest(out / "model.pt") == wanted


@pytest.mark.fault(13)
@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_its_line_and_what_was_trained_is_kept(ranks_of, tmp_path):
    out, job = tmp_path / "run", f"{CROWDED.with_name('stuck.py')}:job"
    code, output = ranks_of(out=out, job=job, more=("--rank-timeout", "7s"))
    assert code == 1, output
    (told,) = [line for line in output.splitlines() if line.startswith("vivace: rank 1 (process")]
    assert int(re.search(r"has been at step 6 for (\d+)", told)[1]) >= 6
    assert "stands still at stuck.py:14 in loss; rank 0 waits for it: training stopped; step_5 in" in told
    assert "vivace: rank 1, which the others have given up, ends itself at stuck.py:14 in loss" in output
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step_5"]
    stacks = (out / "stacks.txt").read_text()
    assert stacks.index("rank 0, process") < stacks.index("rank 1, process") < stacks.index("stuck.py")
    assert "Fatal" not in output


@pytest.mark.slow
def test_what_a_rank_hangs_in_saving_another_one_saves(ranks_of, tmp_path):
    out, job = tmp_path / "run", f"{CROWDED.with_name('stuck_disk.py')}:job"
    code, output = ranks_of(out=out, job=job, more=("--rank-timeout", "7s", "--max-steps", "5"))
    assert code == 1, output
    (told,) = [line for line in output.splitlines() if line.startswith("vivace: rank 0 (process")]
    assert "has been at the checkpoint of step 5 for " in told
    assert "in hangs; rank 1 waits for it: training stopped; step_5 in" in told
    assert [path.name for path in (out / "checkpoints").iterdir() if ".tmp." not in path.name] == ["step_5"]


@pytest.mark.fault(13)
@pytest.mark.slow
def test_a_link_that_is_cut_between_two_hosts_is_told_on_both_and_what_was_trained_is_kept(
    start_scene, tmp_path
):
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("no network namespaces here")
    (tmp_path / "ddp.toml").write_text(DDP)
    words = ["train", f"{CROWDED.with_name('tiny.py')}:long", "--plan", str(tmp_path / "ddp.toml")]
    words += ["--out", str(tmp_path / "run"), "--rank-timeout", "6s"]
    scene = {"out": str(tmp_path / "run"), "words": words}
    hosts = start_scene(CROWDED.with_name("two_hosts.py"), SCENE=scene)
    hosts.join(400)
    if hosts.exitcode == 77:
        pytest.skip("no network namespaces here")
    outputs = [(tmp_path / f"run.{rank}").read_text() for rank in range(2)]
    assert hosts.exitcode == 1, outputs[0]
    near, far = (
        next((line for line in text.splitlines() if line.startswith("vivace: rank 1")), text)
        for text in outputs
    )
    (kept,) = (path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert "given no sign of life for" in near
    assert f"and is cut off; rank 0 waits for it: training stopped; {kept} in" in near
    assert "rank 1 cannot reach the launch any more: its launcher or the link to it is gone" in far


@pytest.mark.fault(12)
@pytest.mark.slow
def test_a_rank_that_raises_is_blamed_and_no_other(ranks_of, tmp_path):
    out, job = tmp_path / "run", f"{CROWDED.with_name('raising.py')}:job"
    code, output = ranks_of(out=out, job=job)
    assert code == 1, output
    first, second = (line for line in output.splitlines() if line.startswith("vivace: "))
    assert first.startswith("vivace: step 4 of the training failed: ValueError: the labels are from another")
    assert second.startswith(
        "vivace: rank 1 has ended: step 4 of the training failed: ValueError: the labels"
    )
    assert "step_3 in" in second
    assert "ValueError: the labels" in output[output.index("Root Cause") :]


@pytest.mark.fault(23)
def test_the_hosts_memory_runs_out_on_one_rank(ranks):
    """Fault 23: the process may not have more address space, and stays usable."""
    limits = ({}, {"address_space_mib": 160})
    found, answers = ranks("run", DDP, "hungry", limits)
    notices = [answer["notices"] for answer in answers]
    assert "can't allocate memory" in notices[1][0]
    assert "another rank did" in notices[0][0]
    num = int(notices[1][-1].partition(" pieces")[0].rpartition(" ")[2])
    assert len(notices[1]) == num.bit_length() - 1 <= 4
    wanted, _ = ranks("wanted", f"{DDP}[techniques.micro_batches]\nnum = {num}\n", "hungry")
    assert found == wanted


@pytest.mark.fault(23)
def test_a_host_with_too_little_memory_for_one_sample_is_an_answer(launch, tmp_path):
    child = launch("hungry", {"out": str(tmp_path / "run")}, CROWDED, address_space_mib=6)
    assert child.wait() == 1, child.answer
    assert child.answer["error"]["kind"] == "OutOfMemory"
    assert "what may fit is a plan with checkpoint" in child.answer["error"]["message"]


@pytest.mark.slow
def test_a_stream_shorter_than_it_says_is_trained_whole_and_told(ranks_of, tmp_path):
    """The rank that does not write ends first, and must not take the other one with it."""
    out, job = tmp_path / "run", f"{CROWDED.with_name('nominal.py')}:short"
    code, output = ranks_of(out=out, job=job)
    assert code == 1, output
    assert output.count("Epoch 2 ended 3 steps early: the data's length promises 12, and 9 came") == 1
    found = json.loads((out / "run.json").read_text())
    assert (found["steps"], found["missing_steps"]) == (18, 6)
    assert (out / "checkpoints" / "step_18").is_dir()
    assert (out / "handed_on").exists()


@pytest.mark.parametrize("technique", ["ddp", "fsdp"])
def test_a_stream_that_ends_in_a_batch_which_ranks_cannot_share_keeps_what_was_trained(
    launch_ranks, tmp_path, technique
):
    plan, job = f"format = 1\n[techniques.{technique}]\n", {"file": CROWDED.with_name("nominal.py")}
    children = launch_ranks("odd", {"out": str(tmp_path / "run")}, plan=plan, **job)
    assert [child.wait() for child in children] == [2, 2]
    for child in children:
        text = child.answer["error"]["message"]
        assert text.startswith("a batch of 3 samples cannot be shared by 2 ranks: ")
        assert f"; step_8 in '{tmp_path / 'run' / 'checkpoints'}' was kept: once mended, go on with" in text
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_8"]


@pytest.mark.slow
def test_streams_of_one_length_that_end_at_different_steps_keep_what_was_trained(launch_ranks, tmp_path):
    job = {"file": CROWDED.with_name("nominal.py")}
    children = launch_ranks("uneven", {"out": str(tmp_path / "run")}, **job)
    assert [child.wait() for child in children] == [1, 1]
    for child in children:
        text = child.answer["error"]["message"]
        assert text.startswith("rank 0 has come to the end of its data in epoch 1 after step 6, and rank 1 ")
        assert "give every rank data of one length: training stopped; step_6 in" in text
