"""`vivace export`: a file for a runtime, which a fresh process proves to be the model, or not."""

import dataclasses
import errno
import json
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file

import vivace
from vivace import words
from vivace.errors import AnswerIsNo, CheckpointError, ChildFailed, FolderError, InputError, JobError
from vivace.exporting import proving
from vivace.exporting.answering import answer
from vivace.exporting.page import render
from vivace.exporting.source import subject_of
from vivace.files import take_lock
from vivace.pages.answer import in_letters
from vivace.serving.calls import Calls
from vivace.serving.envelope import Check


@pytest.fixture
def spoilt(monkeypatch):
    """A file whose answers are another model's: what a fresh process returns is moved a little."""

    def spoil(change):
        real = proving.answers

        def answers(*arguments):
            returned, facts = real(*arguments)
            return (change(returned) if "told" not in facts else returned), facts

        monkeypatch.setattr(proving, "answers", answers)

    return spoil


@pytest.mark.parametrize("to", ["onnx", "torch"])
def test_the_file_is_the_model(trained, tmp_path, to):
    _, run = trained("job")
    found = vivace.export(run, to=to, out=tmp_path)
    assert found.kept, found.reason
    assert found.exit_code == 0
    assert found.samples == 70
    assert found.batches == (1, 2, 3, 8, 10, 32, 33)
    assert found.checks[0]["envelopes"] < 1.0
    card = json.loads((tmp_path / "model_card.json").read_text())
    assert card["hashes"].keys() == {p.name for p in tmp_path.glob("model.*")} | {"weights.safetensors"}
    (given,) = card["inputs"]
    assert given == {"name": "input_0", "in_forward": "input", "dtype": "float32", "shape": [None, 1, 6, 6]}
    assert found.trained["sha256"] in (tmp_path / "model_card.html").read_text()
    weights = torch.load(run / "model.pt", weights_only=True)
    stored = load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in weights.items())
    assert "Same model: yes" in answer(found).same
    assert found.metric == found.trained["metric"]
    assert found.notes == ()


def test_what_a_model_keeps_for_its_largest_batch_is_no_constant_unseen(trained, tmp_path):
    _, run = trained("growing")
    with pytest.raises(ChildFailed, match="cannot serve"):
        vivace.export(run, to="onnx", out=tmp_path)
    assert not list(tmp_path.glob("model*"))


def test_what_a_model_keeps_of_its_last_batch_is_no_constant(trained, tmp_path):
    """It is traced as it is before its first call, for the file and for its layers."""
    _, run = trained("keeping")
    found = vivace.export(run, to="onnx", out=tmp_path)
    assert found.kept, found.reason
    assert found.layers["checks"], found.layers["reason"]


def test_what_a_model_draws_from_the_files_own_generators_is_the_same_in_each_build(trained, tmp_path):
    _, run = trained("projecting")
    found = vivace.export(run, to="onnx", out=tmp_path)
    assert found.kept, found.reason
    assert found.layers["checks"], found.layers["reason"]


def test_the_persons_own_batch_is_asked_whole():
    """What a model keeps of its first batch may be a constant of that size alone."""
    images = [[numpy.zeros((rows, 2))] for rows in (20, 20, 7)]
    calls = Calls(images, ((0,),), (1, 1, 1), (20, 20, 7))
    assert [len(array) for (array,) in proving.pieces(calls)] == [20, 1, 2, 3, 8, 32, 1]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padded_words_are_computed_by_the_model_too(trained, tmp_path):
    _, run = trained("tagging")
    found = vivace.export(run, to="onnx", out=tmp_path)
    assert found.kept, found.reason
    assert found.layers["checks"], found.layers["reason"]


