"""What watches a script must not fail into it: faults planted in each kind of hook."""

import json
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from vivace.profiling.record import RECORD, experiments, facts, hooks
from vivace.profiling.record.counting import CountedStep
from vivace.profiling.record.fetches import FetchSampler
from vivace.profiling.record.guard import Guard
from vivace.profiling.record.late import LatePeak
from vivace.profiling.record.mixed import PrecisionWatch
from vivace.profiling.record.modules import ModuleRanges
from vivace.profiling.record.recorder import Recorder
from vivace.profiling.record.waits import WaitWatch
from vivace.work.count import KernelCounter

EPOCHS = 5
PATCHED = (
    (torch.autograd, "backward"),
    (torch.optim.Optimizer, "zero_grad"),
    (DataLoader, "__iter__"),
    (torch.Tensor, "item"),
    (torch.autocast, "__enter__"),
    (nn.utils, "clip_grad_norm_"),
    (nn.Module, "eval"),
    (torch, "set_num_threads"),
)
FAULTS = [
    (hooks.LoopHooks, "_push"),
    (hooks.LoopHooks, "_pop"),
    (hooks.LoopHooks, "fetched"),
    (hooks.LoopHooks, "_before_update"),
    (hooks.LoopHooks, "_after_update"),
    (hooks.LoopHooks, "_look_for_an_optimizer"),
    (Recorder, "_is_over"),
    (Recorder, "_enter_counted"),
    (Recorder, "_leave_watched"),
    (Recorder, "_leave_traced"),
    (Recorder, "_leave_counted"),
    (PrecisionWatch, "_note"),
    (PrecisionWatch, "_before_update"),
    (PrecisionWatch, "_went_backward"),
    (FetchSampler, "start"),
    (experiments, "calling_site"),
    (experiments, "run"),
    (WaitWatch, "_row"),
    (ModuleRanges, "_enter"),
    (KernelCounter, "add"),
    (CountedStep, "_note_kept"),
    (CountedStep, "_before_update"),
    (CountedStep, "work"),
    (CountedStep, "kept"),
    (facts, "live_graph_tensors"),
    (facts, "dynamo_difference"),
    (facts, "held_bytes"),
    (facts, "_settings"),
    (facts, "_loader"),
    (facts, "_ranks"),
    (experiments.CallCatcher, "_catch"),
]
LOOP = (hooks.LoopHooks, Recorder)
WINDOWS = {"_enter_counted", "_leave_watched", "_leave_traced", "_leave_counted"}
WITHOUT_WORK = {"add", "_note_kept", "_before_update", "_enter", "_enter_counted", "_leave_counted", "work"}


class Unready:
    """As settings that nobody has configured: whatever they are asked raises."""

    def __getattribute__(self, name):
        raise RuntimeError("not configured")


