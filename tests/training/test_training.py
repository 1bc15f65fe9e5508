import dataclasses
import itertools
import json
import os
import runpy
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.run import main as torchrun

import vivace
from vivace.errors import CheckpointError, Diverged, FolderError, InputError, JobError, Refused
from vivace.job import load
from vivace.ledger import Ledger
from vivace.measuring.worker import Worker
from vivace.training.checkpoints import Checkpoints, Position
from vivace.training.ranks import Ranks
from vivace.training.resuming import load_streams
from vivace.training.stopping import StopRequest, ends_like_ctrl_c, tells_first
from vivace.training.training import train

TINY = Path(__file__).parent / "scenes" / "tiny.py"
EPOCH, STEPS = 5, 15


def checkpoints(out):
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def edit(file, before, after):
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


@pytest.fixture
def searched(tmp_path):
    """A job's file, and what a search for its plan left: reference, the plan's file, and what is known."""
    for file in (tmp_path / "tiny.py", tmp_path / "elsewhere" / "tiny.py"):
        file.parent.mkdir(exist_ok=True)
        shutil.copy(TINY, file)
    plan = vivace.Plan.loads("format = 1\n[techniques.micro_batches]\n")
    (tmp_path / "tune").mkdir()
    plan.save(tmp_path / "tune" / "plan.toml")
    reference, machine = str(tmp_path / "tiny.py"), vivace.inspect()
    facts = Worker(load(reference), machine.to_dict()).check()
    ledger = Ledger(tmp_path / "tune" / "ledger.jsonl")
    ledger.append("run", {"job": {"name": reference, **facts}, "machine": machine.to_dict()})
    known = {"speedup": {"estimate": 2.0, "low": 1.9, "high": 2.1}, "verdict": {"kept": True, "checks": []}}
    ledger.append("result", {"plan": plan.to_dict(), **known})
    return reference, tmp_path / "tune" / "plan.toml", known


class TestFaultsOfTheJob:
    @pytest.mark.parametrize(
        ("name", "call", "kept"), [("metric", 2, 2 * EPOCH), ("loss", 9, 8), ("loss", 1, None)]
    )
    def test_the_steps_before_one_are_kept(self, tmp_path, digest, name, call, kept):
        """What the failing step drew and changed is put back: its buffers, and the random numbers."""
        tiny = runpy.run_path(str(TINY))
        original, calls = tiny[name], itertools.count(1)

        def fails_once(*arguments):
            found = original(*arguments)
            if next(calls) == call:
                raise KeyError("label")
            return found

        train(tiny["make"](), out=tmp_path / "whole")
        with pytest.raises(JobError, match="'label'") as caught:
            train(tiny["make"](**{name: fails_once}), out=tmp_path / "run")
        assert (f"step_{kept} in '{tmp_path}/run/checkpoints' was kept" in str(caught.value)) == bool(kept)
        assert checkpoints(tmp_path / "run") == ([f"step_{kept}"] if kept else [])
        run = train(tiny["make"](**{name: fails_once}), out=tmp_path / "run", resume=True)
        assert run.resumed_from_step == kept
        assert digest(tmp_path / "run" / "model.pt") == digest(tmp_path / "whole" / "model.pt")

    @pytest.mark.parametrize("error", [FolderError("the disk is full"), CheckpointError("damaged")])
    def test_one_is_told_though_nothing_can_be_kept(self, tmp_path, tiny, monkeypatch, error):
        calls = itertools.count(1)

        def fails(model, batch):
            if next(calls) == 9:
                raise KeyError("label")
            return tiny.loss(model, batch)

        def cannot(*_, **__):
            raise error

        monkeypatch.setattr(Checkpoints, "save", cannot)
        with pytest.raises(JobError, match="step 9 of the training failed: KeyError: 'label'") as caught:
            train(tiny.make(loss=fails), out=tmp_path / "run")
        assert "kept" not in str(caught.value)

    def test_a_step_of_ones_own_that_fails_is_not_kept(self, tmp_path):
        """It may have updated a model already."""
        tiny = runpy.run_path(str(TINY))
        calls = itertools.count(1)

        def fails(models, optimizers, batch):
            loss = tiny["own_step"](models, optimizers, batch)
            if next(calls) == 3:
                raise KeyError("label")
            return loss

        def returns_two(models, optimizers, batch):
            loss = tiny["own_step"](models, optimizers, batch)
            return (loss.detach(), 0.0) if next(calls) == 6 else loss

        told = (
            (fails, r"step 3 of the training failed: KeyError: 'label'[^;]*$"),
            (returns_two, r"the shape \(2,\); it must be one number, the mean over the batch$"),
        )
        for step, text in told:
            job = dataclasses.replace(tiny["two_models"], step=step)
            with pytest.raises(JobError, match=text):
                train(job, out=tmp_path / step.__name__)
            assert checkpoints(tmp_path / step.__name__) == []

    def test_the_steps_before_a_technique_refuses_are_kept(self, tmp_path):
        """Where two batches that are to be joined are of another width."""
        batches = [torch.ones(8, 4)] * 5 + [torch.ones(8, 5)]
        job = vivace.Job(
            model=lambda: torch.nn.Linear(1, 1),
            data=lambda: batches,
            loss=lambda model, batch: model(batch.mean(1, keepdim=True)).square().mean(),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1),
        )
        plan = vivace.Plan.from_dict({"larger_batch": {"factor": 2}})
        with pytest.raises(Refused, match=r"^larger_batch: .*step_2 in .* was kept"):
            train(job, plan, out=tmp_path / "run")
        assert checkpoints(tmp_path / "run") == ["step_2"]
        batches[-1] = batches[0]
        assert train(job, plan, out=tmp_path / "run", resume=True).resumed_from_step == 2

    def test_held_out_data_that_nothing_reads_are_named(self, tmp_path):
        tiny = runpy.run_path(str(TINY))
        held_out = {"validation": tiny["make"]().data, "metric": None}
        run = train(tiny["make"](**held_out), out=tmp_path / "run", max_steps=1)
        assert [text for text in run.notices if "the Job's validation is never read" in text]
        run = train(tiny["make"](validation=held_out["validation"]), out=tmp_path / "more", max_steps=1)
        assert not [text for text in run.notices if "validation" in text]

    def test_a_scheduler_that_forgets_its_return_is_told(self, tmp_path):
        forgets = runpy.run_path(str(TINY))["make"](scheduler=lambda optimizer: None)
        run = train(forgets, out=tmp_path / "run", max_steps=1)
        assert "the Job's scheduler returned None, so that there is no schedule" in run.notices

    def test_a_schedule_that_ends_too_early_is_the_jobs(self, tmp_path):
        tiny = runpy.run_path(str(TINY))
        short = lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)  # noqa: E731
        job = tiny["make"](scheduler=short, scheduler_every="step")
        with pytest.raises(JobError, match=r"the Job's scheduler failed after step 5: .*Tried to step"):
            train(job, out=tmp_path / "run")

    @pytest.mark.parametrize("frozen", [True, False])
    def test_a_loss_that_no_weight_moves(self, tmp_path, frozen):
        tiny = runpy.run_path(str(TINY))
        changes = {"model": lambda: tiny["build_model"]().requires_grad_(False)} if frozen else {}
        changes |= {} if frozen else {"loss": lambda model, batch: tiny["loss"](model, batch).detach()}
        with pytest.raises(JobError, match="depends on no weight that is trained: all are frozen, or it is"):
            train(tiny["make"](**changes), out=tmp_path / "run")