def test_texts_of_several_lengths_come_in_a_larger_batch_too(tmp_path):
    """A file that takes no more than the largest batch it has seen would pass for the model."""

    class Answering:
        def ask(self, *_, **__): ...

    texts = [[numpy.arange(rows * length).reshape(rows, length)] for rows, length in ((4, 7), (3, 9))]
    calls = Calls(texts, ((0, 1),), (1, 1), (4, 3))
    ((larger,),) = proving._larger(calls, Answering(), tmp_path)
    assert numpy.array_equal(larger, numpy.concatenate([texts[0][0], texts[0][0][:1]]))
    assert {len(array) for (array,) in proving.pieces(calls)} == {1, 2, 3, 4}


def test_a_model_of_a_mapping_and_a_keyword(trained, tmp_path):
    _, run = trained("mapping")
    found = vivace.export(run, to="onnx", out=tmp_path)
    assert found.kept, found.reason
    assert [check["output"] for check in found.checks] == ["output['logits']", "output['mean']"]
    assert [one["shape"] for one in found.inputs] == [[None, 1, 6, 6], [None, 1]]
    told = "input_0 is batch['images'] (any x 1 x 6 x 6), input_1 is scale (any x 1)"
    assert in_letters(dict(answer(found).parts)["its inputs"]) == told


def test_another_models_answers_are_found_and_the_output_named(trained, tmp_path, spoilt):
    spoilt(lambda returned: [[logits, mean * 1.01] for logits, mean in returned])
    _, run = trained("mapping")
    found = vivace.export(run, to="onnx", out=tmp_path)
    assert not found.kept
    assert found.exit_code == AnswerIsNo.exit_code
    assert "output['mean']" in found.reason
    assert "Same model: no" in answer(found).same


def test_a_compressions_form_is_judged_by_the_metric_of_its_own_outputs(trained, tmp_path):
    reference, run = trained("job")
    folder = compressed(tmp_path, reference, run, margin=0.2, status="kept")
    found = vivace.export(folder, to="openvino", out=tmp_path / "out")
    assert found.kept, found.reason
    assert found.form == "openvino_bf16"
    assert found.change["samples"] == 70
    assert "Same accuracy: yes" in answer(found).same


def test_a_metric_that_may_be_lost_is_not_kept():
    lost = {"kept": None}
    kept, reason = proving._answer([Check("output", 0.2)], [], lost)
    assert not kept
    assert "metric" in reason


def compressed(tmp_path, reference, run, *, margin, status, name="openvino_bf16"):
    """The folder of a compression with one form, without measuring."""
    folder = tmp_path / f"compressed-{margin}"
    folder.mkdir()
    one = {
        "name": name,
        "status": status,
        "reason": "too slow",
        "ratio": {"estimate": 2.0},
        "file": "",
    }
    document = {
        "tried": [one],
        "subject": {"trained": {"folder": str(run)}},
        "job": reference,
        "margin": margin,
    }
    (folder / "compress.json").write_text(json.dumps(document))
    return folder


def test_a_form_that_may_not_be_deployed(trained, tmp_path):
    folder = compressed(tmp_path, *trained("job"), margin=0.2, status="refused", name="openvino_fp32")
    with pytest.raises(AnswerIsNo, match="openvino_fp32: too slow"):
        vivace.export(folder, to="openvino", out=tmp_path / "out")


@pytest.mark.parametrize("status", ["slower", "untried", "unmeasured", "missing", "not reached"])
def test_where_no_form_for_the_runtime_was_judged_the_models_own_numbers_go(tmp_path, status):
    folder = compressed(tmp_path, "job.py:job", tmp_path / "run", margin=0.2, status="kept")
    document = json.loads((folder / "compress.json").read_text())
    if status != "not reached":  # as where Ctrl-C came first
        own = {"name": "onnx_fp32", "status": status, "reason": "", "ratio": None, "file": ""}
        document["tried"].append(own)
    (folder / "compress.json").write_text(json.dumps(document))
    subject = subject_of(folder, "onnx")
    assert (subject.form.name, subject.made, subject.margin) == ("onnx_fp32", None, 0.2)
    assert subject_of(folder, "openvino").form.name == "openvino_bf16"


