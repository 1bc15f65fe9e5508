"""The recorder in a real loop: what it sees, what it leaves behind, and faults planted in the loop."""

import dataclasses
import gc
import itertools
import json
import multiprocessing
import os
import queue
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from vivace.inspection import inspect
from vivace.inspection.quiet import ForeignLoad
from vivace.profiling.answering import answer
from vivace.profiling.judge import judge
from vivace.profiling.record import (
    RECORD,
    TRACE,
    experiments,
    facts,
    fetches,
    guard,
    hooks,
    shadow,
    sites,
    waits,
)
from vivace.profiling.record.clock import Clock, Step
from vivace.profiling.record.late import LatePeak
from vivace.profiling.record.recorder import Recorder, _typical

PATCHED = (
    (torch.autograd, "backward"),
    (torch.optim.Optimizer, "zero_grad"),
    (DataLoader, "__iter__"),
    (_BaseDataLoaderIter, "__next__"),
    (torch.Tensor, "item"),
    (torch.Tensor, "__bool__"),
    (torch.autocast, "__enter__"),
    (torch.amp.GradScaler, "step"),
    (nn.utils, "clip_grad_norm_"),
    (torch, "compile"),
    (nn.Module, "to"),
)


class Rows(Dataset):
    """Ready rows, each after a pause."""

    def __init__(self, batches, pause=0.0):
        self.batches, self.pause = batches, pause

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        if self.pause:
            time.sleep(self.pause)
        return self.batches[index]