class TestKills:
    @pytest.mark.fault(1)
    @pytest.mark.parametrize("step", [1, 3, EPOCH, EPOCH + 1, STEPS - 1])
    def test_a_killed_run_ends_with_the_same_weights(self, train_in_child, tmp_path, reference, digest, step):
        out = tmp_path / "run"
        assert train_in_child(out, kill_in_step=step)[0] == -signal.SIGKILL
        code, answer = train_in_child(out, resume=True)
        assert code == 0
        assert answer["resumed_from_step"] == ((step - 1) // 2 * 2 or None)
        assert digest(out / "model.pt") == reference

    @pytest.mark.fault(1)
    def test_worker_processes_change_nothing(self, train_in_child, tmp_path, reference, digest):
        out = tmp_path / "run"
        assert train_in_child(out, "workers", kill_in_step=EPOCH + 3)[0] == -signal.SIGKILL
        assert train_in_child(out, "workers", resume=True)[0] == 0
        assert digest(out / "model.pt") == reference

    @pytest.mark.fault(1)
    def test_workers_of_the_plan_change_nothing(self, train_in_child, tmp_path, reference, digest):
        out, plan = tmp_path / "run", "format = 1\n[techniques.loader_workers]\nnum_workers = 1\n"
        assert train_in_child(out, plan=plan, kill_in_step=EPOCH + 3)[0] == -signal.SIGKILL
        assert train_in_child(out, resume=True)[0] == 0
        assert digest(out / "model.pt") == reference

    @pytest.mark.fault(4)
    def test_three_kills_in_one_epoch(self, train_in_child, tmp_path, reference, digest):
        out = tmp_path / "run"
        for step in (2, 2, 3):
            assert train_in_child(out, resume=True, every=1, kill_in_step=step)[0] == -signal.SIGKILL
        code, answer = train_in_child(out, resume=True)
        assert (code, answer["resumed_from_step"]) == (0, 4)
        assert digest(out / "model.pt") == reference

    @pytest.mark.fault(2, 3)
    @pytest.mark.parametrize(
        ("fault", "written"), [("slow_write", "model.pt"), ("before_rename", "MANIFEST.json")]
    )
    def test_a_kill_while_saving_costs_only_that_checkpoint(
        self, launch, train_in_child, tmp_path, reference, digest, until, fault, written
    ):
        out = tmp_path / "run"
        train_in_child(out, arguments={"max_steps": 4})
        arguments = {"out": str(out), "resume": True, "checkpoint_every_steps": 2}
        child = launch("job", arguments, environment={"VIVACE_FAULT": fault})
        until(lambda: list((out / "checkpoints").glob(f"step_6.tmp.*/{written}")))
        child.process.kill()
        child.wait()
        code, answer = train_in_child(out, resume=True)
        assert (code, answer["resumed_from_step"]) == (0, 4)
        assert digest(out / "model.pt") == reference
        assert checkpoints(out) == ["step_14", "step_15"]


class TestStops:
    @pytest.mark.fault(5)
    def test_sigterm_saves_and_can_be_resumed(
        self, launch, train_in_child, tmp_path, reference, digest, until
    ):
        out = tmp_path / "run"
        child = launch("slower", {"out": str(out)})
        until(lambda: (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").read_text())
        os.kill(child.process.pid, signal.SIGTERM)
        assert child.wait() == 143
        assert child.answer["interrupted"]
        assert child.answer["interrupted_by"] == "SIGTERM"
        assert checkpoints(out) == [f"step_{child.answer['steps']}"]
        assert json.loads((out / "run.json").read_text())["interrupted"]
        assert not (out / "model.pt").exists()
        code, answer = train_in_child(out, resume=True)
        assert (code, answer["resumed_from_step"]) == (0, child.answer["steps"])
        assert digest(out / "model.pt") == reference

    @pytest.mark.fault(9)
    def test_the_second_interrupt_ends_at_once_and_tears_nothing(
        self, launch, train_in_child, tmp_path, reference, digest, until
    ):
        out = tmp_path / "run"
        train_in_child(out, arguments={"max_steps": 2})
        child = launch("job", {"out": str(out), "resume": True}, environment={"VIVACE_FAULT": "slow_write"})
        until(lambda: list((out / "checkpoints").glob("*.tmp.*/model.pt")))
        os.kill(child.process.pid, signal.SIGINT)
        child.process.join(0.5)
        assert child.process.exitcode is None, "the first interrupt must let the checkpoint be written"
        os.kill(child.process.pid, signal.SIGINT)
        assert child.wait(10) == 130
        code, answer = train_in_child(out, resume=True)
        assert (code, answer["resumed_from_step"]) == (0, 2)
        assert digest(out / "model.pt") == reference


class TestFolder:
    def test_what_a_run_leaves_behind(self, tmp_path, tiny):
        out = tmp_path / "run"
        events = []
        run = train(tiny.job, out=out, on_event=events.append)
        assert (run.steps, run.epochs, run.interrupted, run.resumed_from_step) == (STEPS, 3, False, None)
        assert json.loads((out / "run.json").read_text())["metric"] == run.metric
        assert run.metric_data == tiny.job.metric_data == run.to_dict()["metric_data"]
        told = [event.payload["metric_data"] for event in events if "metric" in event.payload]
        assert told
        assert set(told) == {run.metric_data}
        assert {event.payload["metric_name"] for event in events if "metric" in event.payload} == {"metric"}
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert [line["metric"] for line in lines if "epoch" in line and "metric" in line][-1] == run.metric
        assert {"step", "epoch", "loss", "samples_per_second"} <= lines[0].keys()
        assert vivace.Plan.load(out).names == ()
        tiny.build_model().load_state_dict(torch.load(out / "model.pt", weights_only=True))
        assert events[-1].kind == "stop"
        assert list((out / "tensorboard").iterdir())

    def test_memory_that_is_full_is_told_once(self, tmp_path, tiny, monkeypatch):
        counts = itertools.count(2, 3)  # the first is how many there were before the run
        monkeypatch.setattr("vivace.tensors.allocator.retries", lambda device: next(counts))
        run = train(tiny.job, out=tmp_path / "run")
        told = [text for text in run.notices if "memory was full" in text]
        assert len(told) == 1
        assert told[0].startswith("the GPU's memory was full 3 times by step 1: ")
        assert "vivace tune --memory" in told[0]

    def test_checkpoints_by_the_clock(self, tmp_path, tiny):
        events = []
        train(tiny.slow, out=tmp_path / "run", checkpoint_every_seconds=0.1, on_event=events.append)
        assert sum(event.kind == "checkpoint" for event in events) >= 3

    def test_a_finished_run_resumes_into_the_same_result(self, tmp_path, tiny):
        first = train(tiny.job, out=tmp_path / "run")
        told = json.loads((tmp_path / "run" / "run.json").read_text())
        told |= {"device": "an H100", "notices": ["a sample was damaged"]}
        (tmp_path / "run" / "run.json").write_text(json.dumps(told))
        again = train(tiny.job, out=tmp_path / "run", resume=True)
        assert (again.metric, again.loss, again.steps) == (first.metric, first.loss, first.steps)
        assert again.device == "an H100"  # whose speed it tells
        assert again.resumed_from_step == STEPS
        assert (again.samples_per_second, again.stepping_seconds) == (
            first.samples_per_second,
            first.stepping_seconds,
        )
        assert again.samples_per_second > 0
        assert again.notices == ("a sample was damaged",)
        kept = json.loads((tmp_path / "run" / "run.json").read_text())
        assert (kept["notices"], kept["resumed_from_step"]) == (["a sample was damaged"], None)
        assert vivace.compare(tmp_path / "run", tmp_path / "run").before.step_seconds

    def test_what_tune_found_of_the_plan_is_known_to_a_resumed_run(self, tmp_path, searched):
        reference, plan, known = searched
        out = tmp_path / "run"
        assert train(reference, plan, out=out, max_steps=2).tuned == known
        shutil.rmtree(plan.parent)
        (out / "run.json").unlink()  # which a killed process does not write
        assert train(reference, out=out, resume=True, max_steps=4).tuned == known
        edit(tmp_path / "tiny.py", "BatchNorm1d(16)", "BatchNorm1d(16, momentum=0.2)")
        run = train(reference, out=out, resume=True, changed="ok", max_steps=6)
        assert not run.tuned
        assert any("source of tiny.py has changed since" in notice for notice in run.notices)

    @pytest.mark.parametrize("edited", ["", "an activation", "a comment", "the batch size", "an old ledger"])
    def test_what_tune_found_is_told_of_the_very_job_alone(self, tmp_path, searched, edited):
        reference, plan, known = searched
        if edited == "an activation":
            edit(tmp_path / "tiny.py", "torch.nn.Dropout(0.3), ", "torch.nn.Dropout(0.3), torch.nn.Tanh(), ")
        elif edited == "a comment":
            edit(tmp_path / "tiny.py", "def loss(", "# the same\ndef loss(")
        elif edited:
            old = ("shapes",) if edited == "the batch size" else ("sources", "shapes")
            lines = (plan.parent / "ledger.jsonl").read_text().splitlines()
            run = json.loads(lines[0])
            run["job"] = {key: value for key, value in run["job"].items() if key not in old}
            (plan.parent / "ledger.jsonl").write_text("\n".join([json.dumps(run), *lines[1:]]) + "\n")
        trained = train(reference, plan, out=tmp_path / "run", max_steps=2)
        assert trained.tuned == (known if edited in ("", "a comment") else {})
        told = [notice for notice in trained.notices if "what tune found of the plan is not told" in notice]
        assert len(told) == (0 if trained.tuned else 1)

    @pytest.mark.parametrize("name", ["./{file}", "{file}:job", "elsewhere/tiny.py"])
    def test_what_tune_found_is_told_however_the_job_is_named(self, tmp_path, searched, name, monkeypatch):
        _, plan, known = searched
        monkeypatch.chdir(tmp_path)
        run = train(name.format(file="tiny.py"), plan, out=tmp_path / "run", max_steps=1)
        assert run.tuned == known
        assert train("tiny.py", plan.parent, out=tmp_path / "named", max_steps=1).tuned == known
        assert not train("tiny.py:slow", plan, out=tmp_path / "other", max_steps=1).tuned

    def test_what_a_search_found_while_it_trained_is_known_to_a_resumed_run(self, tmp_path, tiny):
        out, found = tmp_path / "run", {"outcome": "faster", "ended": True}
        train(tiny.job, out=out, max_steps=2)
        document = json.loads((out / "run.json").read_text())
        (out / "run.json").write_text(json.dumps(document | {"found": found}))
        assert train(tiny.job, out=out, resume=True, max_steps=4).found == found
        assert train(tiny.job, out=out, resume=True).found == found
        assert train(tiny.job, out=out, restart=True, max_steps=1).found == {}

    def test_a_training_from_zero_takes_nothing_from_the_one_before_it(self, tmp_path):
        """Neither does the training that goes on after it has failed half-way: it wrote no run.json."""
        tiny = runpy.run_path(str(TINY))
        out, calls = tmp_path / "run", itertools.count(1)

        def fails_once(*arguments):
            if next(calls) == 3:
                raise KeyError("label")
            return tiny["loss"](*arguments)

        train(tiny["make"](), out=out)
        document = json.loads((out / "run.json").read_text())
        (out / "run.json").write_text(json.dumps(document | {"found": {"outcome": "faster"}}))
        job = tiny["make"](loss=fails_once)
        with pytest.raises(JobError, match=r"step_2 .* was kept"):
            train(job, out=out, restart=True)
        assert not any((out / name).exists() for name in ("run.json", "model.pt"))
        again = train(job, out=out, resume=True)
        assert (again.resumed_from_step, again.found) == (2, {})

    @pytest.mark.parametrize("field", ["model", "data", "optimizer", "scheduler"])
    def test_a_training_from_zero_that_cannot_begin_leaves_the_one_before_it(
        self, tmp_path, tiny, field, digest
    ):
        out = tmp_path / "run"
        train(tiny.job, out=tmp_path / "whole", seed=5)
        train(tiny.job, out=out, seed=5, max_steps=7)
        with pytest.raises(JobError, match="division by zero"):
            train(dataclasses.replace(tiny.job, **{field: lambda *_: 1 / 0}), out=out, restart=True)
        assert checkpoints(out) == ["step_7"]
        assert train(tiny.job, out=out, resume=True).resumed_from_step == 7
        assert digest(out / "model.pt") == digest(tmp_path / "whole" / "model.pt")

    def test_parts_make_the_whole(self, tmp_path, tiny, digest):
        whole, parts = tmp_path / "whole", tmp_path / "parts"
        train(tiny.job, out=whole)
        for steps in (4, 5, 11, None):
            run = train(tiny.job, out=parts, resume=True, max_steps=steps)
            assert run.epochs_left == {4: 3, 5: 2, 11: 1, None: 0}[steps]
            assert ("max_steps ended it early, and resume=True goes on" in run._repr_html_()) is bool(steps)
        assert train(tiny.job, out=tmp_path / "exact", max_steps=STEPS).epochs_left == 0
        assert digest(parts / "model.pt") == digest(whole / "model.pt")
        log = [json.loads(line)["step"] for line in (parts / "metrics.jsonl").read_text().splitlines()]
        assert log == sorted(log)

    def test_seconds_are_those_of_all_processes(self, tmp_path, tiny):
        train(tiny.slow, out=tmp_path / "run", max_steps=2 * EPOCH)
        (manifest,) = (tmp_path / "run" / "checkpoints").glob("*/MANIFEST.json")
        before = json.loads(manifest.read_text())["position"]["seconds"]
        again = train(tiny.slow, out=tmp_path / "run", resume=True)
        assert again.seconds > before > 0
        lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        seconds = [line["seconds"] for line in lines if "seconds" in line]
        assert len(seconds) >= 3
        assert seconds == sorted(seconds)
        assert seconds[-1] > before

    def test_a_used_folder_is_refused(self, tmp_path, tiny):
        train(tiny.job, out=tmp_path / "run", max_steps=1)
        with pytest.raises(FolderError, match="--resume"):
            train(tiny.job, out=tmp_path / "run")
        assert train(tiny.job, out=tmp_path / "run", restart=True, max_steps=1).resumed_from_step is None

    @pytest.mark.fault(32)
    def test_all_checkpoints_bad_needs_a_restart(self, tmp_path, tiny):
        out = tmp_path / "run"
        train(tiny.job, out=out, max_steps=2)
        (out / "checkpoints" / "step_2" / "MANIFEST.json").unlink()
        with pytest.raises(vivace.VivaceError, match=r"step_2: MANIFEST.json is missing.*--restart"):
            train(tiny.job, out=out, resume=True)
        assert train(tiny.job, out=out, restart=True, max_steps=1).steps == 1

    @pytest.mark.fault(30)
    def test_a_skipped_checkpoint_is_said(self, tmp_path, tiny):
        out = tmp_path / "run"
        train(tiny.job, out=out, max_steps=4, checkpoint_every_steps=2)
        (out / "checkpoints" / "step_4" / "state.pt").write_bytes(b"")
        run = train(tiny.job, out=out, resume=True, max_steps=4)
        assert run.resumed_from_step == 2
        assert run.notices[0].startswith("skipped a checkpoint: step_4: state.pt has 0 bytes")

    @pytest.mark.fault(28)
    def test_a_full_disk_keeps_the_earlier_checkpoint(self, train_in_child, tmp_path, reference, digest):
        out = tmp_path / "run"
        train_in_child(out, arguments={"max_steps": 4})
        code, answer = train_in_child(out, resume=True, file_bytes=4096)
        assert (code, answer["error"]["kind"]) == (2, "FolderError")
        assert "is full: a checkpoint needs" in answer["error"]["message"]
        assert checkpoints(out) == ["step_2", "step_4"]
        assert train_in_child(out, resume=True)[0] == 0
        assert digest(out / "model.pt") == reference


class TestChanges:
    @pytest.mark.fault(34)
    def test_another_plan(self, tmp_path, tiny):
        plan = vivace.Plan.from_dict({"channels_last": {}})
        train(tiny.job, out=tmp_path / "run", max_steps=1)
        with pytest.raises(vivace.VivaceError, match=r"channels_last"):
            train(tiny.job, plan, out=tmp_path / "run", resume=True)

    @pytest.mark.fault(34)
    def test_another_model_or_data_or_seed(self, tmp_path, tiny):
        out = tmp_path / "run"
        train(tiny.job, out=out, max_steps=1)
        with pytest.raises(JobError, match=r"model 0 0.weight: float32 \[16, 6\] -> float32 \[8, 6\]"):
            train(tiny.wider, out=out, resume=True)
        with pytest.raises(JobError, match="samples in batches of 8 -> 40 samples in batches of 10"):
            train(tiny.longer, out=out, resume=True)
        with pytest.raises(InputError, match="has seed 0, not 1"):
            train(tiny.job, out=out, resume=True, seed=1)

    def test_without_a_seed_a_resumed_run_keeps_its_own(self, tmp_path, tiny, digest):
        train(tiny.job, out=tmp_path / "whole", seed=5)
        train(tiny.job, out=tmp_path / "run", seed=5, max_steps=1)
        assert train(tiny.job, out=tmp_path / "run", resume=True).resumed_from_step == 1
        assert digest(tmp_path / "run" / "model.pt") == digest(tmp_path / "whole" / "model.pt")
        train(tiny.job, out=tmp_path / "run", restart=True, max_steps=1)  # is a new one
        with pytest.raises(InputError, match="has seed 0, not 5"):
            train(tiny.job, out=tmp_path / "run", resume=True, seed=5)

    def test_also_one_that_ended_before_its_first_checkpoint(self, tmp_path, tiny, digest):
        train(tiny.job, out=tmp_path / "whole", seed=5)
        failing = dataclasses.replace(tiny.job, data=lambda: 1 / 0)
        with pytest.raises(JobError, match="division by zero"):
            train(failing, out=tmp_path / "run", seed=5)
        assert train(tiny.job, out=tmp_path / "run", resume=True).resumed_from_step is None
        assert digest(tmp_path / "run" / "model.pt") == digest(tmp_path / "whole" / "model.pt")

    @pytest.mark.parametrize("seed", [-1, 2**64])
    def test_a_seed_that_torch_cannot_take_is_refused(self, tmp_path, tiny, seed):
        with pytest.raises(InputError, match=f"from 0 to {2**64 - 1}, not {seed}"):
            train(tiny.job, out=tmp_path / "run", seed=seed)
        assert train(tiny.job, out=tmp_path / "run", seed=2**64 - 1, max_steps=1).steps == 1

    @pytest.mark.fault(34)
    def test_other_threads_are_said(self, train_in_child, tmp_path):
        train_in_child(tmp_path / "run", arguments={"max_steps": 2})
        _, answer = train_in_child(tmp_path / "run", resume=True, threads=2)
        assert answer["notices"] == ["resumed, not bit-exact: threads 1 -> 2"]


class TestJobs:
    def test_an_own_step_with_several_modules(self, tmp_path):
        def step(models, optimizers, batch):
            loss = models["b"](models["a"](batch)).pow(2).mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            return loss

        job = vivace.Job(
            model=lambda: {"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 1)},
            data=lambda: (torch.randn(4, 3) for _ in range(4)),
            optimizer=lambda models: [torch.optim.Adam(m.parameters()) for m in models.values()],
            step=step,
            metric=lambda models, batches: float(models["a"].training),
            epochs=2,
        )
        whole = train(job, out=tmp_path / "whole")
        assert (whole.steps, whole.metric) == (8, 0.0)
        for steps in (3, 6, None):
            train(job, out=tmp_path / "parts", resume=True, max_steps=steps)
        models = [torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("whole", "parts")]
        assert torch.equal(models[0]["a"]["weight"], models[1]["a"]["weight"])

    @pytest.mark.parametrize("every", ["step", "epoch"])
    def test_the_scheduler_steps_where_the_job_says(self, tmp_path, tiny, every):
        rates = []
        job = tiny.make(
            scheduler_every=every,
            scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda n: rates.append(n) or 1.0
            ),
        )
        train(job, out=tmp_path / "run")
        assert rates[-1] == {"step": STEPS, "epoch": 3}[every]

    @pytest.mark.parametrize(
        ("every", "length", "told"), [("epoch", 300, 1), ("epoch", 6, 0), ("step", 300, 0)]
    )
    def test_a_schedule_in_steps_that_is_stepped_each_epoch_is_told(
        self, tmp_path, tiny, every, length, told
    ):
        def scheduler(optimizer):
            warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2)
            cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=length)
            return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [2])

        events = []
        job = tiny.make(scheduler=scheduler, scheduler_every=every)
        train(job, out=tmp_path / "run", max_steps=1, on_event=events.append)
        texts = [event.payload["text"] for event in events if event.kind == "notice"]
        assert [text.startswith("CosineAnnealingLR is 300 steps long") for text in texts] == [True] * told

    def test_a_plateau_scheduler_sees_the_metric(self, tmp_path, tiny):
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        job = tiny.make(scheduler=lambda optimizer: plateau(optimizer, mode="max"))
        assert train(job, out=tmp_path / "run").epochs == 3

    @pytest.mark.fault(26)
    def test_a_loss_that_is_not_finite_stops_the_run(self, tmp_path, tiny):
        def loss(model, batch):
            return tiny.loss(model, batch) * (float("nan") if next(calls) >= 4 else 1.0)

        calls = iter(range(100))
        with pytest.raises(Diverged, match=r"the loss is nan at step 7 \(epoch 2\).*step 4 is the last good"):
            train(tiny.make(loss=loss), out=tmp_path / "run", checkpoint_every_steps=1, on_nan="stop")
        assert checkpoints(tmp_path / "run") == ["step_3", "step_4"]

    @pytest.mark.fault(24)
    @pytest.mark.parametrize("every", [None, 3])
    def test_one_bad_step_is_taken_again_from_the_last_good_state(self, tmp_path, tiny, digest, every):
        def loss(model, batch):
            return tiny.loss(model, batch) * (float("nan") if next(calls) == 4 else 1.0)

        calls = iter(range(100))
        run = train(tiny.make(loss=loss), out=tmp_path / "run", checkpoint_every_steps=every)
        train(tiny.make(), out=tmp_path / "clean", checkpoint_every_steps=every)
        assert digest(tmp_path / "run" / "model.pt") == digest(tmp_path / "clean" / "model.pt")
        back = "step 3" if every else "the beginning"
        (notice,) = run.notices
        assert f"epoch 2): back to {back}; from here on every number is checked" in notice
        assert (run.steps, run.resumed_from_step) == (15, None)

    @pytest.mark.fault(5, 24)
    def test_who_asked_for_a_stop_in_a_bad_step_does_not_wait_for_the_rest(self, tmp_path, tiny):
        def loss(model, batch):
            bad = next(calls) == 4
            if bad:
                os.kill(os.getpid(), signal.SIGTERM)
            return tiny.loss(model, batch) * (float("nan") if bad else 1.0)

        calls, job = iter(range(100)), tiny.make(loss=loss)
        run = train(job, out=tmp_path / "run", checkpoint_every_steps=3)
        assert (run.interrupted_by, run.steps) == ("SIGTERM", 4)
        assert train(job, out=tmp_path / "run", resume=True).steps == STEPS

    def test_time_and_energy_of_what_is_taken_again_count(self, tmp_path, tiny, monkeypatch):
        class Meter:
            def __init__(self, *, gpus):
                self.number = len(meters)
                meters.append(self)

            def joules(self):
                return None

            def told(self, samples):
                return {"meter": self.number, "samples": samples}

        def loss(model, batch):
            time.sleep(0.02)
            return tiny.loss(model, batch) * (float("nan") if next(calls) == 12 else 1.0)

        calls, meters = iter(range(100)), []
        monkeypatch.setattr("vivace.training.progress.Meter", Meter)
        run = train(tiny.make(loss=loss), out=tmp_path / "run")
        steps = next(calls)
        assert steps >= 13 + STEPS
        assert run.seconds > 0.02 * steps
        assert run.energy == {"meter": 0, "samples": 8 * steps}

    @pytest.mark.fault(26)
    @pytest.mark.parametrize(
        ("bad", "told"),
        [
            ("output", r"the loss is nan: the first .* leave the module '1' \(Bad\) in step 6 \(epoch 2\)"),
            ("loss", r"the loss is inf: what the model gives is still finite in step 6 \(epoch 2\)"),
            ("gradient", r"the gradient of '0.bias' is not finite, though the loss is"),
        ],
    )
    def test_what_stays_bad_is_named(self, tmp_path, tiny, bad, told):
        class Bad(torch.nn.Module):
            def forward(self, x):
                if bad == "gradient" and steps["now"] > 5:
                    x.register_hook(lambda gradient: gradient * float("nan"))
                return x * (float("nan") if bad == "output" and steps["now"] > 5 else 1.0)

        def loss(model, batch):
            steps["now"] = steps["now"] + 1 if model.training and torch.is_grad_enabled() else steps["now"]
            found = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
            return found * (float("inf") if bad == "loss" and steps["now"] > 5 else 1.0)

        def reset(event):
            if event.kind == "notice":
                steps["now"] = 3  # of which the checkpoint is

        steps = {"now": 0}
        model = lambda: torch.nn.Sequential(torch.nn.Linear(6, 8), Bad(), torch.nn.Linear(8, 3))  # noqa: E731
        job = tiny.make(loss=loss, model=model)
        with pytest.raises(Diverged, match=told) as error:
            train(job, out=tmp_path / "run", checkpoint_every_steps=3, on_event=reset)
        assert "step 3 is the last good checkpoint" in str(error.value)

    @pytest.mark.fault(27)
    def test_a_loss_far_above_its_start_is_told_and_stopped_within_twenty_steps(self, tmp_path, tiny):
        steps = iter(range(1, 1000))

        def loss(model, batch):
            return tiny.loss(model, batch) * (1.0 if next(steps) < 30 else grown)

        told = []
        job = tiny.make(loss=loss, epochs=20)
        grown = 100.0
        train(job, out=tmp_path / "a", max_steps=50, on_event=told.append)
        assert sum("it diverges" in event.payload.get("text", "") for event in told) == 1
        steps, grown = iter(range(1, 1000)), 1e6
        with pytest.raises(Diverged, match=r", which began at 1\.\d+ at step (3\d|4\d)"):
            train(job, out=tmp_path / "b")

    def test_data_that_end_before_their_length_are_no_success(self, tmp_path, tiny):
        class Short(torch.utils.data.DataLoader):
            def __len__(self):
                return 7

        data = lambda: Short(tiny.Noisy(), batch_size=8, shuffle=True)  # noqa: E731
        run = train(tiny.make(data=data), out=tmp_path / "run", max_steps=8)
        assert (run.missing_steps, run.exit_code) == (2, 1)
        run = train(tiny.make(data=data), out=tmp_path / "run", resume=True)
        assert (run.steps, run.missing_steps, run.exit_code) == (15, 6, 1)
        assert run.notices[-1] == ("epoch 3 ended 2 steps early: the data's length promises 7, and 5 came")
        assert train(tiny.job, out=tmp_path / "whole").exit_code == 0

    def test_data_that_have_a_length_in_name_only_are_trained(self, tmp_path, tiny):
        class Stream(torch.utils.data.IterableDataset):
            def __len__(self):
                raise NotImplementedError

            def __iter__(self):
                return (tiny.Noisy()[index] for index in range(tiny.SAMPLES))

        data = lambda: torch.utils.data.DataLoader(Stream(), batch_size=tiny.BATCH)  # noqa: E731
        run = train(tiny.make(data=data, metric=None), out=tmp_path / "run", max_steps=6)
        assert (run.steps, run.epochs, run.missing_steps) == (6, 1, 0)

    def test_errors_of_the_job_name_the_step(self, tmp_path, tiny):
        def loss(model, batch):
            raise ValueError("no such thing")

        with pytest.raises(JobError, match="step 1 of the training failed: ValueError: no such thing"):
            train(tiny.make(loss=loss), out=tmp_path / "a")
        with pytest.raises(JobError, match=r"data\(\) gave no batch in epoch 1"):
            train(tiny.make(data=list), out=tmp_path / "b")
        with pytest.raises(InputError, match="max_steps must be more than 0, not 0"):
            train(tiny.job, out=tmp_path / "c", max_steps=0)


