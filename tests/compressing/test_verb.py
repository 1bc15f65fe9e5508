"""`vivace compress` from a run to a page: with its packages, without them, and where nothing is better."""

import contextlib
import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vivace
from vivace.compressing import bench, finding, searching
from vivace.compressing.answering import answer
from vivace.compressing.page import front
from vivace.errors import FolderError, InputError, JobError, Refused
from vivace.files import take_lock
from vivace.ledger import Ratio
from vivace.measuring.paired import Comparison
from vivace.processes.launch import Source
from vivace.serving.files import digest
from vivace.serving.forms import BY_NAME

DEAF = """
import torch
import vivace

def metric(model, batches):
    for images, _ in batches:
        model(images)
    return 0.9

def data():
    return [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(4)]

job = vivace.Job(
    model=lambda: torch.nn.Linear(4, 1),
    data=data,
    loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    metric=metric,
    validation=data,
)
"""
FEW = ("eager_fp32", "onnx_fp32", "openvino_int8", "eager_bf16")
WITHOUT = """
import json
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("onnx", "onnxruntime", "onnxscript", "openvino", "nncf", "torchao"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
from vivace.serving.forms import FORMS
print(json.dumps({form.name: form.missing() for form in FORMS}))
"""


@pytest.fixture
def quick(monkeypatch):
    """Few forms, timed shortly: what is decided may be anything, and must be told."""
    monkeypatch.setattr(finding, "FORMS", tuple(BY_NAME[name] for name in FEW))
    monkeypatch.setattr(bench.Bench, "beside", lambda *_: [])
    for name in ("LOOK_SECONDS", "TIMED_SECONDS", "CONFIRMED_SECONDS"):
        monkeypatch.setattr(bench, name, 1.0)


def twice_as_fast(reference, candidate, **_):
    """What a comparison finds on a machine where every form is twice as fast."""
    reference.block(2)
    candidate.block(2)
    return Comparison(Ratio(2.0, 1.95, 2.05), ())


@pytest.fixture
def steady(quick, monkeypatch):
    """Every form is twice as fast, whatever else this machine does meanwhile."""
    monkeypatch.setattr(bench, "compare", twice_as_fast)


