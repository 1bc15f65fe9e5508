"""Models that are trained further, from the search to an export: only where that pays."""

import json
from types import SimpleNamespace

import pytest
import torch

import vivace
from vivace.compressing import bench, finding, further
from vivace.errors import Diverged, InputError, Refused
from vivace.ledger import Ratio
from vivace.measuring.paired import Comparison
from vivace.serving.forms import BY_NAME


@pytest.fixture
def measured(monkeypatch):
    """A function that sets how many times as fast the whole and the narrower model's forms are."""

    def give(whole, narrow, *forms):
        monkeypatch.setattr(finding, "FORMS", tuple(BY_NAME[name] for name in ("eager_fp32", *forms)))

        def compare(reference, candidate, **_):
            reference.block(2)
            candidate.block(2)
            speed = narrow if candidate.form.further else whole
            return Comparison(Ratio(speed, 0.99 * speed, 1.01 * speed), ())

        monkeypatch.setattr(bench, "compare", compare)
        monkeypatch.setattr(bench.Bench, "beside", lambda *_: [])

    return give


def test_what_is_smaller_and_not_faster_is_not_trained(trained, tmp_path, measured):
    measured(1.0, 1.02)
    reference, run = trained("wide")
    found = vivace.compress(reference, run=run, margin="20%", finetune="1s", out=tmp_path)
    narrow = found.tried[-1]
    assert (narrow.name, narrow.status) == ("pruned_eager_fp32", "refused")
    assert "smaller (" in narrow.reason
    assert "it was not trained" in narrow.reason
    assert not (tmp_path / "pruned").exists()
    assert found.chosen == "eager_fp32"


def test_what_is_faster_is_trained_judged_and_exported(trained, tmp_path, measured):
    measured(2.0, 4.0, "onnx_fp32")
    reference, run = trained("wide")
    found = vivace.compress(reference, run=run, margin="40%", finetune="60s", out=tmp_path)
    narrow = found.tried[-1]
    trained_further = json.loads((tmp_path / "pruned" / "run.json").read_text())
    assert trained_further["steps"] > 0
    assert trained_further["job"] == narrow.job == f"{tmp_path / 'pruned.py'}:job"
    assert narrow.weights
    assert narrow.change["samples"] == 70
    assert narrow.bytes < 0.6 * found.tried[1].bytes
    assert narrow.status == "kept", narrow.reason
    assert found.chosen == "pruned_onnx_fp32"
    made = vivace.export(tmp_path, to="onnx", out=tmp_path.parent / f"{tmp_path.name}-export")
    assert made.kept, made.reason
    assert made.form == "pruned_onnx_fp32"
    assert made.change is None, "rounding alone parts the file from the narrower model"
    assert made.layers["checks"]


def test_a_file_that_others_are_made_from_is_of_the_trained_weights(trained, tmp_path, measured, monkeypatch):
    """OpenVINO's files are made from ONNX's, of which one of the untrained model lies there."""
    measured(2.0, 4.0, "openvino_fp32")
    reference, run = trained("wide")
    made, write = [], bench.Bench.write

    def noted(self, form):
        base = self.files / "pruned_onnx_fp32.onnx"
        made.append((form.name, self.further[form.further][1] != "" if form.further else None, base.exists()))
        return write(self, form)

    monkeypatch.setattr(bench.Bench, "write", noted)
    found = vivace.compress(reference, run=run, margin="40%", finetune="60s", out=tmp_path)
    assert made[1:] == [("pruned_openvino_fp32", False, False), ("pruned_openvino_fp32", True, False)]
    assert found.tried[-1].run == str(tmp_path / "pruned")


def test_whatever_befalls_its_training_the_rest_stands(trained, tmp_path, measured, monkeypatch):
    measured(2.0, 4.0, "onnx_fp32")
    reference, run = trained("wide")
    error = Diverged("the loss is nan")

    def fails(self, form, meant, best):
        raise error

    monkeypatch.setattr(further.Narrowing, "_judged", fails)
    found = vivace.compress(reference, run=run, margin="40%", finetune="60s", out=tmp_path)
    assert (found.tried[-1].status, found.tried[-1].reason) == ("failed", str(error))
    assert found.chosen == "onnx_fp32"
    assert (tmp_path / "compress.json").is_file()


