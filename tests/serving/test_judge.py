"""The metric of a form, from its outputs alone, on the calls that the metric makes."""

import json

import numpy
import pytest
import torch

from vivace.errors import Refused
from vivace.job import load
from vivace.serving.calls import Call, Calls, Flat, Recording, read_arrays, record, write_arrays
from vivace.serving.judge import Judge, Replay
from vivace.serving.proof import BATCHES, pieces
from vivace.serving.trained import load_trained


@pytest.fixture
def judge(trained, tmp_path):
    def make(name):
        reference, folder = trained(name)
        (tmp_path / name).mkdir()
        found = Judge(load(reference), str(folder), str(tmp_path / name))
        return found, found.record(), tmp_path / name

    return make


def outputs_of(judge, change):
    """The model's own outputs on the recorded calls, each changed."""
    return [[change(array) for array in arrays] for arrays in judge._theirs]


def test_the_recorded_metric_is_that_of_the_run(judge, trained):
    _, facts, folder = judge("job")
    run = json.loads((trained("job")[1] / "run.json").read_text())
    assert facts["metric"] == run["metric"]
    assert facts["samples"] == 70
    assert facts["calibrated_on"] == "training"
    assert facts["outputs"] == ["output"]
    calls = Calls.load(folder)
    assert [len(arrays[0]) for arrays in calls.inputs] == [32, 32, 6]
    assert calls.dynamic == ((0,),)


def test_a_form_that_returns_the_same_loses_nothing(judge, tmp_path):
    found, facts, _ = judge("job")
    write_arrays(tmp_path / "same.npz", outputs_of(found, lambda array: array))
    change = found.change(str(tmp_path / "same.npz"), 0.1)
    assert change["value"] == facts["metric"]
    assert change["kept"] is True
    assert "sample by sample" in change["method"]


def test_a_form_that_is_wrong_is_found(judge, tmp_path):
    found, facts, _ = judge("job")
    write_arrays(tmp_path / "wrong.npz", outputs_of(found, lambda array: -array))
    change = found.change(str(tmp_path / "wrong.npz"), 0.1)
    assert change["value"] < facts["metric"] - 0.3
    assert change["kept"] is False


def test_what_has_as_many_rows_as_a_batch_has_samples_is_no_row_of_one():
    """Here a prototype of each of five classes: a part of a batch of five has no part of them."""
    numbers, prototypes = torch.arange(24.0).view(8, 3), torch.rand(5, 3)
    batches = [numbers[:5], numbers[5:]]
    calls = [[Call(((batch,), {}), (2 * batch, prototypes))] for batch in batches]
    outputs = [[tensor.numpy() for tensor in call.outputs] for (call,) in calls]
    stand_in = Replay(torch.nn.Identity(), Recording(batches, calls, 0.0, True), outputs)
    stand_in.turn_to(0, slice(1, 3))
    doubled, told = stand_in(batches[0][1:3])
    assert torch.equal(doubled, 2 * batches[0][1:3])
    assert told.shape == prototypes.shape
    assert told.isnan().all()
    stand_in.turn_to(0, None)
    assert torch.equal(stand_in(batches[0])[1], prototypes)


def test_a_metric_of_all_samples_together(judge, tmp_path):
    found, facts, _ = judge("whole")
    write_arrays(tmp_path / "wrong.npz", outputs_of(found, lambda array: numpy.roll(array, 1, axis=1)))
    change = found.change(str(tmp_path / "wrong.npz"), 0.1)
    assert change["value"] < facts["metric"]
    assert change["kept"] is False
    assert "jackknife" in change["method"]


def test_calls_with_mappings_and_keywords(judge, tmp_path):
    found, _, folder = judge("mapping")
    assert found.recording.calls[0][0].given[1].keys() == {"scale"}
    calls = Calls.load(folder)
    assert calls.dynamic == ((0,), (0,))
    flat = Flat(found.model, found.recording.calls[0][0].given)
    with torch.no_grad():
        returned = flat(*map(torch.from_numpy, calls.inputs[0]))
    assert [tuple(tensor.shape) for tensor in returned] == [(32, 3), (32,)]
    write_arrays(tmp_path / "same.npz", outputs_of(found, lambda array: array))
    assert found.change(str(tmp_path / "same.npz"), 0.1)["kept"] is True


def test_a_metric_that_feeds_outputs_back_is_refused(judge, tmp_path):
    found, _, _ = judge("fed_back")
    write_arrays(tmp_path / "other.npz", outputs_of(found, lambda array: array + 1))
    with pytest.raises(Refused, match="depends on its outputs"):
        found.change(str(tmp_path / "other.npz"), 0.1)


def test_a_metric_that_never_calls_the_model(trained):
    reference, folder = trained("never_called")
    job = load(reference)
    with pytest.raises(Refused, match="never calls the model"):
        record(job, load_trained(job, folder)[0])


def test_calls_of_any_size_come_from_the_persons_samples(judge):
    _, _, folder = judge("job")
    calls = Calls.load(folder)
    rows = numpy.concatenate([arrays[0] for arrays in calls.inputs])
    assert numpy.array_equal(calls.sample(5, 30)[0], rows[30:35])
    assert numpy.array_equal(calls.sample(3, 69)[0], rows[[69, 0, 1]])
    whole, *asked = pieces(calls)
    assert numpy.array_equal(whole[0], rows[:32])
    assert numpy.array_equal(numpy.concatenate([arrays[0] for arrays in asked]), rows)
    assert {len(arrays[0]) for arrays in asked} >= set(BATCHES)


def test_arrays_survive_their_file(tmp_path):
    calls = [[numpy.arange(3), numpy.ones((2, 2), dtype=numpy.float32)] for _ in range(12)]
    write_arrays(tmp_path / "calls.npz", calls)
    found = read_arrays(tmp_path / "calls.npz")
    assert all(
        numpy.array_equal(a, b) for x, y in zip(calls, found, strict=True) for a, b in zip(x, y, strict=True)
    )