class Loop:
    """The loop of every tutorial; `after` runs in each step."""

    def __init__(self, batches, *, pause=0.0, model=None, after=None, autocast=None, num_workers=0):
        self.loader = DataLoader(Rows(batches, pause), batch_size=None, num_workers=num_workers)
        self.model = model or nn.Sequential(
            nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.after, self.autocast = after, autocast

    def __call__(self):
        for inputs, labels in self.loader:
            with torch.autocast(
                "cpu", dtype=self.autocast or torch.bfloat16, enabled=self.autocast is not None
            ):
                output = self.model(inputs)
                loss = functional.cross_entropy(output, labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if self.after is not None:
                self.after(loss, output, labels)


TRIES = 10  # in some of the few milliseconds of a record another process may have its turn on the core


def fail(error):
    raise error


def causes(document):
    return [verdict["cause"] for verdict in document["verdicts"]]


def recorded_as(wanted, recorded, epoch):
    """The document and the record of an epoch that shows these causes, in one of a few tries."""
    for _ in range(TRIES):
        document, record = recorded(epoch)
        if causes(document) == wanted:
            break
    assert causes(document) == wanted, document["verdicts"]
    return document, record


@pytest.mark.parametrize(("share", "disturbed"), [(0.4, True), (0.01, False)])
def test_what_other_processes_used_of_the_processor_while_it_timed_is_said(
    recorded, batches, monkeypatch, share, disturbed
):
    monkeypatch.setattr(ForeignLoad, "disturb", lambda self: setattr(self, "largest", share))
    document, record = recorded(Loop(batches))
    assert record["foreign_share"] == document["foreign_share"] == share
    assert document["disturbed"] is disturbed


def test_torchs_version_is_told_as_the_machine_tells_it(recorded, batches):
    document, _ = recorded(Loop(batches))
    assert document["machine"]["versions"]["torch"] == inspect().versions["torch"]


def test_a_healthy_loop_is_healthy_and_described(recorded, batches):
    loop = Loop(batches)
    before = [getattr(owner, name) for owner, name in PATCHED]
    document, record = recorded_as(["healthy"], recorded, loop)
    assert [getattr(owner, name) for owner, name in PATCHED] == before
    assert sum(document["shares"].values()) == pytest.approx(1)
    assert set(document["shares"]) == {
        "data",
        "place",
        "forward",
        "backward",
        "update",
        "communication",
        "idle",
    }
    weights = sum(p.numel() for p in loop.model.parameters())
    memory = document["memory"]
    assert memory["parameters"] == memory["gradients"] == memory["optimizer"] == 4 * weights
    # relu's two outputs, the three layers' inputs (two of them the same), and what the loss keeps
    assert 3 * 32 * 512 * 4 <= memory["activations"] + 32 * 512 * 4 <= 6 * 32 * 512 * 4
    assert memory["peak_bytes"] >= 3 * 4 * weights
    operations = 2 * 32 * (3 * (512 * 512 + 512 * 10) + 2 * 64 * 512)
    assert document["work"]["operators"]["matmul"]["flops"] == operations
    demand = document["work"]["demand"]  # of a sample, without the update
    assert sum(found["flops"] for found in demand["bins"]) * 32 == pytest.approx(operations)
    assert demand["num_tensors"] == len(list(loop.model.parameters()))
    assert document["bound_seconds"] > 0
    least = sum(row["bound_seconds"] or 0.0 for row in document["roofline"])
    if least <= document["step_seconds"]:
        share = document["bound_seconds"] / document["step_seconds"]
        assert document["share_of_limit"] == pytest.approx(share)
    else:  # the made-up ceilings are below this machine's
        assert document["share_of_limit"] is None
        assert "the share of the limit" in document["missing"][0]
    for known in (0.5, None):  # a limit that is slower than the step is none
        facts = dict(answer({**document, "share_of_limit": known}).facts)
        assert any(name.startswith("the limit") for name in facts) == (known is not None)
    names = [row["name"] for row in document["modules"]]
    assert {"Sequential.0", "Sequential.2", "Sequential.4"} <= set(names)
    middle = next(row for row in document["modules"] if row["name"] == "Sequential.2")
    assert middle["backward"] > 0 < middle["forward"]
    assert "bf16_autocast" in [row["technique"] for row in document["prospects"]]
    assert record["samples"] == 32
    assert document["work"]["steps_per_epoch"] == 16


@pytest.mark.usefixtures("brief_experiments")
def test_training_goes_the_way_it_would_have_gone(recorded, batches):
    def weights(run):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.ReLU(), nn.Linear(64, 10))
        loop = Loop(batches, model=model, autocast=torch.bfloat16)
        count = [0]
        loop.after = lambda *_: count.__setitem__(0, count[0] + 1)
        run(loop)
        return count[0] // len(batches), torch.cat([p.detach().flatten() for p in model.parameters()])

    epochs, profiled = weights(lambda loop: recorded(loop))
    _, alone = weights(lambda loop: [loop() for _ in range(epochs)])
    assert torch.equal(profiled, alone)


HEARD = []


class Held(nn.Module):
    """Changes its input in place, prints, notes, and runs a part that copies of it do not have, but share."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(64, 10), nn.BatchNorm1d(10)
        norm = self.norm
        self.last = lambda inputs: norm(inputs)

    def forward(self, inputs):
        HEARD.append(1)
        print("forward")
        return self.last(self.first(inputs.mul_(0.99)))


@pytest.mark.usefixtures("brief_experiments")
def test_what_a_copy_of_the_model_shares_with_it_is_left_as_it_was(recorded, monkeypatch, capsys):
    HEARD.clear()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})  # for an experiment

    def trained(run):
        torch.manual_seed(0)
        batch, labels, model, count = torch.randn(32, 64), torch.randint(10, (32,)), Held(), 0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step():
            nonlocal count
            functional.cross_entropy(model(batch), labels).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=count % 2 == 0)
            count += 1

        record = run(step)
        return record, count, {**model.state_dict(), "batch": batch}

    (_, record), count, profiled = trained(lambda step: recorded(step, most=5000))
    assert record["experiments"]
    assert len(HEARD) == capsys.readouterr().out.count("forward") == count
    _, _, alone = trained(lambda step: [step() for _ in range(count)])
    assert [name for name in alone if not torch.equal(alone[name], profiled[name])] == []


def test_threads_that_an_experiment_sets_are_not_the_persons(recorded, batches, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    _, record = recorded(Loop(batches))
    assert "threads" in record["experiments"]
    assert "threads" not in record["asked"]


def test_experiments_keep_a_script_waiting_for_no_longer_than_they_may(recorded, batches, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    document, record = recorded(Loop(batches))
    assert document["paused_seconds"] == record["paused_seconds"] > 0
    monkeypatch.setattr(experiments, "TOTAL_SECONDS", 0.0)
    _, record = recorded(Loop(batches))
    assert record["experiments"] == {}


@pytest.mark.usefixtures("brief_experiments")
def test_sparse_gradients_are_recorded_by_the_rows_that_they_have(recorded):
    table = nn.Embedding(20_000, 64, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())

    def epoch():
        for _ in range(10):
            optimizer.zero_grad()
            table(torch.arange(32).view(8, 4)).square().mean().backward()
            optimizer.step()

    document, record = recorded(epoch)
    assert record["gradient_bytes"] == 32 * (64 * 4 + 8)
    assert 0 < sum(row["bytes"] for row in record["work"].values()) < 4 * table.weight.numel()
    assert document["bound_seconds"] is not None


def test_a_fault_of_the_recording_is_not_told_as_the_end_of_the_run(tmp_path, batches, one_thread, judged):
    recorder = Recorder(tmp_path, timed_seconds=0.1)
    recorder.install()
    recorder._enter_traced = lambda: fail(RuntimeError("ours"))
    Loop(batches * 20)()
    recorder.finish()
    for reason in judged()["missing"]:
        assert "the run ended" not in reason
    assert judged()["missing"]


@pytest.mark.usefixtures("brief_experiments")
def test_no_model_is_copied_where_the_memory_does_not_hold_it(recorded, batches, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(experiments, "free_memory", lambda: 2**20)
    document, record = recorded(Loop(batches))
    assert record["experiments"] == {}
    assert "what settings bring: the memory does not hold the model a second time" in document["missing"]


def test_a_sleeping_dataset_is_named(recorded, batches):
    document, _ = recorded(Loop(batches, pause=0.01))
    assert causes(document)[0] == "input"
    first = document["verdicts"][0]
    assert "reading" in first["evidence"]
    assert "test_recorder.py" in first["evidence"]
    share = document["shares"]["data"]
    assert first["gain"]["low"] <= 1 / (1 - share) <= first["gain"]["high"]


@pytest.mark.usefixtures("brief_experiments")
def test_workers_own_time_is_seen(recorded, batches):
    loop = Loop(batches, pause=0.01, num_workers=1)
    _, record = recorded(loop)
    fetch = record["fetch"]
    assert fetch["worker_batches"] > 0
    assert fetch["worker_seconds"] / fetch["worker_batches"] >= 0.01


def test_what_somebody_holds_is_counted_once_it_is_given_out():
    before = facts.allocated_bytes()
    if before is None:
        pytest.skip("this C library does not say what it gave out")
    held = [torch.ones(2**20) for _ in range(8)]
    assert facts.allocated_bytes() - before >= 8 * 2**22
    del held
    assert facts.allocated_bytes() - before < 2**22


def test_a_worker_that_outlives_the_profile_stops_watching(tmp_path):
    worker = fetches._Worker(tmp_path, guard.Guard(fail))
    worker.fetched(0.5)
    assert json.loads(worker.path.read_text())["seconds"] == 0.5
    worker.path.unlink()
    (tmp_path / RECORD).write_text("{}")
    worker.fetched(0.5)
    assert not worker.watches
    assert not worker.path.exists()


def test_values_asked_in_a_loop_are_named_by_line(recorded, batches):
    def count(loss, output, labels):
        for row in range(len(labels)):
            if output[row, 0].item() > output[row, 1].item():
                labels[row].item()

    for _ in range(TRIES):
        document, record = recorded(Loop(batches, after=count))
        if causes(document)[0] == "sync":
            break
    assert causes(document)[0] == "sync", (record["waits"], record["step_seconds"])
    assert "test_recorder.py" in document["verdicts"][0]["evidence"]


@pytest.mark.usefixtures("brief_experiments")
def test_lines_that_take_turns_in_a_loop_share_its_seconds(recorded, batches, monkeypatch):
    ticks = itertools.count()  # each look at the clock takes ten microseconds, whoever else computes
    monkeypatch.setattr(waits, "time", SimpleNamespace(perf_counter=lambda: next(ticks) * 1e-5))

    def count(loss, output, labels):
        for row in range(len(labels)):
            if output[row, 0].item() > 0:
                labels[row].item()
            else:
                output[row, 1].item()

    _, record = recorded(Loop(batches, after=count))
    assert len(record["waits"]) > 1
    assert sum(row["span"] for row in record["waits"]) <= next(ticks) * 1e-5


@pytest.mark.usefixtures("brief_experiments")
def test_printing_a_tensor_asks_for_its_values(recorded, batches):
    _, record = recorded(Loop(batches, after=lambda loss, *_: [str(loss), f"{loss:.3f}"]))
    assert sum(row["count"] for row in record["waits"]) == 2 * record["watched_steps"]


@pytest.mark.usefixtures("brief_experiments")
def test_values_that_a_data_set_asks_for_are_its_fetching(recorded, batches):
    class Labelled(Dataset):
        def __len__(self):
            return 256

        def __getitem__(self, index):
            inputs, labels = batches[index // 32]
            return inputs[index % 32], int(labels[index % 32])

    loop = Loop(batches)
    loop.loader = DataLoader(Labelled(), batch_size=32)
    _, record = recorded(loop)
    assert record["waits"] == []


def test_kept_losses_are_named_by_their_list(recorded, batches):
    losses = []
    document, _ = recorded(Loop(batches, after=lambda loss, *_: losses.append(loss)))
    assert causes(document)[0] == "memory"
    assert "held by losses (test_recorder.py)" in document["verdicts"][0]["evidence"]


def test_a_chain_of_losses_is_named_by_the_object_that_holds_it(recorded, batches):
    loop = Loop(batches)

    def average(loss, *_):
        loop.average = loss if loop.average is None else 0.9 * loop.average + 0.1 * loss

    loop.average, loop.after = None, average
    document, _ = recorded(loop)
    assert causes(document)[0] == "memory"
    assert "held by self.average (test_recorder.py)" in document["verdicts"][0]["evidence"]


def test_a_slow_loop_is_idle(recorded, batches):
    document, _ = recorded(Loop(batches, after=lambda *_: time.sleep(0.01)))
    assert causes(document) == ["idle"]


def test_autocast_on_tiny_matrices_is_tried_and_found_wanting(recorded, batches):
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)], nn.Linear(64, 10))
    loop = Loop(batches, model=model, autocast=torch.bfloat16)
    document, _ = recorded_as(["precision_no_gain"], recorded, loop)
    assert document["experiments"]["autocast"]["ratios"]
    work = document["work"]
    assert work["precision"] == "bfloat16"
    moved = sum(found["bytes"] for found in work["demand"]["bins"] if found["kind"] == "matmul") * 32
    assert moved == pytest.approx(2 * work["operators"]["matmul"]["bytes"], rel=0.05)  # as in fp32


def test_double_precision_is_tried(recorded, batches):
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10)).double()
    doubled = [(inputs.double(), labels) for inputs, labels in batches]
    for _ in range(TRIES):
        document, _ = recorded(Loop(doubled, model=model))
        found = {verdict["cause"]: verdict["evidence"] for verdict in document["verdicts"]}
        if "no_effect" in found:
            break
    assert "float64" in found["no_effect"]


def test_clipping_scaled_gradients_is_misuse(recorded, batches):
    loop = Loop(batches)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def epoch():
        for inputs, labels in loop.loader:
            loop.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = functional.cross_entropy(loop.model(inputs), labels)
            scaler.scale(loss).backward()
            nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
            scaler.step(loop.optimizer)
            scaler.update()

    document, _ = recorded(epoch)
    assert causes(document)[0] == "amp_misuse"
    assert "test_recorder.py" in document["verdicts"][0]["evidence"]


def clip_by_hand(loop):
    norm = torch.stack([p.grad.norm() for p in loop.model.parameters()]).norm()
    for parameter in loop.model.parameters():
        parameter.grad.mul_(1 / norm)


def accumulate_by_hand(loop):
    for parameter in loop.model.parameters():
        parameter.grad.div_(4)


def average_by_hand(loop):
    for parameter in loop.model.parameters():
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= 2


def freeze_by_hand(loop):
    loop.model[0].weight.grad[:8] = 0


@pytest.mark.usefixtures("brief_experiments")
@pytest.mark.parametrize(
    ("change", "second_loss", "misused"),
    [
        (clip_by_hand, False, True),
        (accumulate_by_hand, False, False),
        (freeze_by_hand, False, False),
        (average_by_hand, False, False),
        (None, True, True),
        (None, False, False),
    ],
)
def test_what_is_done_to_scaled_gradients(recorded, batches, monkeypatch, change, second_loss, misused):
    number = itertools.count()  # what the other rank adds differs from step to step
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda sums: sums.mul_(2 + next(number) % 7 / 10))
    loop = Loop(batches)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def epoch():
        for inputs, labels in loop.loader:
            loop.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                output = loop.model(inputs)
            loss = functional.cross_entropy(output.float(), labels)
            (scaler.scale(loss) / 2).backward(retain_graph=second_loss)
            if second_loss:
                output.float().pow(2).mean().backward()
            if change is not None:
                change(loop)
            scaler.step(loop.optimizer)
            scaler.update()

    document, _ = recorded(epoch)
    assert ("amp_misuse" in causes(document)) == misused, document["verdicts"]


@pytest.mark.usefixtures("brief_experiments")
@pytest.mark.parametrize("fused", [False, True])
def test_steps_skipped_by_the_scaler_or_by_a_fused_optimizer_are_counted(recorded, batches, fused):
    loop = Loop(batches)
    loop.optimizer = torch.optim.AdamW(loop.model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**116, growth_interval=1)  # every second step

    def epoch():
        for inputs, labels in loop.loader:
            loop.optimizer.zero_grad()
            loss = functional.cross_entropy(loop.model(inputs), labels)
            scaler.scale(1e4 * (loss - loss.detach())).backward()
            scaler.step(loop.optimizer)
            scaler.update()

    document, record = recorded(epoch)
    assert abs(record["precision"]["skipped"] - record["steps"] / 2) <= 1
    (evidence,) = [row["evidence"] for row in document["verdicts"] if row["cause"] == "overflow"]
    assert "first that of Sequential.4.bias" in evidence


@pytest.mark.usefixtures("brief_experiments")
@pytest.mark.parametrize(
    ("every", "autocast_first", "width"), [(1, False, 8), (1, True, 8), (1, True, 4096), (16, True, 8)]
)
def test_autocast_of_what_has_no_gradients_is_not_the_trainings(
    recorded, batches, every, autocast_first, width
):
    """As of a teacher, in each step, or in validation."""
    loop, count = Loop(batches), itertools.count()
    other = nn.Sequential(nn.Linear(64, width), nn.Linear(width, 64), nn.Linear(64, width))
    contexts = [torch.no_grad, lambda: torch.autocast("cpu", torch.float16)]

    def epoch():
        for inputs, labels in loop.loader:
            if next(count) % every == 0:
                first, second = reversed(contexts) if autocast_first else contexts
                with first(), second():
                    other(inputs)
            loop.optimizer.zero_grad()
            functional.cross_entropy(loop.model(inputs), labels).backward()
            loop.optimizer.step()

    document, _ = recorded(epoch)
    assert not {"amp_misuse", "overflow", "precision_no_gain"} & set(causes(document)), document["verdicts"]


@pytest.mark.usefixtures("brief_experiments")
def test_where_a_gpu_has_no_tf32_its_flag_takes_no_limit_away(recorded, batches, tmp_path):
    _, record = recorded(Loop(batches))

    def bound(tf32, **ceilings):
        record["flags"]["tf32"] = tf32
        known = {"matmul_fp32": 1e9, "copy_device": 1e10, **ceilings}
        machine = dataclasses.replace(inspect(), ceilings=known)
        return judge(record, tmp_path / TRACE, machine, "test", None)["bound_seconds"]

    assert bound(["matmul", "convolution"]) == bound([]) is not None
    assert bound(["matmul"], matmul_tf32=1e12) < bound([], matmul_tf32=1e12)


@pytest.mark.parametrize("state", ["traced", "counted"])
def test_a_step_that_was_not_finished_is_not_counted(tmp_path, batches, one_thread, judged, state):
    class Over(Exception):
        pass

    def end(*_):
        if recorder._state == state:
            raise Over

    for _ in range(TRIES):
        recorder = Recorder(tmp_path, timed_seconds=0.1)
        loop = Loop(batches * 20, after=end)
        recorder.install()
        with pytest.raises(Over):
            loop()
        recorder.finish()
        document = judged()
        assert document["bound_seconds"] is None
        assert bool(document["memory"]["curve"]) == (state == "counted")
        if "until the run ended" in document["verdicts"][0]["evidence"]:
            break
    assert "until the run ended" in document["verdicts"][0]["evidence"]


def test_ending_workers_is_waiting_for_data():
    clock = Clock(lambda step: None)
    watched = hooks.LoopHooks(clock, guard.Guard(fail))
    watched.install()
    try:
        iterator = iter(DataLoader(Rows([1.0] * 8), batch_size=2, num_workers=1))
        next(iterator)
        clock.restart()
        del iterator
    finally:
        watched.restore()
    assert clock.step.interrupted
    assert clock.step.seconds["data"] > 0


def test_a_compiled_loop_is_left_alone(recorded, batches):
    loop = Loop(batches)
    loop.model = torch.compile(loop.model, backend="aot_eager")
    document, record = recorded_as(["healthy"], recorded, loop)
    assert record["dynamo"]["graphs"] == 1
    assert record["dynamo"]["new_graphs"] == 0
    assert record["silent_modules"]
    assert any("compiled" in reason for reason in document["missing"])


def test_a_compiled_model_that_nobody_calls_is_named(recorded, batches):
    loop = Loop(batches)

    def epoch():
        if not hasattr(loop, "asked"):
            loop.asked = torch.compile(loop.model) is not None
        loop()

    document, _ = recorded(epoch)
    (verdict,) = [v for v in document["verdicts"] if v["cause"] == "no_effect"]
    assert "torch.compile" in verdict["evidence"]


@pytest.mark.parametrize("with_loader", [True, False])
def test_weights_updated_by_hand_are_steps_too(recorded, batches, with_loader, monkeypatch):
    model = Loop(batches).model
    loader = DataLoader(batches, batch_size=None) if with_loader else batches

    # this process may hold optimizers of other tests
    monkeypatch.setattr(hooks, "weights_without_optimizer", lambda: list(model.parameters()))

    def epoch():
        for inputs, labels in loader:
            model.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            with torch.no_grad():
                for weight in model.parameters():
                    weight -= 0.01 * weight.grad

    backward = torch.Tensor.backward
    document, record = recorded_as(["healthy"], recorded, epoch)
    assert torch.Tensor.backward is backward
    assert min(document["shares"][phase] for phase in ("forward", "backward", "update")) > 0
    assert record["samples"] == 32
    weights = 4 * sum(p.numel() for p in model.parameters())
    assert document["memory"]["parameters"] == document["memory"]["gradients"] == weights
    operations = 2 * 32 * (3 * (512 * 512 + 512 * 10) + 2 * 64 * 512)
    assert document["work"]["operators"]["matmul"]["flops"] == operations


def test_where_an_optimizer_lives_nothing_is_updated_by_hand():
    weight = nn.Parameter(torch.ones(2))
    weight.sum().backward()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    assert hooks.weights_without_optimizer() == []
    assert optimizer.param_groups


@pytest.mark.usefixtures("brief_experiments")
def test_many_passes_of_an_optimizer_are_one_step(recorded, batches):
    class Accumulating(Loop):
        """The update comes after sixteen batches, as the Trainer of transformers does it."""

        def __call__(self):
            for inputs, labels in DataLoader(batches, batch_size=None):
                (functional.cross_entropy(self.model(inputs), labels) / len(batches)).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()

    once, _ = recorded(Loop(batches))
    document, record = recorded(Accumulating(batches))
    assert document["memory"]["activations"] == once["memory"]["activations"]
    assert (record["backwards"], record["updates"], record["samples"]) == (16, 1, 16 * 32)


def test_validation_with_gradients_that_peaks_is_named(recorded, batches, monkeypatch):
    loop, count = Loop(batches), [0]
    large = torch.randn(2048, 64)
    peaks = [2**30]  # this process has seen higher ones
    monkeypatch.setattr(facts, "peak_bytes", lambda: peaks[0])

    def validate(*_):
        count[0] += 1
        if count[0] % 8 == 0:
            loop.model.eval()
            for (inputs,) in DataLoader([(large,)], batch_size=None):
                loop.model(inputs)
                peaks[0] = 2**31
            loop.model.train()

    loop.after = validate
    document, _ = recorded(loop)
    assert causes(document)[0] == "memory", document["verdicts"]
    assert "validation (test_recorder.py:" in document["verdicts"][0]["evidence"]


def test_what_a_later_validation_adds_to_the_peak_is_noted(tmp_path, batches, monkeypatch):
    peaks = [2**30]
    monkeypatch.setattr(facts, "peak_bytes", lambda: peaks[0])
    recorder = SimpleNamespace(folder=tmp_path, done=False)
    evaluate, backward = nn.Module.eval, torch.autograd.backward
    late, loop = LatePeak(recorder), Loop(batches)
    late.install()

    def validation_takes(size):
        loop.model.eval()
        peaks[0] += size

    validation_takes(2**20)  # the recorder itself sees this one
    recorder.done = True
    (tmp_path / RECORD).write_text("{}")
    for _ in range(2):
        validation_takes(2**21)
        loop()
        peaks[0] += 2**22  # in training
    assert torch.autograd.backward is backward
    with torch.no_grad():
        validation_takes(2**23)  # the script ends with it
    late.finish()
    assert nn.Module.eval is evaluate
    expected = {"peak": peaks[0], "rise": 2 * 2**21 + 2**23, "gradients": True}
    found = json.loads((tmp_path / RECORD).read_text())["late"]
    assert "test_recorder.py" in found.pop("at")
    assert found == expected


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("around", [True, False])
def test_a_later_validation_without_gradients_is_seen_to_be_so(
    tmp_path, batches, monkeypatch, context, around
):
    peaks = [2**30]
    monkeypatch.setattr(facts, "peak_bytes", lambda: peaks[0])
    enter = context.__enter__
    late, loop = LatePeak(SimpleNamespace(folder=tmp_path, done=True)), Loop(batches)
    late.install()
    (tmp_path / RECORD).write_text("{}")
    for _ in range(2):
        if around:
            with context():
                loop.model.eval()
        else:
            loop.model.eval()
            with context():
                loop.model(batches[0][0])
        peaks[0] += 2**25
        loop()
    assert context.__enter__ is enter
    late.finish()
    found = json.loads((tmp_path / RECORD).read_text())["late"]
    assert found["rise"] == 2**26
    assert not found["gradients"]


def test_many_short_steps_are_enough_before_the_time_is_over(tmp_path, batches, one_thread):
    recorder = Recorder(tmp_path, timed_seconds=60.0)
    recorder.install()
    loop = Loop(batches)
    loop()
    recorder._entered -= 20.0  # as if so many seconds had passed
    for _ in range(8):
        loop()
    recorder.finish()
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["steps"] == 100
    assert record["state"] == "finished"


def test_graphs_kept_for_nothing_are_named_by_line(recorded, batches):
    layers = [nn.Sigmoid() for _ in range(30)]
    loop = Loop(batches, model=nn.Sequential(nn.Linear(64, 32), *layers, nn.Linear(32, 10)))

    def epoch():
        for inputs, labels in DataLoader(batches, batch_size=None):
            loop.optimizer.zero_grad()
            loss = functional.cross_entropy(loop.model(inputs), labels)
            loss.backward(retain_graph=True)
            loop.optimizer.step()

    document, _ = recorded(epoch)
    assert causes(document)[0] == "memory"  # beside other processes waiting for data may count, too
    assert document["verdicts"][0]["evidence"].startswith("test_recorder.py:")


def test_a_loop_that_ends_early_keeps_what_it_has(tmp_path, batches, one_thread):
    recorder = Recorder(tmp_path, timed_seconds=60)
    recorder.install()
    Loop(batches)()
    recorder.finish()
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["state"] == "timed"
    assert record["steps"] > 5


def test_overflow_and_tiny_gradients_are_named_by_parameter():
    from vivace.profiling.record.hooks import LoopHooks
    from vivace.profiling.record.mixed import PrecisionWatch

    model = nn.Sequential(
        nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter, value in zip(model.parameters(), (float("inf"), float("inf"), 1e-6), strict=True):
        parameter.grad = torch.full_like(parameter, value)
    watch = PrecisionWatch(LoopHooks(Clock(lambda step: None), guard.Guard(fail)), guard.Guard(fail))
    watch.examine = True
    watch._before_update(optimizer)
    watch._find_overflow(optimizer)
    found = watch.named({"Net": model})
    assert found == {
        "not_finite": "2 of 3 gradients, first that of Net.1.weight",
        "tiny_layer": "Net.2.weight",
    }
    assert watch.tiny_share() == 4 / 12


def test_schedulers_that_step_together_count_once_and_those_that_follow_each_other_add_up():
    """Else a loop that rightly leaves out the steps that the scaler skips is blamed, or a wrong one not."""
    from vivace.profiling.record.hooks import LoopHooks
    from vivace.profiling.record.mixed import PrecisionWatch

    optimizers = [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2)]
    rates, scaler = torch.optim.lr_scheduler, torch.amp.GradScaler("cpu")
    together = rates.ChainedScheduler(
        [rates.ConstantLR(optimizers[0]), rates.ExponentialLR(optimizers[0], 0.9)]
    )
    followed = [rates.ConstantLR(optimizers[1]), rates.ExponentialLR(optimizers[1], 0.9)]
    schedulers = [together, rates.SequentialLR(optimizers[1], followed, milestones=[4])]
    watch = PrecisionWatch(LoopHooks(Clock(lambda step: None), guard.Guard(fail)), guard.Guard(fail))
    watch.install()
    try:
        watch.begin()
        for _ in range(9):
            for optimizer in optimizers:
                scaler.scale(optimizer.param_groups[0]["params"][0].sum()).backward()
                scaler.step(optimizer)
            scaler.update()
            for scheduler in schedulers:
                scheduler.step()
    finally:
        watch.restore()
    found = watch.result(9)
    assert found["scheduled"] == found["scaler_steps"] == 2 * 9


@pytest.mark.usefixtures("brief_experiments")
def test_a_loader_that_another_thread_goes_through_is_none_of_the_loops_fetching(recorded, batches):
    loop = Loop(batches)

    def ahead(ready):
        for batch in DataLoader(Rows(batches, 0.001), batch_size=None):
            ready.put(batch)
        ready.put(None)

    def epoch():
        ready = queue.Queue(2)
        thread = threading.Thread(target=ahead, args=(ready,))
        thread.start()
        while (batch := ready.get()) is not None:
            loop.optimizer.zero_grad()
            functional.cross_entropy(loop.model(batch[0]), batch[1]).backward()
            loop.optimizer.step()
        thread.join()

    document, record = recorded(epoch)
    assert (record["updates"], record["backwards"], record["fetches"]) == (1, 1, 0)
    assert document["loader"] is None
    assert document["shares"]["data"] == 0


@pytest.mark.usefixtures("brief_experiments")
def test_a_thread_that_trains_is_followed(recorded, batches):
    loop = Loop(batches)

    def epoch():
        thread = threading.Thread(target=loop)
        thread.start()
        thread.join()

    _, record = recorded(epoch)
    assert (record["updates"], record["fetches"], record["samples"]) == (1, 1, 32)


@pytest.mark.usefixtures("brief_experiments")
def test_nothing_is_traced_on_a_thread_that_may_end_within_a_step(recorded, batches):
    """torch crashed where it did: here each step is a thread's last."""
    loop = Loop(batches[:1])

    def epoch():
        thread = threading.Thread(target=loop)
        thread.start()
        thread.join()

    missing = recorded(epoch)[0]["missing"]
    assert sum("it trains on a thread" in reason for reason in missing) == 1, missing
    assert not any("the run ended" in reason for reason in missing)


class Adapted(nn.Module):
    """A large body that is frozen, with statistics and a small head that trains."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 1024), nn.BatchNorm1d(1024), nn.Linear(1024, 64))
        self.body.requires_grad_(False)
        self.first, self.head = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, inputs):
        return self.head(self.body(self.first(inputs)))


@pytest.mark.usefixtures("brief_experiments")
def test_frozen_weights_are_held_and_are_no_activations(recorded, batches):
    loop = Loop(batches, model=Adapted())
    trained = [p for p in loop.model.parameters() if p.requires_grad]
    loop.optimizer = torch.optim.SGD(trained, lr=0.01)
    document, _ = recorded(loop)
    memory = document["memory"]
    whole = sum(t.nbytes for t in (*loop.model.parameters(), *loop.model.buffers()))
    assert memory["parameters"] == whole
    assert memory["gradients"] == sum(p.nbytes for p in trained)
    assert memory["held_bytes"] >= whole
    assert memory["peak_bytes"] > whole
    assert memory["activations"] < 8 * 32 * 1024 * 4
    assert document["work"]["num_parameters"] == sum(p.numel() for p in trained)


@pytest.mark.usefixtures("brief_experiments")
def test_gradients_of_several_updates_in_one_step_are_there_once(recorded, batches):
    loop = Loop(batches)

    def epoch():
        for inputs, labels in loop.loader:
            for _ in range(3):
                loop.optimizer.zero_grad()
                functional.cross_entropy(loop.model(inputs), labels).backward()
                loop.optimizer.step()

    document, record = recorded(epoch)
    assert record["updates"] == 3
    assert document["memory"]["gradients"] == document["memory"]["parameters"]


@pytest.mark.usefixtures("brief_experiments")
def test_two_models_of_one_class_have_names_of_their_own(recorded, batches):
    makes, judges = (nn.Sequential(nn.Linear(64, 64), nn.Linear(64, n)) for n in (64, 10))
    weights = [*makes.parameters(), *judges.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.01)

    def epoch():
        for inputs, labels in DataLoader(batches, batch_size=None):
            optimizer.zero_grad()
            nn.CrossEntropyLoss()(judges(makes(inputs)), labels).backward()
            optimizer.step()

    document, _ = recorded(epoch)
    names = {row["name"] for row in document["modules"]}
    assert {"Sequential.0", "Sequential.1", "Sequential 2.0", "Sequential 2.1"} <= names
    assert "CrossEntropyLoss 2" not in names


@pytest.mark.usefixtures("brief_experiments")
def test_of_data_that_are_cut_into_batches_only_the_batch_is_kept(recorded, batches):
    inputs, labels = torch.randn(2**15, 64), torch.randint(10, (2**15,))
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def epoch():
        for start in range(0, 512, 32):
            optimizer.zero_grad()
            output = model(inputs[start : start + 32])
            functional.cross_entropy(output, labels[start : start + 32]).backward()
            optimizer.step()

    document, _ = recorded(epoch)
    assert document["memory"]["activations"] < 2 * 32 * 64 * 4


@pytest.mark.usefixtures("brief_experiments")
def test_what_a_script_lets_go_of_is_gone_after_its_profile(tmp_path, batches, one_thread):
    recorder = Recorder(tmp_path, timed_seconds=0.1)
    recorder.install()

    def trained():
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        loop = Loop(batches, after=lambda loss, *_: scaler.scale(loss))
        while not recorder.done:
            loop()
        return [weakref.ref(part) for part in (loop.model, loop.optimizer, loop.loader, loop.loader.dataset)]

    parts = trained()
    gc.collect()
    assert [part() for part in parts] == [None] * 4
    recorder.finish()


def test_losses_that_are_not_finite_are_counted_by_steps(recorded, batches):
    loop = Loop(batches)

    def epoch():
        for inputs, labels in loop.loader:
            loop.optimizer.zero_grad()
            for _ in range(3):
                (functional.cross_entropy(loop.model(inputs), labels) * float("inf")).backward()
            loop.optimizer.step()

    document, record = recorded(epoch)
    assert record["precision"]["loss_not_finite"] == record["watched_steps"] == 5
    assert "in 5 of the watched steps" in document["verdicts"][0]["evidence"]


@pytest.mark.usefixtures("brief_experiments")
def test_losses_that_can_be_gone_through_once_are_left_to_the_script(recorded, batches):
    loop = Loop(batches)

    def epoch():
        for inputs, labels in loop.loader:
            loop.optimizer.zero_grad()
            loss = functional.cross_entropy(loop.model(inputs), labels)
            torch.autograd.backward(part for part in [loss, loss.square()])
            assert loop.model[0].weight.grad is not None
            loop.optimizer.step()

    recorded(epoch)


@pytest.mark.usefixtures("brief_experiments")
@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.complex128, "complex128"), (torch.float16, "float16")]
)
def test_the_precision_is_that_of_the_weights(recorded, dtype, precision):
    weights = [nn.Parameter((torch.randn(64, 64) / 8).to(dtype)) for _ in range(2)]
    optimizer = torch.optim.SGD(weights, lr=1e-4)

    def epoch():
        for _ in range(10):
            optimizer.zero_grad()
            (torch.randn(32, 64).to(dtype) @ weights[0] @ weights[1]).abs().float().mean().backward()
            optimizer.step()

    document, _ = recorded(epoch)
    assert document["work"]["precision"] == precision
    if dtype.is_complex:
        assert "the limit: no ceiling is measured for complex128" in document["missing"]


@pytest.mark.usefixtures("brief_experiments")
@pytest.mark.parametrize("swapped", [False, True])
def test_pairs_of_batches_from_two_loaders_are_one_batch_each(recorded, batches, swapped):
    """And the shorter of the two ends the pass."""
    loaders = [DataLoader(batches, batch_size=None), DataLoader(batches * 2, batch_size=None)]
    first, second = reversed(loaders) if swapped else loaders
    loop = Loop(batches)

    def epoch():
        for (inputs, labels), (others, _) in zip(first, second, strict=False):
            loop.optimizer.zero_grad()
            functional.cross_entropy(loop.model(inputs + others), labels).backward()
            loop.optimizer.step()

    document, record = recorded(epoch)
    assert (record["fetches"], record["sources"]) == (2, 2)
    assert document["work"]["steps_per_epoch"] == len(batches)


def test_a_folder_called_torch_holds_a_persons_lines(tmp_path):
    script = tmp_path / "torch" / "train.py"
    script.parent.mkdir()
    script.write_text("def clip():\n    return calling()\n")
    space = {"calling": lambda: sites.calling_site()}
    exec(compile(script.read_text(), str(script), "exec"), space)
    assert space["clip"]() == f"{script}:2"


def test_a_spawned_worker_is_known_as_one(tmp_path, monkeypatch):
    """It has imported torch anew, and with it a recorder of its own."""
    sampler = fetches.FetchSampler(Clock(lambda step: None), tmp_path, guard.Guard(fail))
    monkeypatch.setattr(fetches, "get_worker_info", lambda: SimpleNamespace(id=0))
    fetch = sampler._fetch(lambda fetcher, indices: indices)
    assert fetch(None, [1]) == [1]
    sampler._worker.watches = False
    assert sampler.result()["worker_batches"] == 1


def test_a_process_of_a_script_without_a_step_leaves_no_record(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path)
    recorder.install()
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    recorder.finish()
    assert not (tmp_path / RECORD).exists()


def test_ranks_that_a_script_starts_itself_record_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.delenv("RANK", raising=False)
    recorder = Recorder(tmp_path)
    recorder.install()
    for _ in range(2):
        torch.distributed.init_process_group("gloo")
    assert recorder.folder == tmp_path / "rank-3"
    recorder.finish()


@pytest.mark.parametrize("late", [0, 2])
def test_a_comparison_waits_no_longer_where_the_other_way_is_much_slower(late):
    runs = [0, 0]

    def slow():
        runs[1] += 1
        if runs[1] > late:
            time.sleep(0.02)

    def fast():
        runs[0] += 1

    shadow.compare(fast, slow, shadow.Allowance(0.5))
    assert runs[1] < 200


def test_batches_are_told_apart_by_all_of_their_tensors(monkeypatch):
    monkeypatch.setattr(facts.distributed, "is_initialized", lambda: True)
    for name in ("get_rank", "get_world_size", "get_backend"):
        monkeypatch.setattr(facts.distributed, name, lambda: 2)
    watched = hooks.LoopHooks(Clock(lambda step: None), guard.Guard(fail))

    def told(words):
        watched.batch = {"mask": torch.ones(4, 8), "words": torch.tensor(words)}
        return facts._ranks(watched)["batch_sum"]

    assert told([1, 2]) == told([1, 2]) != told([3, 4])


def test_a_view_that_nobody_can_use_any_more_is_passed_over():
    weight = nn.Parameter(torch.ones(2, 2))
    base = weight * 2
    views = base.unbind(0)
    base.mul_(2.0)
    with pytest.raises(RuntimeError):
        _ = views[0].grad_fn
    assert facts.live_graph_tensors()[0] >= 1


def test_an_optimizer_whose_step_is_compiled_is_left_to_the_compiler(tmp_path, batches, one_thread):
    loop = Loop(batches)
    recorder = Recorder(tmp_path, timed_seconds=0.1)
    recorder.install()
    update = torch.compile(loop.optimizer.step, backend="eager")
    for inputs, labels in batches:
        loop.optimizer.zero_grad()
        functional.cross_entropy(loop.model(inputs), labels).backward()
        update()
    graphs = facts.dynamo()
    recorder.finish()
    assert [row["place"] for row in graphs["compilations"] if "vivace" in row["place"]] == []
    record = json.loads((tmp_path / RECORD).read_text())
    assert (record["steps"], record["unseen_updates"]) == (0, True)


class Unready:
    """As settings that nobody has configured: whatever they are asked raises."""

    def __getattribute__(self, name):
        raise RuntimeError("not configured")


class Lazy(dict):
    """Its values would be loaded now."""

    def values(self):
        raise RuntimeError("not to be loaded")


class Unbuilt(nn.Module):
    def __init__(self):
        pass


class Unmeasured(Rows):
    def __len__(self):
        raise RuntimeError("the file is not open yet")


@pytest.mark.usefixtures("brief_experiments")
def test_what_cannot_be_asked_costs_nothing(recorded, batches):
    loop = Loop(batches)
    loop.loader = DataLoader(Unmeasured(batches), batch_size=None, sampler=range(len(batches)))
    gone = weakref.proxy(Unbuilt())
    things = [Unready(), gone, Lazy(loss=1), SimpleNamespace(gone=gone), Unbuilt()]

    def epoch():
        unready, gone, lazy, holder, unbuilt = things  # noqa: RUF059
        loop()

    document, record = recorded(epoch)
    assert record["live"]["steps"] == record["steps"]
    assert document["loader"]["dataset_length"] is None
    assert document["work"]["steps_per_epoch"] == len(batches)


@pytest.mark.usefixtures("brief_experiments")
def test_passes_of_two_steps_are_told_by_the_batch_that_holds_most_samples(recorded, batches):
    inputs, labels = batches[0]
    document, record = recorded(Loop([(inputs, labels), (inputs[:1], labels[:1])]))
    assert document["work"]["batch_size"] == 32
    assert document["work"]["steps_per_epoch"] == 2
    operations = 2 * 32 * (3 * (512 * 512 + 512 * 10) + 2 * 64 * 512)
    assert document["work"]["operators"]["matmul"]["flops"] == operations
    assert 14 < record["samples_in_all"] < 20
    whole = record["samples_in_all"] * record["steps"] / sum(record["walls"])
    assert document["samples_per_second_in_all"] == pytest.approx(whole)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("last", [1, 16, 32])
@pytest.mark.parametrize("starting", [0.0, 50.0])
def test_samples_a_second_of_typical_steps_are_those_of_all(num_steps, last, starting):
    """Where every sample takes a second, whatever the length of a pass, and however long workers start."""
    steps = []
    for _ in range(4):
        for number in range(num_steps):
            samples = last if number == num_steps - 1 else 32
            step = Step(samples=samples, interrupted=number == 0)
            step.starting_seconds = starting if number == 0 else 0.0
            step.seconds.update(data=step.starting_seconds, forward=float(samples))
            step.wall_seconds = sum(step.seconds.values())
            steps.append(step)
    found = _typical(steps, starting > 0)
    assert sum(s.samples for s in found) == pytest.approx(sum(s.wall_seconds for s in found))
    if num_steps > 1:
        assert {s.samples for s in found} == {32}


@pytest.mark.usefixtures("brief_experiments")
def test_a_step_with_a_validation_in_it_is_not_the_one_that_is_counted(tmp_path, batches, one_thread, judged):
    recorder = Recorder(tmp_path, timed_seconds=0.1)

    def validate(*_):
        if (recorder._state, recorder._in_state) == ("traced", 2):
            loop.model.eval()
            with torch.no_grad():
                for inputs, _ in DataLoader(batches, batch_size=None):
                    loop.model(inputs)
            loop.model.train()

    loop = Loop(batches * 20, after=validate)
    recorder.install()
    loop()
    recorder.finish()
    operations = 2 * 32 * (3 * (512 * 512 + 512 * 10) + 2 * 64 * 512)
    assert judged()["work"]["operators"]["matmul"]["flops"] == operations


@pytest.mark.usefixtures("brief_experiments")
def test_gradients_that_a_loop_asks_for_are_no_update(recorded, batches):
    loop = Loop(batches)
    weights = list(loop.model.parameters())

    def epoch():
        for inputs, labels in batches:
            loss = functional.cross_entropy(loop.model(inputs), labels)
            for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                weight.grad = gradient
            loop.optimizer.step()

    document, _ = recorded(epoch)
    assert document["shares"]["forward"] > 0 == document["shares"]["backward"]
    assert any("forward and backward apart" in reason for reason in document["missing"])


@pytest.mark.usefixtures("brief_experiments")
@pytest.mark.parametrize("evaluates", [True, False])
def test_the_loader_is_the_one_whose_batches_are_trained_on(recorded, batches, evaluates):
    """Also where a validation begins later, with gradients on when its batches come."""
    loop, count = Loop(batches), [0]
    held_out = DataLoader(batches[:3], batch_size=None, num_workers=0)

    def validate(*_):
        count[0] += 1
        if count[0] % 16 == 1:
            if evaluates:
                loop.model.eval()
            for inputs, _ in held_out:
                with torch.no_grad():
                    loop.model(inputs)
            loop.model.train()

    loop.after = validate
    document, _ = recorded(loop)
    assert document["loader"]["batches"] == document["work"]["steps_per_epoch"] == len(batches)


@pytest.mark.usefixtures("brief_experiments")
def test_what_a_data_set_computes_is_not_the_models_work(recorded, batches):
    class Turned(Rows):
        def __getitem__(self, index):
            inputs, labels = self.batches[index]
            return inputs @ turn, labels

    turn, loop = torch.eye(64), Loop(batches)
    loop.loader = DataLoader(Turned(batches), batch_size=None)
    document, _ = recorded(loop)
    operations = 2 * 32 * (3 * (512 * 512 + 512 * 10) + 2 * 64 * 512)
    assert document["work"]["operators"]["matmul"]["flops"] == operations


class ByClosure(Loop):
    """The same loop, with the forward and the backward pass in a closure that the optimizer calls."""

    def __call__(self):
        for inputs, labels in self.loader:

            def closure(inputs=inputs, labels=labels):
                self.optimizer.zero_grad()
                loss = functional.cross_entropy(self.model(inputs), labels)
                loss.backward()
                return loss

            self.optimizer.step(closure)


@pytest.mark.usefixtures("brief_experiments")
def test_what_an_optimizers_closure_does_is_the_models_work(recorded, batches):
    document, _ = recorded(ByClosure(batches))
    operations = 2 * 32 * (3 * (512 * 512 + 512 * 10) + 2 * 64 * 512)
    assert sum(found["flops"] for found in document["work"]["demand"]["bins"]) * 32 == operations


@dataclasses.dataclass
class Out:
    logits: torch.Tensor


class Opaque:
    """None of the containers that are looked through."""

    def __init__(self, logits):
        self.logits = logits


class Returning(nn.Linear):
    def __init__(self, kind):
        super().__init__(64, 10)
        self.kind = kind

    def forward(self, inputs):
        return self.kind(super().forward(inputs))


@pytest.mark.usefixtures("brief_experiments")
@pytest.mark.parametrize("kind", [Out, Opaque])
def test_experiments_are_of_forward_and_backward_or_left_out(recorded, kind):
    model = Returning(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def epoch():
        for _ in range(10):
            optimizer.zero_grad()
            functional.cross_entropy(model(torch.randn(8, 64)).logits, torch.zeros(8).long()).backward()
            optimizer.step()

    document, record = recorded(epoch)
    untried = "what settings bring: nothing that the model returns has gradients"
    assert (untried in document["missing"]) == (kind is Opaque)
    assert ("double_batch" in record["experiments"]) == (kind is Out)


@pytest.mark.usefixtures("brief_experiments")
def test_batches_in_dataclasses_are_counted(recorded):
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader([Out(torch.randn(8, 64)) for _ in range(16)], batch_size=None)

    def epoch():
        for batch in loader:
            optimizer.zero_grad()
            model(batch.logits).square().mean().backward()
            optimizer.step()

    _, record = recorded(epoch)
    assert record["batch_bytes"] == 4 * 8 * 64
    assert record["samples"] == 8


class OverTime(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.RNNCell(4, 8), nn.Linear(8, 2)

    def forward(self, inputs):  # (time, batch, 4)
        state = inputs.new_zeros(inputs.shape[1], 8)
        for at in inputs:
            state = self.cell(at, state)
        return self.out(state)


@pytest.mark.usefixtures("brief_experiments")
def test_where_the_first_dimension_is_time_samples_are_those_that_come_out(recorded):
    model = OverTime()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def epoch():
        for _ in range(10):
            optimizer.zero_grad()
            functional.cross_entropy(model(torch.randn(12, 3, 4)), torch.zeros(3).long()).backward()
            optimizer.step()

    document, _ = recorded(epoch)
    assert document["work"]["batch_size"] == 3