def test_the_form_that_was_chosen_goes_before_a_faster_one(tmp_path):
    folder = compressed(tmp_path, "job.py:job", tmp_path / "run", margin=0.2, status="kept")
    document = json.loads((folder / "compress.json").read_text())
    slower = {"estimate": 1.1, "low": 1.0, "high": 1.2}
    document["tried"].append(document["tried"][0] | {"name": "openvino_int8", "ratio": slower})
    (folder / "compress.json").write_text(json.dumps(document))
    assert subject_of(folder, "openvino").form.name == "openvino_bf16"
    (folder / "compress.json").write_text(json.dumps({**document, "chosen": "openvino_int8"}))
    assert subject_of(folder, "openvino").form.name == "openvino_int8"


def test_a_narrower_form_is_of_its_own_job_and_run(tmp_path):
    folder = compressed(tmp_path, "job.py:job", tmp_path / "run", margin=0.2, status="kept")
    document = json.loads((folder / "compress.json").read_text())
    document["tried"][0] |= {"name": "pruned_openvino_bf16", "job": "pruned.py:job", "run": "narrow"}
    document["tried"][0]["weights"] = "ab12"
    document["batch"] = 8
    (folder / "compress.json").write_text(json.dumps(document))
    subject = subject_of(folder, "openvino")
    assert (subject.form.name, subject.job, subject.run) == (
        "pruned_openvino_bf16",
        "pruned.py:job",
        Path("narrow"),
    )
    assert not subject.form.exact
    assert subject.measured["batch"] == 8
    assert subject.weights == "ab12"


def test_the_card_says_of_which_calls_the_time_is():
    found = carded("openvino_int8", runtime="openvino")
    assert dict(answer(found).facts)["a call of 8 samples"] == "4.10 ms"
    assert "in calls of 8 samples" in render(found)


def test_what_was_moved(tmp_path, monkeypatch):
    """Run and compression together are found; a job's file that is not there is asked for."""
    (tmp_path / "old" / "run").mkdir(parents=True)
    folder = compressed(tmp_path / "old", "job.py:job", tmp_path / "old" / "run", margin=0.2, status="kept")
    document = json.loads((folder / "compress.json").read_text())
    document["page_path"] = str(folder / "compress.html")
    (folder / "compress.json").write_text(json.dumps(document))
    assert subject_of(folder, "openvino").run == tmp_path / "old" / "run"
    (tmp_path / "old").rename(tmp_path / "new")
    folder = tmp_path / "new" / folder.name
    assert subject_of(folder, "openvino").run == tmp_path / "new" / "run"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"of the job 'job.py:job', and there is no file 'job.py' from here"):
        vivace.export(folder, to="openvino", out=tmp_path / "out")


def test_a_changed_file_of_a_compression(trained, tmp_path):
    reference, run = trained("job")
    folder = compressed(tmp_path, reference, run, margin=0.2, status="kept")
    document = json.loads((folder / "compress.json").read_text())
    document["tried"][0] |= {"file": "openvino_bf16.xml", "sha256": "0" * 64}
    (folder / "compress.json").write_text(json.dumps(document))
    (folder / "forms").mkdir()
    (folder / "forms" / "openvino_bf16.xml").write_text("<net/>")
    with pytest.raises(CheckpointError, match="is not the file"):
        vivace.export(folder, to="openvino", out=tmp_path / "out")