class TestFolders:
    def test_a_job_that_goes_elsewhere_leaves_the_run_where_it_was(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "job.py").write_text(
            f"import os, runpy\nos.chdir('elsewhere')\njob = runpy.run_path({str(TINY)!r})['job']\n"
        )
        vivace.Plan().save("plan.toml")
        run = train("job.py:job", "plan.toml", out="run", checkpoint_every_steps=5)
        assert Path.cwd() == tmp_path / "elsewhere"
        assert Path(run.run_path) == tmp_path / "run"
        assert (tmp_path / "run" / "model.pt").is_file()
        assert list((tmp_path / "elsewhere").iterdir()) == []

    @pytest.mark.fault(20)
    @pytest.mark.parametrize("what", [".", "checkpoints"])
    def test_a_folder_removed_in_mid_run_is_a_sentence(self, tiny, tmp_path, what):
        def remove(event):
            if event.kind == "checkpoint":
                shutil.rmtree(tmp_path / "run" / what)

        with pytest.raises(FolderError, match="removed or renamed it while the run was training"):
            train(tiny.job, out=tmp_path / "run", checkpoint_every_steps=2, on_event=remove)

    def test_streams_that_were_lost_with_their_rank_begin_anew_and_that_is_told(self, tiny, tmp_path):
        """As of one that was killed, and whose weights another one kept."""
        train(tiny.job, out=tmp_path / "run", max_steps=4)
        path = tmp_path / "run" / "checkpoints" / "step_4"
        model, state = (torch.load(path / name, weights_only=True) for name in ("model.pt", "state.pt"))
        keeper = Checkpoints(path.parent, {})
        manifest = keeper.newest().manifest
        keeper.facts = {k: v for k, v in manifest.items() if k not in ("format", "files", "position")}
        keeper.save(Position(**manifest["position"]), model, {**state, "streams": [None]})
        run = train(tiny.job, out=tmp_path / "run", resume=True)
        assert (run.resumed_from_step, run.steps) == (4, STEPS)
        lost = "resumed, not bit-exact: the random streams of rank 0 were lost with it, and begin anew"
        assert run.notices == (lost,)

    def test_ranks_whose_disks_hold_different_checkpoints_do_not_train(self, tiny, tmp_path, monkeypatch):
        train(tiny.job, out=tmp_path / "run", max_steps=4)
        monkeypatch.setattr(Ranks, "gather", lambda self, value: [value, 6] if value == 4 else [value])
        with pytest.raises(FolderError, match=r"the ranks see different checkpoints .* disk that all share"):
            train(tiny.job, out=tmp_path / "run", resume=True)

    def test_streams_of_another_form_are_said(self):
        with pytest.raises(CheckpointError, match="random streams cannot be read"):
            load_streams({"torch": "no"}, torch.device("cpu"))