def test_for_size_what_is_smaller_counts(trained, tmp_path, measured):
    measured(1.0, 0.9, "onnx_fp32")
    reference, run = trained("wide")
    options = {"objective": "size", "finetune": "5s", "out": tmp_path}
    narrow = vivace.compress(reference, run=run, margin="60%", **options).tried[-1]
    assert narrow.run == str(tmp_path / "pruned"), narrow.reason
    assert narrow.status in ("kept", "undecided")


def test_what_cannot_be_trained_further(trained, tmp_path):
    reference, run = trained("wide")
    with pytest.raises(InputError, match="finetune is 'long'; it must be a time such as 10min"):
        vivace.compress(reference, run=run, finetune="long", out=tmp_path / "a")
    with pytest.raises(InputError, match="by its name"):
        vivace.compress(vivace.job.load(reference), run=run, finetune="1s", out=tmp_path / "b")


def test_a_plan_that_does_not_act_on_the_narrower_model_is_told(monkeypatch):
    plans, seeds = [], set()

    def train(job, plan, seed, **_):
        plans.append(plan.names)
        seeds.add(seed)
        if plan.names:
            raise Refused("no convolution is left to act on")

    monkeypatch.setattr(further, "train", train)
    monkeypatch.setattr(further, "load_trained", lambda job, run: (None, SimpleNamespace(sha256="ab12")))
    trainer = further.Trainer(None, threads=torch.get_num_threads())
    told = trainer.train("job.py:job", {"channels_last": {}}, "run", 1.0, 7)
    assert told == {"declined": "no convolution is left to act on", "weights": "ab12"}
    assert plans == [("channels_last",), ()]
    assert trainer.train("job.py:job", {}, "run", 1.0, 7)["declined"] == ""
    assert seeds == {7}, "data that are split at random must be split as in the model's own run"


def test_int8_that_loses_too_much_is_trained_with_its_rounding_and_then_kept(trained, tmp_path, measured):
    measured(2.0, 2.0, "onnx_int8")
    reference, run = trained("outlying")
    found = vivace.compress(reference, run=run, margin="15%", finetune="60s", out=tmp_path)
    names = {one.name: one for one in found.tried}
    before, after = names["onnx_int8"], names["retrained_onnx_int8"]
    assert (before.status, before.change["kept"]) == ("refused", False), before.reason
    assert after.job == f"{tmp_path / 'retrained.py'}:job"
    assert after.change["value"] > before.change["value"] + 0.2
    assert after.effect.get("int8"), "nothing ran in int8"
    assert after.status in ("kept", "undecided"), after.reason
    made = vivace.export(tmp_path, to="onnx", out=tmp_path.parent / f"{tmp_path.name}-export")
    assert made.kept, made.reason


def test_int8_that_is_refused_for_another_reason_than_its_metric_is_not_trained(tmp_path):
    """As for an output that the metric does not use, on which training would not be judged either."""
    way = further.Retraining(None, "job.py:job", tmp_path, 1.0, None, by_size=False)
    best = bench.outcome_of(BY_NAME["onnx_fp32"], "kept", ratio=Ratio(1.5, 1.4, 1.6))
    fast = {"ratio": Ratio(3.0, 2.9, 3.1)}
    lost, unseen = (
        bench.outcome_of(BY_NAME["onnx_int8"], "refused", change={"kept": kept}, **fast)
        for kept in (False, True)
    )
    assert way.meant([best, lost], best) is lost
    assert way.meant([best, unseen], best) is None


def test_int8_that_is_no_faster_than_the_best_is_not_trained(trained, tmp_path, measured):
    measured(1.0, 1.0, "onnx_int8")
    reference, run = trained("outlying")
    found = vivace.compress(reference, run=run, margin="15%", finetune="60s", out=tmp_path)
    assert "retrained_onnx_int8" not in [one.name for one in found.tried]
    assert not (tmp_path / "retrained").exists()


def test_loading_the_job_is_no_part_of_the_time_for_training(monkeypatch):
    """A deadline counts from the process's first second, and loading may take as long as a short one."""
    asked = []
    monkeypatch.setattr(further, "train", lambda *_, **options: asked.append(options["deadline_seconds"]))
    monkeypatch.setattr(further, "load_trained", lambda *_: (None, SimpleNamespace(sha256="")))
    monkeypatch.setattr(further.psutil, "Process", lambda: SimpleNamespace(create_time=lambda: 1000.0))
    monkeypatch.setattr(further.time, "time", lambda: 1007.5)
    trainer = further.Trainer(None, torch.get_num_threads())
    trainer.train("job.py:job", {}, "run", 5.0, 0)
    assert asked == [12.5]