def test_a_run_that_was_trained_anew_after_it_was_compressed(trained, tmp_path):
    """The file is of the weights before, and the card would speak of those now."""
    folder = compressed(tmp_path, *trained("job"), margin=0.2, status="kept")
    document = json.loads((folder / "compress.json").read_text())
    document["subject"]["trained"]["sha256"] = "0" * 64
    (folder / "compress.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="holds other weights than vivace compress was given"):
        vivace.export(folder, to="openvino", out=tmp_path / "out")
    assert not list((tmp_path / "out").glob("model*"))


def test_an_output_that_the_metric_does_not_use_is_not_handed_over_unseen(trained, tmp_path, spoilt):
    reference, run = trained("wide")
    folder = compressed(tmp_path, reference, run, margin=0.5, status="kept")
    found = vivace.export(folder, to="openvino", out=tmp_path / "out")
    assert found.kept, found.reason
    assert any("the metric does not use 'output['size']'" in note for note in answer(found).notes)
    spoilt(lambda returned: [[label, -size] for label, size in returned])
    found = vivace.export(folder, to="openvino", out=tmp_path / "out")
    assert not found.kept
    assert found.reason.startswith("the metric does not use 'output['size']', which is off by")


def test_bad_input(trained, tmp_path):
    _, run = trained("job")
    with pytest.raises(InputError, match="onnx, openvino, aoti, torch, not to 'tflite'"):
        vivace.export(run, to="tflite", out=tmp_path / "a")
    with pytest.raises(InputError, match="neither of a vivace compress"):
        vivace.export(tmp_path, to="onnx", out=tmp_path / "b")
    for name, text in (("run.json", "no json"), ("compress.json", 100_000 * "[")):
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match=f"{name}' is damaged: it is no JSON"):
            vivace.export(tmp_path, to="onnx", out=tmp_path / "b")
        (tmp_path / name).unlink()
    with pytest.raises(InputError, match="neither of a vivace compress"):
        vivace.export(tmp_path / (300 * "a"), to="onnx", out=tmp_path / "b")


@pytest.fixture
def run_folder(tmp_path):
    """A run's folder, as far as it is read before anything is loaded."""
    (tmp_path / "run").mkdir()
    (tmp_path / "x.py").write_text("")
    (tmp_path / "run" / "run.json").write_text(json.dumps({"job": str(tmp_path / "x.py:job"), "steps": 1}))
    return tmp_path / "run"


@pytest.fixture
def dying(monkeypatch):
    """An export whose file cannot be served, once it is written."""

    def dies(subject, source, judge, facts, folder, scratch):
        for name in ("model.onnx", "weights.safetensors"):
            (folder / name).write_text("not proven")
        raise ChildFailed("a fresh process cannot serve 'model.onnx'")

    monkeypatch.setattr(proving, "_recorded", lambda *_: {})
    monkeypatch.setattr(proving, "_proven", dies)


@pytest.mark.usefixtures("dying")
def test_nothing_that_is_not_proven_is_left(run_folder, tmp_path):
    with pytest.raises(ChildFailed, match="cannot serve"):
        vivace.export(run_folder, to="onnx", out=tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"export.log", "lock"}


@pytest.mark.usefixtures("dying")
def test_an_export_that_fails_leaves_the_one_before(run_folder, tmp_path):
    before = {name: f"of before: {name}" for name in ("model.pt2", "weights.safetensors", "model_card.json")}
    (tmp_path / "out").mkdir()
    for name, text in (before | {"lock": ""}).items():
        (tmp_path / "out" / name).write_text(text)
    with pytest.raises(ChildFailed, match="cannot serve"):
        vivace.export(run_folder, to="onnx", out=tmp_path / "out")
    assert {name: (tmp_path / "out" / name).read_text() for name in before} == before


def test_sigterm_leaves_no_file_and_no_samples(run_folder, tmp_path, monkeypatch):
    seen = []

    def told_to_end(subject, source, judge, facts, folder, scratch):
        (scratch / "inputs.npz").write_text("a person's samples")
        (folder / "model.onnx").write_text("not proven")
        seen.append(scratch)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(proving, "_recorded", lambda *_: {})
    monkeypatch.setattr(proving, "_proven", told_to_end)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.raises(KeyboardInterrupt):
            vivace.export(run_folder, to="onnx", out=tmp_path / "out")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not seen[0].exists()
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"export.log", "lock"}


