"""GPUs on which Vivace does not train, and torch does: jobs use the processor, and every verb says so."""

import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch

import vivace
from vivace.command.progress import CompressProgress
from vivace.inspection import gather
from vivace.inspection.facts import Facts, TorchBuild
from vivace.inspection.table import _rows
from vivace.live.answering import searched
from vivace.live.ending import document_of, said
from vivace.live.refusals import why_left_alone
from vivace.pages.answer import lines
from vivace.plan import Plan
from vivace.profiling import judge
from vivace.session.opening import training_device
from vivace.testing import TINY_JOBS

SENTENCES = {
    "xpu": "Vivace does not train on Intel GPUs yet; it uses the processor",
    "mps": "Vivace does not train on Apple GPUs yet; it uses the processor",
}
FACTS = {
    "xpu": Facts(TorchBuild("2.15.0+xpu", xpu="2025.2"), bus=(("intel", "0000:03:00.0"),)),
    "mps": Facts(TorchBuild("2.15.0"), system="Darwin", processor="arm64"),
}
CEILINGS = {"matmul_fp32": 1e11, "copy_device": 1e10}


@pytest.fixture(params=SENTENCES)
def kind(request, monkeypatch):
    """A machine with such a GPU, and a torch that reaches it."""
    monkeypatch.setattr(gather, "gather_facts", lambda: FACTS[request.param])
    for module in (torch.xpu, torch.backends.mps):
        monkeypatch.setattr(module, "is_available", functools.cache(lambda: True))  # as torch's own are
    return request.param


class Heard(Exception):
    """A notice, which a listener raises so that the verb goes no further."""


def raised(event):
    if event.kind == "notice":
        raise Heard(event.payload["text"])


def test_the_processor_trains_and_inspect_says_why(kind):
    machine = vivace.inspect()
    assert training_device(machine).type == "cpu"
    assert machine.passed_over == SENTENCES[kind]
    reason = SENTENCES[kind].partition(";")[0]
    assert [found.problem for found in machine.findings][:1] == [reason]
    row = next(row for row in machine.backends if row.name == kind)
    assert (row.torch, row.reason) == (False, reason)
    told = [text for name, text in _rows(machine) if name in (kind, f"by {kind}")]
    assert len(told) == 2
    assert all(reason in text and "torch trains on it" not in text for text in told)
    assert not any("XPU" in found.next for found in machine.findings)


def test_tune_and_verify_say_so_before_they_begin(kind, tmp_path):
    job = TINY_JOBS["mlp"]()
    with pytest.raises(Heard) as heard:
        vivace.tune(job, out=tmp_path, on_event=raised)
    assert str(heard.value) == SENTENCES[kind]
    with pytest.raises(Heard) as heard:
        vivace.verify(job, Plan.from_dict({"channels_last": {}}), on_event=raised)
    assert str(heard.value) == SENTENCES[kind]


def test_a_run_says_so(kind, tmp_path):
    run = vivace.train(TINY_JOBS["mlp"](), out=tmp_path / "run", max_steps=1)
    assert SENTENCES[kind] in run.notices


def test_a_profile_says_so(kind, tmp_path):
    machine = dataclasses.replace(vivace.inspect(), ceilings=CEILINGS)
    done = vivace.profile(TINY_JOBS["mlp"](), out=tmp_path, machine=machine, timed_seconds=0.1)
    assert done.document["missing"][0] == SENTENCES[kind]


def test_where_an_nvidia_gpu_trains_there_is_nothing_to_say():
    card, own = vivace.machine.Device("cuda", "a card", 1), vivace.machine.Device("cpu", "a processor", 1)
    other = vivace.machine.Device("xpu", "Intel GPU", 0, served=False)
    assert vivace.Machine((card, own, other), 1, {}, {}).passed_over == ""


def test_a_script_that_leaves_a_gpu_idle_by_itself_is_told_so():
    gpu, own = vivace.machine.Device("cuda", "NVIDIA H100", 2**34), vivace.machine.Device("cpu", "Zen", 2**34)
    assert "not on the NVIDIA H100: it puts" in vivace.Machine((gpu, own), 1, {}, {}).idle_gpu
    assert vivace.Machine((own,), 1, {}, {}).idle_gpu == ""


def test_a_sweep_says_so(kind, tmp_path):
    def job(lr):
        return TINY_JOBS["mlp"]()

    with pytest.raises(Heard) as heard:
        vivace.sweep(job, {"lr": (0.1, 0.2)}, trials=1, workers=1, out=tmp_path / "out", on_event=raised)
    assert str(heard.value) == SENTENCES[kind]


def test_compress_says_so(kind, tmp_path, trained, capsys):
    def shown(event):
        with CompressProgress() as progress:
            progress(event)
        raised(event)

    reference, run = trained("job")
    with pytest.raises(Heard) as heard:
        vivace.compress(reference, run=run, out=tmp_path / "out", on_event=shown)
    assert str(heard.value) == SENTENCES[kind]
    assert SENTENCES[kind] in " ".join(capsys.readouterr().err.split())


def test_a_script_on_the_processor_says_so_at_its_end(kind):
    course = SimpleNamespace(machine=vivace.inspect(), device=torch.device("cpu"), comparison=None)
    vars(course).update(plan=Plan(), plan_steps=0, tried=[], reason="", inexact_steps=0, inexact=())
    loop = SimpleNamespace(
        conductor=SimpleNamespace(course=course), rest="", left_alone="", num_steps=9, problems=[]
    )
    loop.spending = SimpleNamespace(elapsed=1.0, own_seconds=0.0, lost=0.0)
    loop.ranks, loop.median_seconds = None, 0.0
    document = document_of(loop)
    searched_on = lines(searched(document | {"report_path": "", "next": "x"}, "x"), 80)
    for told in (said(document, "python train.py"), searched_on):
        assert " ".join(told).replace("vivace: ", "").count(SENTENCES[kind]) == 1
    course.device = torch.device(kind)
    assert not any("processor" in line for line in said(document_of(loop), "python train.py"))


class There(torch.nn.Linear):
    """Its weights are on a device that this machine lacks."""

    def parameters(self, recurse=True):
        return iter([SimpleNamespace(device=self.there)])


@pytest.mark.parametrize("name", SENTENCES)
def test_a_script_that_trains_on_such_a_gpu_is_left_alone_and_its_profile_says_what_it_timed(name):
    model = There(2, 2)
    model.there = torch.device(name)
    reason = SENTENCES[name].partition(";")[0]
    assert why_left_alone(SimpleNamespace(optimizers={}, roots={1: model})) == reason
    assert reason in judge._passed_over(SimpleNamespace(device=name), None)[0]