def train(batches):
    """Trains with all that is watched in it; the weights and the random numbers that follow."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.set_num_threads(1)
    told = []
    for _ in range(EPOCHS):
        for inputs, labels in DataLoader(batches, batch_size=None):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = functional.cross_entropy(model(inputs), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            told.append(loss.item())
    return [*(p.detach().clone() for p in model.parameters()), torch.rand(1), torch.tensor(told)]


@pytest.fixture(scope="module")
def alone(batches):
    before = torch.get_num_threads()
    try:
        return train(batches)
    finally:
        torch.set_num_threads(before)


def planted(*_, **__):
    raise IndexError("planted")


@pytest.mark.usefixtures("brief_experiments")
@pytest.mark.parametrize(("owner", "name"), FAULTS, ids=lambda part: getattr(part, "__name__", part))
def test_a_fault_in_a_hook_costs_a_part_of_the_record_and_nothing_else(
    owner, name, tmp_path, monkeypatch, batches, one_thread, alone, judged
):
    before = [getattr(place, attribute) for place, attribute in PATCHED]
    if name == "_catch":
        monkeypatch.setattr(owner, name, lambda *_: planted)
    else:
        monkeypatch.setattr(owner, name, planted)
    recorder = Recorder(tmp_path, timed_seconds=0.0)
    recorder.install()
    try:
        trained = train(batches)
    finally:
        recorder.finish()
    assert all(map(torch.equal, trained, alone))
    assert [getattr(place, attribute) for place, attribute in PATCHED] == before
    assert not nn.modules.module._has_any_global_hook()
    assert not torch.autograd.profiler._is_profiler_enabled
    record = json.loads((tmp_path / RECORD).read_text())
    assert record["problems"]
    assert all("planted" in problem for problem in record["problems"])
    if owner not in LOOP or name in WINDOWS:  # the other parts are there
        assert record["state"] == "finished"
        assert record["clean_steps"] > 0
        assert ("work" in record) == (owner is PrecisionWatch or name not in WITHOUT_WORK)
        judged()


def test_a_fault_after_the_profiled_steps_is_noted_too(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path)
    recorder.done = True
    (tmp_path / RECORD).write_text("{}")
    late, model = LatePeak(recorder), nn.Linear(1, 1)
    late.install()
    monkeypatch.setattr("vivace.profiling.record.facts.peak_bytes", planted)
    assert model.eval() is model
    monkeypatch.undo()
    late.finish()
    found = json.loads((tmp_path / RECORD).read_text())
    assert "planted" in found["problems"][0]
    assert "late" not in found


def test_a_counter_below_the_persons_own_mode_stays_and_counts_nothing(tmp_path, batches):
    from torch.utils.flop_counter import FlopCounterMode

    recorder = Recorder(tmp_path)
    counted = CountedStep(recorder.hooks, Guard(recorder.note))
    counted.install()
    theirs = FlopCounterMode(display=False)
    with theirs:
        counted.restore()
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert theirs.get_total_flops() == 16
    assert counted.guard.off
    counted._counter.__exit__(None, None, None)


def test_what_the_person_raises_is_theirs():
    class Theirs(Exception):
        pass

    def fails(number):
        raise Theirs(number)

    faults = []
    guard = Guard(faults.append)
    watched = guard.around(fails, lambda original: lambda *arguments: original(*arguments))
    with pytest.raises(Theirs, match="7"):
        watched(7)
    assert faults == []
    assert not guard.off


def test_a_fault_beside_a_thing_that_cannot_be_asked_stays_ours():
    faults = []
    assert Guard(faults.append).looking(planted)(Unready(), Unready()) is None
    assert [str(fault) for fault in faults] == ["planted"]


def test_a_script_that_crashes_shows_its_own_frames_alone(monkeypatch, capsys):
    """Also of the error behind the last one; and a hook that the script puts into place meanwhile stays."""

    def fails():
        try:
            {}["own"]
        except KeyError as error:
            raise ValueError("theirs") from error

    def shown():
        try:
            owner.fails()
        except ValueError as error:
            sys.excepthook(type(error), error, error.__traceback__)
        return capsys.readouterr().err

    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    owner = SimpleNamespace(fails=fails)
    alone = shown()
    patches = hooks.Patches(Guard(print))
    patches.replace(owner, "fails", lambda original: original)
    assert "guard.py" in shown()
    patches.hide()
    assert shown() == alone
    patches.restore()
    assert sys.excepthook is sys.__excepthook__
    patches.hide()
    sys.excepthook = own = SimpleNamespace()
    patches.restore()
    assert sys.excepthook is own


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("fails", [False, True])
def test_their_function_runs_once_whenever_ours_fails(when, fails):
    calls, faults = [], []

    def own(number):
        calls.append(number)
        if fails:
            raise ValueError(number)
        return number + 1

    def make(original):
        def watch(number):
            if when == "before":
                planted()
            try:
                return original(number)
            finally:
                planted()

        return watch

    guard = Guard(faults.append)
    watched = guard.around(own, make)
    for number in (1, 2):
        if fails:
            with pytest.raises(ValueError, match=str(number)):
                watched(number)
        else:
            assert watched(number) == number + 1
    assert calls == [1, 2]
    assert [str(fault) for fault in faults] == ["planted"]


def test_a_hook_returns_nothing_and_raises_nothing():
    guard = Guard(planted)  # telling fails too
    handle = register_optimizer_step_pre_hook(guard.looking(planted))
    try:
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()
    finally:
        handle.remove()
    assert guard.off
    assert Guard(planted).looking(lambda: 7)() is None


def test_what_a_script_puts_into_the_same_place_stays():
    """And what it then calls of ours does nothing any more."""
    calls = []

    class Model(nn.Linear):
        pass

    def noting(theirs):
        return lambda *given: (calls.append("ours"), theirs(*given))[1]

    patches = hooks.Patches(Guard(print))
    patches.replace(Model, "eval", noting)
    standing = vars(Model)["eval"]
    assert pickle.loads(pickle.dumps(standing)) is nn.Module.eval  # for who writes a class by what it holds

    def own(module):
        calls.append("own")
        return standing(module)

    Model.eval = own
    module = Model(1, 1).eval()
    patches.restore()
    assert Model.eval is own
    assert module.train().eval() is module
    assert not module.training
    assert calls == ["own", "ours", "own"]
    patches.replace(Model, "eval", noting)
    patches.restore()
    assert Model.eval is own