def test_an_export_takes_the_place_of_the_one_before(trained, tmp_path):
    """Also of one that was killed: nothing of it is handed over."""
    (tmp_path / "unproven").mkdir()
    for name in ("model.pt2", "model_card.json", "lock", "unproven/model.bin"):
        (tmp_path / name).write_text("of before")
    found = vivace.export(trained("job")[1], to="onnx", out=tmp_path)
    names = {"model.onnx", "weights.safetensors", "model_card.json", "model_card.html", "lock"}
    assert {file.name for file in tmp_path.iterdir()} - {"export.log"} == names
    assert found.file == str(tmp_path / "model.onnx")
    assert json.loads((tmp_path / "model_card.json").read_text())["file"] == found.file


def test_a_state_that_is_no_tensor_is_named_as_left_out(trained, tmp_path):
    found = vivace.export(trained("versioned")[1], to="onnx", out=tmp_path)
    assert found.kept, found.reason
    assert "without '_extra_state' of the state_dict" in "".join(answer(found).notes)
    assert load_file(tmp_path / "weights.safetensors").keys() >= {"inner.0.weight"}


def test_a_model_whose_code_has_changed_since_its_training_is_told(trained, tmp_path):
    """Its file is what the job builds now, and not what was trained."""
    reference, run = trained("job")
    text = "import runpy\nfrom torch import nn\n"
    text += f"scene = runpy.run_path({reference.rpartition(':')[0]!r})\n"
    layers = "(nn.Threshold(9e9, 0) if isinstance(m, nn.ReLU) else m for m in scene['small']())"
    text += f"job = scene['made'](model=lambda: nn.Sequential(*{layers}))\n"
    (tmp_path / "other.py").write_text(text)
    found = vivace.export(run, to="onnx", job=f"{tmp_path / 'other.py'}:job", out=tmp_path / "out")
    before = found.trained["metric"]
    (note,) = answer(found).notes
    assert note.startswith(f"accuracy was {words.number(before)} when the run ended, and is ")
    assert found.metric < before
    assert dict(answer(found).facts)["accuracy"] == words.number(found.metric)


def test_a_job_that_cannot_be_loaded_leaves_the_export_before(run_folder, tmp_path):
    before = [tmp_path / "out" / name for name in ("model.onnx", "model_card.json", "lock")]
    (tmp_path / "out").mkdir()
    for file in before:
        file.write_text("")
    with pytest.raises(JobError, match="nowhere"):
        vivace.export(run_folder, to="onnx", job="nowhere.py:job", out=tmp_path / "out")
    assert all(file.exists() for file in before)