class TestSignals:
    @pytest.mark.fault(5)
    @pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
    def test_a_lost_terminal_or_scheduler_stops_with_a_checkpoint(self, launch, tmp_path, until, number):
        out = tmp_path / "run"
        child = launch("slower", {"out": str(out)})
        until(lambda: (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").read_text())
        os.kill(child.process.pid, number)
        assert child.wait() == 128 + number
        assert len(checkpoints(out)) == 1

    def test_what_a_rank_has_found_is_told_before_a_launcher_ends_it(self):
        heard, mine = [], signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
        try:
            with tells_first():
                signal.raise_signal(signal.SIGTERM)  # nothing has been trained yet
            assert heard == [signal.SIGTERM]
            with tells_first():
                with StopRequest() as stop:
                    signal.raise_signal(signal.SIGTERM)
                assert stop.signal_name == "SIGTERM"
                signal.raise_signal(signal.SIGTERM)
            assert heard == [signal.SIGTERM]
            signal.raise_signal(signal.SIGTERM)
            assert len(heard) == 2
        finally:
            signal.signal(signal.SIGTERM, mine)

    def test_who_has_taken_a_signal_keeps_it(self):
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            with StopRequest() as stop:
                os.kill(os.getpid(), signal.SIGHUP)
                assert stop.signal_name == ""
        finally:
            signal.signal(signal.SIGHUP, before)

    def test_what_answered_before_python_began_is_no_hindrance(self, monkeypatch):
        """Python does not know it, and cannot give it back."""
        given_back = []
        monkeypatch.setattr(signal, "signal", lambda number, handler: given_back.append(handler))
        with StopRequest():
            given_back.clear()
        assert None not in given_back

    def test_a_request_to_end_is_taken_for_ctrl_c(self):
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt), ends_like_ctrl_c():
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is before


class TestRanks:
    def test_ranks_without_the_technique_are_refused(self, launch_ranks, tmp_path):
        children = launch_ranks("long", {"out": str(tmp_path / "run")}, plan=None)
        assert [child.wait() for child in children] == [2, 2]
        assert all("add [techniques.ddp]" in child.answer["error"]["message"] for child in children)

    @pytest.mark.fault(6, 7)
    def test_two_ranks_stop_together_and_resume_bit_for_bit(self, launch_ranks, tmp_path, digest, until):
        whole, parts = tmp_path / "whole", tmp_path / "parts"
        children = launch_ranks("long", {"out": str(whole)})
        assert [child.wait() for child in children] == [0, 0]
        assert children[0].answer["metric"] == children[1].answer["metric"]
        children = launch_ranks("long", {"out": str(parts)})
        until(
            lambda: (
                (parts / "metrics.jsonl").exists() and '"epoch": 6' in (parts / "metrics.jsonl").read_text()
            )
        )
        os.kill(children[1].process.pid, signal.SIGTERM)
        assert [child.wait() for child in children] == [143, 143]
        assert children[0].answer["steps"] == children[1].answer["steps"] < 60
        children = launch_ranks("long", {"out": str(parts), "resume": True})
        assert [child.wait() for child in children] == [0, 0]
        assert children[0].answer["notices"] == []
        assert digest(parts / "model.pt") == digest(whole / "model.pt")

    def test_a_refusal_is_the_same_on_all_ranks(self, launch_ranks, tmp_path):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "thesis.tex").write_text("mine")
        children = launch_ranks("long", {"out": str(tmp_path / "run")})
        assert [child.wait() for child in children] == [2, 2]
        assert children[0].answer == children[1].answer
        assert "thesis.tex" in children[0].answer["error"]["message"]

    @pytest.mark.fault(6, 10)
    @pytest.mark.slow
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
    def test_when_torchrun_goes_its_ranks_save_and_go(self, fork_server, tmp_path, until, number):
        out, rank = tmp_path / "run", Path(__file__).parent / "scenes" / "rank.py"
        options = ["--standalone", "--nproc-per-node", "2", "--start-method", "fork", "--run-path"]
        agent = fork_server.Process(target=torchrun, args=([*options, str(rank), str(out)],))
        agent.start()
        until(lambda: (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").read_text(), 120)
        os.kill(agent.pid, number)
        agent.join(30)
        assert agent.exitcode is not None
        until((out / "run.json").exists)
        assert json.loads((out / "run.json").read_text())["interrupted_by"] == "SIGTERM"
        assert len(checkpoints(out)) == 1
        until(lambda: not (out / "lock").read_text())


@pytest.mark.usefixtures("one_thread")
def test_weights_that_no_optimizer_has_do_not_gather_gradients(tmp_path, tiny, digest):
    """They would count in the norm by which gradients are clipped, more with each step, and none after a
    resume.
    """

    def clip(model):
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))

    def optimizer(model):
        return torch.optim.SGD(model[-1].parameters(), lr=0.1)

    job = tiny.make(optimizer=optimizer, on_gradients=clip)
    norms = []
    train(job, out=tmp_path / "whole")
    whole, norms = norms, []
    train(job, out=tmp_path / "run", max_steps=7)
    train(job, out=tmp_path / "run", resume=True)
    assert norms == whole
    assert max(whole[1:]) < 3 * whole[0]
    assert digest(tmp_path / "run" / "model.pt") == digest(tmp_path / "whole" / "model.pt")