@pytest.fixture(scope="module")
def compressed(trained, tmp_path_factory):
    """One result for the tests that look at it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finding, "FORMS", tuple(BY_NAME[name] for name in FEW))
        patch.setattr(bench, "compare", twice_as_fast)
        patch.setattr(searching, "BESIDE", ())  # compiling takes longer than all the rest
        reference, run = trained("job")
        heard = []
        folder = tmp_path_factory.mktemp("compressed")
        found = vivace.compress(
            reference, run=run, margin="20%", batch="1,4", budget="max", out=folder, on_event=heard.append
        )
    return found, folder, heard


def test_every_form_is_measured_or_says_why_not(compressed):
    found, _, heard = compressed
    assert [one.name for one in found.tried] == list(FEW)
    for one in found.tried[1:]:
        assert one.ratio is not None or one.reason
        assert one.status in ("kept", "undecided"), one.reason
        assert one.bytes
        if one.status == "kept":
            assert one.ratio.low > 1.0
    assert {event.payload["form"] for event in heard if event.kind == "form_begin"} == set(FEW[1:])


def test_it_took_effect(compressed):
    effects = {one.name: one.effect for one in compressed[0].tried}
    assert effects["eager_fp32"] == {"fp32": 2}
    assert effects["eager_bf16"] == {"bf16": 2}
    assert effects["onnx_fp32"] == {"fp32": 2}
    assert effects["openvino_int8"].get("int8", 0) >= 1


def test_the_best_is_timed_at_every_batch_beside_the_model_as_it_is(compressed):
    found, folder, _ = compressed
    rows = [(one.name, one.batch) for one in found.beside]
    assert rows == [(name, batch) for batch in (1, 4) for name in ("eager_fp32", found.chosen)]
    assert all(0 < one.p50 <= one.p99 for one in found.beside)
    assert [one.ratio.estimate for one in found.beside] == [1.0, 2.0, 1.0, 2.0]
    assert found.batch == 1
    document = json.loads((folder / "compress.json").read_text())
    assert [one["samples_per_second"] > 0 for one in document["beside"]] == [True] * 4
    assert "Latency and throughput" in (folder / "compress.html").read_text()


@pytest.mark.parametrize("name", ["trained_plan", pytest.param("compiled_default", marks=pytest.mark.slow)])
def test_what_it_is_compared_with_is_served_in_a_process_of_its_own(trained, tmp_path, monkeypatch, name):
    monkeypatch.setattr(bench, "compare", twice_as_fast)
    reference, run = trained("job")
    run = shutil.copytree(run, tmp_path / "run")
    document = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**document, "plan": {"bf16_autocast": {}}}))
    one = bench.Bench(Source(reference), str(run), tmp_path, tmp_path, tmp_path / "log", 2)
    with contextlib.closing(one):
        one.begin()
        rows = one.beside([BY_NAME[name]], 2)
    assert [(row.name, row.reason) for row in rows] == [("eager_fp32", ""), (name, "")]
    assert all(row.calls > 0 and row.samples_per_second > 0 for row in rows)


def test_the_same_numbers_lie_within_rounding_and_others_are_told_apart(compressed):
    worst = {one.name: one.checks[0]["envelopes"] for one in compressed[0].tried[1:]}
    assert worst["onnx_fp32"] < 1.0
    (check,) = (one.checks[0] for one in compressed[0].tried if one.name == "eager_bf16")
    assert check["largest"] > 1e-4


def test_what_lies_in_the_folder(compressed):
    found, folder, _ = compressed
    document = json.loads((folder / "compress.json").read_text())
    assert document["chosen"] == found.chosen
    assert document["subject"]["metric"] == found.subject["metric"]
    assert 0 < document["margin"] == pytest.approx(0.2 * found.subject["metric"])
    page = (folder / "compress.html").read_text()
    assert all(name in page for name in FEW)
    for one in found.tried:
        if one.file and one.status in ("kept", "undecided"):
            assert digest(folder / "forms" / one.file) == one.sha256
    assert found.reference in front(found) or any(one.p50 for one in front(found))


def test_the_answer_is_short_and_says_what_comes_next(compressed):
    found, _, _ = compressed
    told = answer(found)
    assert len(told.parts) == len(FEW) - 1
    assert "2.00\N{MULTIPLICATION SIGN} as fast" in told.title
    assert told.same_kept
    assert told.next[0].startswith("vivace export")
    assert found.outcome == "better"


def test_without_its_packages_each_form_is_named_and_the_search_goes_on(
    trained, tmp_path, quick, monkeypatch
):
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    lacking = json.loads(done.stdout)
    assert lacking["onnx_fp32"] == ["onnx", "onnxscript", "onnxruntime"]
    assert lacking["openvino_int8"] == ["onnx", "onnxscript", "openvino", "nncf"]
    assert lacking["compiled_int8"] == ["torchao"]
    assert lacking["eager_bf16"] == lacking["aoti_fp32"] == []
    monkeypatch.setattr("vivace.serving.forms._is_installed", lambda name: False)
    reference, run = trained("job")
    found = vivace.compress(reference, run=run, out=tmp_path)
    assert [one.status for one in found.tried if one.name in ("onnx_fp32", "openvino_int8")] == [
        "missing"
    ] * 2
    assert "pip install 'vivace[compress]'" in found.tried[1].reason
    assert found.tried[3].status != "missing"
    assert any("packages are missing" in note for note in answer(found).notes)


def test_an_interrupted_search_keeps_what_it_has_and_goes_on(trained, tmp_path, steady, monkeypatch):
    real, attempted = bench.Bench.attempt, []

    def attempt(self, form, **options):
        attempted.append(form.name)
        if form.name == "openvino_int8" and len(attempted) < 4:
            raise KeyboardInterrupt
        return real(self, form, **options)

    monkeypatch.setattr(bench.Bench, "attempt", attempt)
    reference, run = trained("job")
    found = vivace.compress(reference, run=run, margin=0.5, out=tmp_path)
    tried = [one.name for one in found.tried]
    assert attempted[0] == "onnx_fp32"
    assert set(tried[:2]) == {"eager_fp32", "onnx_fp32"}
    assert "openvino_int8" not in tried
    assert found.tried[0].p50 > 0
    assert found.exit_code == 130
    assert json.loads((tmp_path / "compress.json").read_text())["interrupted"] is True
    told = answer(found)
    assert told.notes[0].startswith("interrupted: ")
    assert told.tone == "open"
    assert any("the margin of 0.5 is" in note for note in told.notes)
    assert told.next[-1].endswith("--resume")
    begun = len(attempted)
    attempted.extend([""] * 4)
    found = vivace.compress(reference, run=run, margin=0.5, out=tmp_path, resume=True)
    assert not set(attempted[begun:]) & set(tried)
    assert found.exit_code == 0
    assert {"eager_fp32", "onnx_fp32", "openvino_int8"} <= {one.name for one in found.tried if one.ratio}
    with pytest.raises(InputError, match="has batch 1, not 2"):
        vivace.compress(reference, run=run, margin=0.5, batch=2, out=tmp_path, resume=True)


def test_a_file_that_has_changed_since_it_was_judged_is_made_anew(trained, tmp_path, steady, monkeypatch):
    monkeypatch.setattr(finding, "FORMS", (BY_NAME["eager_fp32"], BY_NAME["onnx_fp32"]))
    reference, run = trained("job")
    first = vivace.compress(reference, run=run, out=tmp_path)
    file = tmp_path / "forms" / "onnx_fp32.onnx"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    again = vivace.compress(reference, run=run, out=tmp_path, resume=True)
    assert again.chosen == first.chosen == "onnx_fp32"
    assert file.stat().st_size == len(whole) == again.winner.bytes
    assert digest(file) == again.winner.sha256


def test_what_another_version_of_a_runtime_gave_is_tried_anew(tmp_path):
    one = bench.outcome_of(BY_NAME["onnx_fp32"], "failed", "it cannot read the file")
    assert finding._still_holds(one, tmp_path)
    older = dataclasses.replace(one, versions={**one.versions, "onnxruntime": "1.0"})
    assert not finding._still_holds(older, tmp_path)


def test_a_metric_that_would_let_any_form_pass_is_refused(tmp_path):
    """It calls the model, and says the same whatever that returns."""
    (tmp_path / "job.py").write_text(DEAF)
    run = tmp_path / "run"
    vivace.train(f"{tmp_path / 'job.py'}:job", out=run)
    with pytest.raises(Refused, match=r"metric is 0\.9 whatever the model returns"):
        vivace.compress(f"{tmp_path / 'job.py'}:job", run=run, out=tmp_path / "out")


def test_where_no_metric_can_tell_the_same_numbers_are_kept(trained, tmp_path, steady, monkeypatch):
    """Two batches, each with one loss, are too few for an interval; rounding alone decides."""
    monkeypatch.setattr(finding, "FORMS", tuple(BY_NAME[name] for name in ("eager_fp32", "onnx_fp32")))
    reference, run = trained("losing")
    found = vivace.compress(reference, run=run, out=tmp_path)
    one = found.tried[1]
    assert (one.status, one.change) == ("kept", None), one.reason
    assert "Same model: yes, to rounding" in answer(found).same


def test_what_the_metric_does_not_use_may_not_be_another_models(trained, tmp_path, steady, monkeypatch):
    monkeypatch.setattr(finding, "FORMS", (BY_NAME["eager_fp32"], BY_NAME["eager_bf16"]))
    reference, run = trained("wide")
    found = vivace.compress(reference, run=run, margin="60%", out=tmp_path)
    assert found.chosen == "eager_bf16", found.tried[1].reason
    assert any("the metric does not use 'output['size']'" in note for note in answer(found).notes)
    real = bench.read_arrays

    def spoilt(path):
        arrays = real(path)
        return [[label, -size] for label, size in arrays] if "bf16" in path.name else arrays

    monkeypatch.setattr(bench, "read_arrays", spoilt)
    found = vivace.compress(reference, run=run, margin="60%", out=tmp_path)
    assert found.tried[1].status == "refused"
    assert "the metric does not use 'output['size']', which is off by" in found.tried[1].reason


def test_a_metric_and_a_margin_that_are_not_what_was_thought_are_told(trained, tmp_path, steady, monkeypatch):
    monkeypatch.setattr(finding, "FORMS", (BY_NAME["eager_fp32"], BY_NAME["eager_bf16"]))
    reference, run = trained("job")
    shutil.copytree(run, tmp_path / "run")
    document = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps({**document, "metric": 0.123}))
    found = vivace.compress(reference, run=tmp_path / "run", margin=0.5, out=tmp_path / "out")
    assert any("accuracy was 0.123 when the run ended, and is" in note for note in found.notes)
    assert any("the margin of 0.5 is" in note for note in found.notes)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"objective": "speed"}, "latency or throughput or size"),
        ({"margin": "lots"}, "the margin is 'lots'; it must be a share"),
        ({"batch": 0}, "batch must be 1 or more"),
        ({"batch": "1,many"}, "or several such as 1,8,32; not 1,many"),
        ({"run": "nowhere"}, "no training that has ended"),
        ({"budget": "quick"}, "it must be fast, balanced, max, auto, a time such as 5m, or seconds"),
    ],
)
def test_bad_input(trained, tmp_path, options, sentence):
    reference, run = trained("job")
    with pytest.raises(InputError, match=sentence):
        vivace.compress(reference, out=tmp_path / "out", **{"run": run, **options})
    assert not Path(tmp_path / "out").exists()


def test_a_job_that_cannot_be_loaded_leaves_the_result_before(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"job": "x.py:job", "steps": 1}))
    before = [tmp_path / "out" / name for name in ("compress.json", "forms.jsonl", "forms/x.onnx", "lock")]
    (tmp_path / "out" / "forms").mkdir(parents=True)
    for file in before:
        file.write_text("")
    with pytest.raises(JobError, match="nowhere"):
        vivace.compress("nowhere.py:job", run=tmp_path, out=tmp_path / "out")
    assert all(file.exists() for file in before)


def test_a_persons_own_folder_stays(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"job": "x.py:job", "steps": 1}))
    theirs = tmp_path / "out" / "pruned" / "run.json"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("theirs")
    with pytest.raises(FolderError, match=r"is not empty \(pruned\): name another with --out"):
        vivace.compress("x.py:job", run=tmp_path, out=tmp_path / "out")
    assert theirs.read_text() == "theirs"


def test_two_searches_do_not_share_a_folder(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"job": "x.py:job", "steps": 1}))
    folder = tmp_path / "out"
    (folder / "forms").mkdir(parents=True)
    (folder / "forms" / "onnx_fp32.onnx").write_text("the other's")
    with take_lock(folder, "compress"), pytest.raises(FolderError, match="another compress is running"):
        vivace.compress("x.py:job", run=tmp_path, out=folder)
    assert (folder / "forms" / "onnx_fp32.onnx").exists()


def test_the_command_that_goes_on_asks_for_the_same():
    wish = finding._Wish("a.py:job", Path("run"), "1%", "size", "1,8", "max", Path("out"), "5m")
    told = "vivace compress a.py:job --run run --margin 1% --for size --batch 1,8 --budget max --finetune 5m"
    assert wish.go_on == f"{told} --out out --resume"


def test_auto_is_a_tenth_of_the_training():
    assert finding.auto_budget(30.0) == 120.0
    assert finding.auto_budget(7200.0) == 720.0
    assert finding.auto_budget(1e6) == 3600.0
    assert finding.auto_budget(None) == 600.0