def test_a_full_disk_is_told_as_such(run_folder, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(proving, "_recorded", lambda *_: {})
    monkeypatch.setattr(proving, "_proven", full)
    with pytest.raises(FolderError, match="a disk is full"):
        vivace.export(run_folder, to="onnx", out=tmp_path / "out")


def test_two_exports_do_not_share_a_folder(run_folder, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.onnx").write_text("the other's")
    with take_lock(tmp_path / "out", "export"), pytest.raises(FolderError, match="another export is running"):
        vivace.export(run_folder, to="onnx", out=tmp_path / "out")
    assert (tmp_path / "out" / "model.onnx").read_text() == "the other's"


@pytest.mark.parametrize(
    "name", ["model.py", "model.pt", "model.ckpt", "model.onnx", "model.bin", "weights.safetensors"]
)
def test_a_persons_own_file_in_the_output_folder_stays(run_folder, tmp_path, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("theirs")
    with pytest.raises(FolderError, match=rf"is not empty \({name}\): name another with --out"):
        vivace.export(run_folder, to="onnx", out=tmp_path / "out")
    assert (tmp_path / "out" / name).read_text() == "theirs"


def test_the_call_names_every_input():
    inputs = tuple(
        {"name": f"input_{k}", "in_forward": "x", "dtype": "float32", "shape": [None, 3]} for k in range(2)
    )
    calls = {
        runtime: dict(answer(carded(form, runtime=runtime, inputs=inputs)).parts)["call"]
        for form, runtime in (("onnx_fp32", "onnx"), ("openvino_bf16", "openvino"), ("aoti_fp32", "aoti"))
    }
    assert calls["onnx"].endswith('.run(None, {"input_0": input_0, "input_1": input_1})')
    assert calls["openvino"].endswith('"bf16"})({"input_0": input_0, "input_1": input_1})')
    assert calls["aoti"].endswith("(input_0.contiguous(), input_1.contiguous())")


def test_a_length_that_is_fixed_in_the_file_is_told():
    """As that of texts which were all padded to one; and the outputs are one line, however many."""
    words = {"name": "input_0", "in_forward": "words", "dtype": "int64", "shape": [None, 11]}
    checks = [Check(f"output[{k}]", 0.1 * k, 1e-6).to_dict() for k in range(5)]
    parts = dict(answer(carded("onnx_fp32", inputs=(words,), checks=tuple(checks))).parts)
    assert in_letters(parts["its inputs"]) == "input_0 is words (any x 11)"
    assert parts["its outputs"].startswith("5, the worst (output[4]) off by 0.4 times")
    broken = Check("output[1]", None, problem="its shape is (3,)").to_dict()
    parts = dict(answer(carded("onnx_fp32", kept=False, checks=(*checks, broken))).parts)
    assert parts["its outputs"] == "6, the worst (output[1]) its shape is (3,)"


@pytest.mark.parametrize(("double", "numbers"), [(True, "fp64"), (False, "fp32")])
def test_a_model_in_fp64_is_not_called_fp32(double, numbers):
    known = {"metric": None, "metric_name": "accuracy"}
    facts = {"trained": known, "metric": 0.5, "metric_name": "accuracy", "double": double}
    notes = list(proving._notes(facts, []))
    assert [note.startswith("the model has weights in fp64") for note in notes] == [True] * double
    trained = carded("onnx_fp32").trained | {"numbers": numbers, "plan": {}}
    assert dict(answer(carded("onnx_fp32", trained=trained)).facts)["trained"].endswith(f"strict {numbers}")


def test_a_compiled_form_is_to_be_compiled_again():
    """Its speed was measured so; as the program is written, it is slower than the model as it is."""
    parts = dict(answer(carded("eager_bf16")).parts)
    assert "compile" not in parts["call"]
    assert "before it" not in parts
    parts = dict(answer(carded("compiled_bf16")).parts)
    assert parts["before it"] == "torch._inductor.config.freezing = True"
    assert "torch.compile(torch.export.load(" in parts["call"]
    assert "import" in dict(answer(carded("compiled_int8")).parts)["before it"]


def carded(form, runtime="torch", **changes):
    """A model card of a form that was proven."""
    scene = runpy.run_path(str(Path(__file__).parents[1] / "scenes" / "found.py"))
    found = dataclasses.replace(scene["exported"](), **changes)
    return dataclasses.replace(found, form=form, runtime=runtime, numbers=form.rpartition("_")[2])


def test_what_the_card_says_of_a_compiled_form_in_int8_runs(trained, tmp_path):
    """In a process that knows the file and the card alone; it answers as the proof's own process does."""
    reference, run = trained("job")
    folder = compressed(tmp_path, reference, run, margin=0.5, status="kept", name="compiled_int8")
    found = vivace.export(folder, to="torch", out=tmp_path / "out")
    assert found.kept, found.reason
    parts = dict(answer(found).parts)
    lines = [
        "import torch",
        *parts["before it"].split("; "),
        "input_0 = torch.arange(36.0).reshape(1, 1, 6, 6) / 36",
        'plain = torch.export.load("model.pt2").module()(input_0)',
        parts["call"].replace("torch.no_grad(): ", "torch.no_grad(): found = "),
        "assert torch.allclose(found[0], plain[0], atol=0.1) and not found[0].requires_grad",
    ]
    script = "\n".join(lines)
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path / "out", check=True, timeout=600)


def test_a_missing_package_is_named(trained, tmp_path, monkeypatch):
    monkeypatch.setattr("vivace.serving.forms._is_installed", lambda name: name != "openvino")
    with pytest.raises(InputError, match=r"needs openvino: pip install 'vivace\[compress\]'"):
        vivace.export(trained("job")[1], to="openvino", out=tmp_path)