class Counting(torch.nn.Module):
    """Keeps a mean that is in no state_dict, and counts in Python how often it was called."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(6, 3), 0
        self.register_buffer("mean", torch.zeros(6), persistent=False)
        self.register_buffer("constant", torch.ones(6), persistent=False)

    def forward(self, inputs):
        if self.training:
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * inputs.mean(0) * self.constant
        return self.layer(inputs - self.mean) / (1 + self.calls)


class FirstNone(Counting):
    """Its mean has a place from the beginning, and a value from the first step on."""

    def __init__(self):
        super().__init__()
        self.mean = None

    def forward(self, inputs):
        if self.mean is None:
            self.mean = torch.zeros(6)
        return super().forward(inputs)


class Lazy(Counting):
    """The first step makes the place, too."""

    def __init__(self):
        super().__init__()
        del self.mean

    def forward(self, inputs):
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(6), persistent=False)
        return super().forward(inputs)


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (Counting, ""),
        (Counting, "format = 1\n[techniques.fused_optimizer]\n"),
        (FirstNone, ""),
        (Lazy, ""),
    ],
)
def test_what_a_model_keeps_beside_its_state_dict_goes_on_after_a_stop(tmp_path, tiny, digest, model, plan):
    job = tiny.make(model=model)
    plan = vivace.Plan.loads(plan) if plan else None
    vivace.train(job, plan, out=tmp_path / "whole")
    vivace.train(job, plan, out=tmp_path / "run", max_steps=4)
    state = torch.load(tmp_path / "run" / "checkpoints" / "step_4" / "state.pt", weights_only=True)
    assert [(name, key) for _, name, key, _ in state["beside"]] == [("", "mean"), ("", "calls")]
    vivace.train(job, plan, out=tmp_path / "run", resume=True, max_steps=11)
    vivace.train(job, plan, out=tmp_path / "run", resume=True)
    assert digest(tmp_path / "run" / "model.pt") == digest(tmp_path / "whole" / "model.pt")
    trained = torch.load(tmp_path / "run" / "model.pt", weights_only=True)
    assert list(trained) == ["layer.weight", "layer.bias"]
