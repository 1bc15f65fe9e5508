"""What the metric calls the model with: metrics and models of many habits are recorded, or say why not."""

import runpy
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from vivace.compressing import worker as worker_module
from vivace.compressing.worker import Worker
from vivace.errors import JobError, Refused
from vivace.serving import calls, judge
from vivace.serving.calls import Calls, first_call, outputs_file, read_arrays, record
from vivace.serving.forms import BY_NAME, REFERENCE
from vivace.serving.material import Material
from vivace.serving.serve import in_torch
from vivace.serving.trained import Trained, damaged_of
from vivace.serving.values import padding_computed

SCENE = runpy.run_path(str(Path(__file__).parents[1] / "scenes" / "served.py"))
made, small, pictures = SCENE["made"], SCENE["small"], SCENE["pictures"]


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """A function from a job to the judge of its model as it begins, and what that has recorded."""

    def make(job):
        torch.manual_seed(0)  # a model that guesses all wrong has the same metric by pieces and by batches
        facts = Trained("", "", 1, None, "accuracy", "0" * 64, {})
        monkeypatch.setattr(judge, "load_trained", lambda job, run: (job.model().eval(), facts))
        found = judge.Judge(job, "", str(tmp_path))
        return found, found.record()

    return make


def recorded(metric, model=small, **parts):
    return record(made(metric=metric, model=model, **parts), model().eval())


def test_a_metric_that_ends_before_its_data_do():
    def two_batches(model, batches):
        values = []
        for number, (images, _) in enumerate(batches):
            if number == 2:
                break
            values.append(float(model(images).mean()))
        return sum(values)

    found = recorded(two_batches)
    assert [len(each) for each in found.calls] == [1, 1]
    assert found.samples == 64
    assert found.whole
    assert Calls.of(found).rows == (32, 32)


def test_inputs_and_outputs_in_another_order_of_memory_are_kept_row_by_row(judged, tmp_path):
    """What is compiled ahead of time would misread them."""

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(36, 4)

        def forward(self, rows):
            return self.last(rows).T.contiguous().T

    def metric(model, batches):
        return -sum(float(model(x.flatten(1).T.contiguous().T).square().mean()) for x, _ in batches)

    found, _ = judged(made(model=Turned, metric=metric))
    assert not found.recording.calls[0][0].inputs[0].is_contiguous()
    for kept in (Calls.load(tmp_path).inputs, read_arrays(tmp_path / outputs_file(REFERENCE))):
        assert all(array.flags.c_contiguous for arrays in kept for array in arrays)


def ahead(model, batches):
    return sum(float(model(images).mean()) for images, _ in list(batches))


def every_other(model, batches):
    return sum(float(model(images).mean()) for number, (images, _) in enumerate(batches) if number != 1)


@pytest.mark.parametrize("metric", [ahead, every_other])
def test_a_metric_that_does_not_call_the_model_batch_by_batch_is_refused(metric):
    with pytest.raises(Refused, match="on each batch before it takes the next"):
        recorded(metric)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [(float("nan"), "is nan; it must be a finite number"), (None, "returned a NoneType")],
)
def test_a_metric_that_is_no_number(value, sentence):
    def metric(model, batches):
        for images, _ in batches:
            model(images)
        return value

    with pytest.raises(JobError, match=sentence):
        recorded(metric)


def test_validation_data_without_a_sample():
    empty = [(torch.zeros(0, 1, 6, 6), torch.zeros(0, dtype=torch.int64))]
    with pytest.raises(JobError, match=r"validation\(\) gave no sample"):
        recorded(SCENE["accuracy"], validation=lambda: empty)


class Powered(nn.Module):
    """Takes a number beside its tensor."""

    def __init__(self):
        super().__init__()
        self.inner = small()

    def forward(self, images, power=1, flags=None):
        return self.inner(images) ** power


def test_arguments_that_are_no_tensors_must_stay_the_same():
    def fixed(model, batches):
        return sum(float(model(images, power=2, flags={"deep": [1, None]}).mean()) for images, _ in batches)

    def growing(model, batches):
        return sum(float(model(images, power=n).mean()) for n, (images, _) in enumerate(batches))

    def deep(model, batches):
        return sum(float(model(images, 1, {"k": [n, 2]}).mean()) for n, (images, _) in enumerate(batches))

    assert len(Calls.of(recorded(fixed, Powered)).inputs) == 3
    with pytest.raises(Refused, match="with another 'power' from call to call"):
        Calls.of(recorded(growing, Powered))
    with pytest.raises(Refused, match=r"with another argument 3\['k'\]\[0\] from call to call"):
        Calls.of(recorded(deep, Powered))


class InHalf(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = small()

    def forward(self, images):
        return self.inner(images).bfloat16()


def test_half_precision_is_refused_in_a_sentence(judged):
    with pytest.raises(Refused, match="the model returns a tensor of bfloat16"):
        judged(made(model=InHalf))
    with pytest.raises(Refused, match=r"weights are float16 \('0.weight'\).*ends with .float\(\)"):
        judged(made(model=lambda: small().half()))


def test_a_metric_that_fails_on_one_batch_alone_still_tells_how_the_model_is_called():
    def all_or_nothing(model, batches):
        seen = sum(len(model(images)) for images, _ in batches)
        if seen < 70:
            raise ValueError("only one class is present")
        return 1.0

    job = made(metric=all_or_nothing)
    assert first_call(job, small().eval()).inputs[0].shape == (32, 1, 6, 6)
    with pytest.raises(JobError, match="no metric"):
        first_call(made(metric=None), small().eval())


def test_outputs_that_are_too_large_to_keep_end_the_recording(monkeypatch):
    monkeypatch.setattr(calls, "MOST_BYTES", 20_000)  # all inputs have 11 kB, the outputs of a batch 128 kB
    found = recorded(SCENE["accuracy"], lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 1000)))
    assert len(found.batches) == len(found.calls) == 1
    assert not found.whole


def test_batches_of_arrays_count_towards_what_is_kept(monkeypatch):
    monkeypatch.setattr(calls, "MOST_BYTES", 5_000)  # all inputs have 11 kB

    def arrays():
        return [tuple(part.numpy() for part in batch) for batch in SCENE["data"]()]

    def accuracy(model, batches):
        return SCENE["accuracy"](model, (map(torch.as_tensor, batch) for batch in batches))

    found = recorded(accuracy, validation=arrays)
    assert (len(found.batches), found.whole) == (3, False)  # of four


def test_calls_of_another_size_do_not_fit():
    found = Calls.of(recorded(SCENE["accuracy"]))
    assert found.fit(found)
    large = Calls([[numpy.zeros((4, 1, 9, 9), numpy.float32)]], ((0,),), (1,), (4,))
    assert not large.fit(found)
    assert not found.fit(large)
    assert large.fit(Calls(found.inputs, ((0, 2, 3),), found.per_batch, found.rows))


def test_ranges_of_int8_come_from_validation_data_where_training_data_have_another_size(judged):
    def cropped():
        return [(images[..., :5], labels) for images, labels in SCENE["data"]()]

    def model():
        return nn.Sequential(nn.AdaptiveAvgPool2d((6, 1)), nn.Flatten(), nn.Linear(6, 3))

    assert judged(made(model=model))[1]["calibrated_on"] == "training"
    assert judged(made(model=model, data=cropped))[1]["calibrated_on"] == "validation"


def test_samples_that_are_trained_on_and_judged_are_counted(judged):
    assert judged(made())[1]["num_shared"] == 0
    both = DataLoader(ConcatDataset([pictures(30, 0), pictures(70, 1)]), batch_size=25, shuffle=True)
    assert judged(made(data=lambda: both))[1]["num_shared"] == 70


def test_ranges_of_int8_come_from_256_samples_however_small_the_batches(judged, tmp_path):
    loader = DataLoader(pictures(300, 0), batch_size=10)
    assert judged(made(data=lambda: loader))[1]["calibrated_on"] == "training"
    assert sum(Calls.load(tmp_path / "calibration").rows) == 260


class Distributed(nn.Module):
    """Returns an object beside its logits, or alone."""

    def __init__(self, alone=False):
        super().__init__()
        self.inner, self.alone = small(), alone

    def forward(self, images):
        logits = self.inner(images)
        found = torch.distributions.Categorical(logits=logits)
        return found if self.alone else {"logits": logits, "found": found}


def of_logits(model, batches):
    found = [(model(images)["logits"].argmax(1) == labels).float() for images, labels in batches]
    return float(torch.cat(found).mean())


def of_object(model, batches):
    return float(torch.cat([model(images)["found"].log_prob(labels) for images, labels in batches]).mean())


def test_an_object_of_which_a_form_tells_nothing_is_not_taken_from_the_model(judged, tmp_path):
    """The metric would be the model's own, whatever a form returned."""
    found, _ = judged(made(model=Distributed, metric=of_logits))
    calls.write_arrays(tmp_path / "same.npz", found._theirs)
    assert found.change(str(tmp_path / "same.npz"), 0.5)["kept"]
    with pytest.raises(Refused, match="uses a Categorical that the model returns"):
        judged(made(model=Distributed, metric=of_object))
    with pytest.raises(Refused, match="returns no tensor, but a Categorical"):
        judged(
            made(
                model=lambda: Distributed(alone=True), metric=lambda m, bs: sum(len(str(m(b[0]))) for b in bs)
            )
        )


class Decoding(nn.Module):
    """Returns plain labels beside its logits, as conditional random fields do."""

    def __init__(self):
        super().__init__()
        self.inner = small()

    def forward(self, images):
        logits = self.inner(images)
        return logits, logits.argmax(1).tolist(), ()


def of_labels(model, batches):
    return sum(float(sum(model(images)[1])) for images, _ in batches)


def test_numbers_that_are_no_tensors_are_not_taken_from_the_model(judged):
    with pytest.raises(Refused, match=r"returns another 'output\[1\]\[\d+\]' from call to call"):
        judged(made(model=Decoding, metric=of_labels))
    one = pictures(4, 1).tensors
    with pytest.raises(Refused, match=r"returns a int \('output\[1\]\[0\]'\)"):
        judged(made(model=Decoding, metric=of_labels, validation=lambda: [one]))


def test_a_part_of_the_model_that_is_called_beside_it_is_refused():
    def by_parts(model, batches):
        return sum(float(model(images).mean() + model[0](images).mean()) for images, _ in batches)

    with pytest.raises(Refused, match="calls '0', a part of the model"):
        recorded(by_parts)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_a_scripted_part_takes_no_hooks():
    found = recorded(SCENE["accuracy"], lambda: nn.Sequential(torch.jit.script(small().eval())))
    assert found.samples == 70


def test_a_metric_that_is_not_of_the_outputs_alone_is_refused(judged):
    seen = []

    def counting(model, batches):
        seen.extend(float(model(images).mean()) for images, _ in batches)
        return len(seen)

    with pytest.raises(Refused, match="is 3, and 6 when it is told the same outputs again"):
        judged(made(metric=counting))


def test_a_metric_that_writes_into_its_batches(judged, tmp_path):
    def in_place(model, batches):
        right = total = 0
        for images, labels in batches:
            right += int((model(images.mul_(0.5)).argmax(1) == labels.sub_(1)).sum())
            total += len(labels)
        return right / total

    found, facts = judged(made(metric=in_place))
    calls.write_arrays(tmp_path / "same.npz", found._theirs)
    change = found.change(str(tmp_path / "same.npz"), 0.5)
    assert change["value"] == facts["metric"]
    assert "sample by sample" in change["method"]
    halves = numpy.concatenate([arrays[0] for arrays in Calls.load(tmp_path).inputs])
    assert numpy.array_equal(halves, 0.5 * pictures(70, 1).tensors[0].numpy())


@pytest.mark.parametrize("scale", [1.0, -3.0])
def test_a_metric_that_writes_into_what_the_model_returns(judged, scale):
    """A form would be compared with what is no model's output; told again, it would be written into twice."""

    def in_place(model, batches):
        return sum(float(model(images).mul_(scale).sigmoid_().mean()) for images, _ in batches)

    found, _ = judged(made(metric=in_place))
    images = pictures(70, 1).tensors[0][:32]
    with torch.no_grad():
        assert torch.allclose(torch.from_numpy(found._theirs[0][0]), found.model(images))


class Normalizing(nn.Module):
    """Writes into its pictures."""

    def __init__(self):
        super().__init__()
        self.inner = small()

    def forward(self, images):
        return self.inner(images.sub_(0.5).div_(0.29))


def test_a_model_that_writes_into_its_input(judged, tmp_path):
    found, facts = judged(made(model=Normalizing))
    calls.write_arrays(tmp_path / "same.npz", found._theirs)
    assert found.change(str(tmp_path / "same.npz"), 0.5)["value"] == facts["metric"]
    kept = Calls.load(tmp_path).inputs[0]
    assert numpy.array_equal(kept[0], pictures(70, 1).tensors[0][:32].numpy())
    first = found.recording.calls[0][0]
    run, _ = in_torch(calls.Flat(found.model, first.given, writes=first.writes).eval())
    once, again = run(kept), run(kept)
    assert numpy.array_equal(once[0], again[0])
    assert numpy.array_equal(once[0], found._theirs[0][0])
    assert not record(made(), small().eval()).calls[0][0].writes  # what does not write is not copied


def test_a_metric_that_turns_training_on_again_as_it_ends(judged, tmp_path):
    def model():
        return nn.Sequential(small(), nn.Dropout(0.5))

    def and_back(model, batches):
        model.eval()
        found = SCENE["accuracy"](model, batches)
        model.train()
        return found

    found, facts = judged(made(model=model, metric=and_back))
    calls.write_arrays(tmp_path / "same.npz", found._theirs)
    assert found.change(str(tmp_path / "same.npz"), 0.5)["value"] == facts["metric"]
    assert not any(module.training for module in found.model.modules())
    net = model().eval()
    first_call(made(metric=and_back), net)
    assert not net.training


def test_weights_in_fp64_are_told(judged):
    images, labels = pictures(70, 1).tensors
    doubled = [(images.double(), labels)]
    assert judged(made(model=lambda: small().double(), validation=lambda: doubled))[1]["double"]
    assert not judged(made())[1]["double"]


class Imputing(nn.Module):
    """Takes pictures of which some numbers are missing."""

    def __init__(self):
        super().__init__()
        self.inner = small()

    def forward(self, images):
        return self.inner(torch.nan_to_num(images))


def test_inputs_with_missing_values_are_the_same_inputs_again(judged, tmp_path):
    images, labels = pictures(70, 1).tensors
    images[::3, :, 0, 0] = torch.nan
    found, facts = judged(made(model=Imputing, validation=lambda: [(images, labels)]))
    calls.write_arrays(tmp_path / "same.npz", found._theirs)
    assert found.change(str(tmp_path / "same.npz"), 0.5)["value"] == facts["metric"]


class Predicting(nn.Module):
    """Has a method of its own that calls the model."""

    def __init__(self):
        super().__init__()
        self.inner = small()

    def forward(self, images):
        return self.inner(images)

    def predict(self, images):
        return self(images).argmax(1)


def of_a_method(model, batches):
    found = [(model.predict(images) == labels).float() for images, labels in batches]
    return float(torch.cat(found).mean())


def test_a_method_of_the_model_is_told_what_the_form_returns(judged, tmp_path):
    """Else the metric would be the model's own, whatever a form returned."""
    found, facts = judged(made(model=Predicting, metric=of_a_method))
    wrong = [[numpy.roll(array, 1, axis=1) for array in arrays] for arrays in found._theirs]
    calls.write_arrays(tmp_path / "wrong.npz", wrong)
    expected = [logits.argmax(1) for (logits,) in wrong]
    labels = pictures(70, 1).tensors[1].numpy()
    change = found.change(str(tmp_path / "wrong.npz"), 0.1)
    assert change["value"] == pytest.approx(float((numpy.concatenate(expected) == labels).mean()))
    assert change["value"] != facts["metric"]


def test_a_model_that_is_called_from_elsewhere_is_refused(judged):
    """By a metric that has kept it: a form's outputs would not be seen."""
    kept = small()
    with pytest.raises(Refused, match="in a way in which nothing can stand in for it"):
        judged(
            made(model=lambda: kept, metric=lambda _, batches: sum(float(kept(x).mean()) for x, _ in batches))
        )


class Sampling(nn.Module):
    """Draws random numbers in evaluation mode too."""

    def __init__(self):
        super().__init__()
        self.inner = small()

    def forward(self, images):
        return nn.functional.dropout(self.inner(images), 0.5, training=True)


def test_a_model_that_answers_otherwise_each_time_is_refused(judged):
    with pytest.raises(Refused, match="another 'output' each time that it is called with the same input"):
        judged(made(model=Sampling))


class WithLoss(nn.Module):
    """Returns the batch's loss beside the logits, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.inner = small()

    def forward(self, images, labels):
        logits = self.inner(images)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def weighted_loss(model, batches):
    total = count = 0
    for images, labels in batches:
        total -= len(images) * float(model(images, labels)["loss"])
        count += len(images)
    return total / count


with_loss = made(
    model=WithLoss,
    metric=weighted_loss,
    validation=lambda: torch.utils.data.DataLoader(pictures(70, 1), batch_size=10),
)


def test_a_batchs_own_loss_is_no_value_of_its_samples(judged, tmp_path):
    """Each sample alone would be told its batch's mean: seven values would pass for seventy."""
    found, facts = judged(with_loss)
    calls.write_arrays(tmp_path / "near.npz", [[loss + 1e-3, logits] for loss, logits in found._theirs])
    change = found.change(str(tmp_path / "near.npz"), 0.1)
    assert change["method"] == "jackknife over 7 groups of samples"
    assert change["value"] == pytest.approx(facts["metric"] - 1e-3)


def crops(model, batches):
    right = total = 0
    for images, labels in batches:
        both = model(torch.cat([images, images.flip(3)])).unflatten(0, (2, -1)).mean(0)
        right += int((both.argmax(1) == labels).sum())
        total += len(labels)
    return right / total


def eight_batches(model, batches):
    values = []
    for number, (images, labels) in enumerate(batches):
        if number == 8:
            break
        values.append(float((model(images).argmax(1) == labels).float().mean()) ** 2)
    return sum(values) / len(values)


@pytest.mark.parametrize(
    ("metric", "method"),
    [(crops, "jackknife over 9 groups"), (eight_batches, "jackknife over 8 groups")],
)
def test_what_cannot_be_told_of_pieces_is_told_of_whole_batches(judged, tmp_path, metric, method):
    loader = torch.utils.data.DataLoader(pictures(70, 1), batch_size=8)
    found, facts = judged(made(metric=metric, validation=lambda: loader))
    calls.write_arrays(tmp_path / "same.npz", found._theirs)
    change = found.change(str(tmp_path / "same.npz"), 0.5)
    assert method in change["method"]
    assert change["value"] == facts["metric"]


def test_what_has_no_row_for_each_sample_is_answered_call_by_call(judged, tmp_path):
    """A compiled form has one batch size; the loss of its first piece is not that of the call."""
    found, _ = judged(with_loss)
    worker = Worker(with_loss, "", str(tmp_path), torch.get_num_threads())
    worker.form, worker.batch = BY_NAME["compiled_fp32"], 1
    worker.serve, _ = in_torch(calls.Flat(found.model, found.recording.calls[0][0].given))
    worker.outputs(str(tmp_path / "answers.npz"))
    expected = read_arrays(tmp_path / outputs_file(REFERENCE))
    for ones, others in zip(expected, read_arrays(tmp_path / "answers.npz"), strict=True):
        assert [a.shape for a in ones] == [b.shape for b in others]
        assert all(numpy.allclose(a, b, atol=1e-5) for a, b in zip(ones, others, strict=True))


def normalized():
    """Each sample's answers depend on the others of its batch."""
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(36, track_running_stats=False), nn.Linear(36, 3))


@pytest.mark.parametrize(("model", "cut"), [(normalized, False), (small, True)])
def test_a_compiled_form_answers_in_the_metrics_batches_where_they_matter(judged, tmp_path, model, cut):
    seed = torch.Generator().manual_seed(3).get_state()
    job = made(model=lambda: torch.set_rng_state(seed) or model())
    found, _ = judged(job)
    worker = Worker(job, "", str(tmp_path), torch.get_num_threads())
    worker.form, worker.batch = BY_NAME["compiled_fp32"], 10
    serve, _ = in_torch(calls.Flat(found.model, found.recording.calls[0][0].given))
    asked = []
    worker.serve = lambda arrays: asked.append(len(arrays[0])) or serve(arrays)
    worker.outputs(str(tmp_path / "answers.npz"))
    assert (10 in asked) == cut
    expected = read_arrays(tmp_path / outputs_file(REFERENCE))
    for ones, others in zip(expected, read_arrays(tmp_path / "answers.npz"), strict=True):
        assert all(numpy.allclose(a, b, atol=1e-5) for a, b in zip(ones, others, strict=True))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_forms_are_timed_on_texts_of_all_lengths(judged, tmp_path):
    judged(SCENE["tagging"])
    worker = Worker(SCENE["tagging"], "", str(tmp_path), torch.get_num_threads())
    assert worker.open(REFERENCE, str(tmp_path), 2, 6)["calls_a_step"] == 6
    asked = []
    worker.serve = lambda arrays: asked.append(arrays[0].shape)
    assert worker.block(1)["samples"] == 12
    assert asked == [(2, 5), (2, 5), (2, 7), (2, 7), (2, 9), (2, 9)], "each step is one of each"
    with pytest.raises(Refused, match="largest of your validation batches has 8"):
        worker.open(REFERENCE, str(tmp_path), 9, 6)


@pytest.mark.parametrize(("count", "lengths"), [(5, [1, 2, 3, 4]), (33, list(range(2, 33, 2)))])
def test_calls_that_are_timed_are_spread_over_all_batches(count, lengths):
    """But for those on fewer samples than are asked for."""
    texts = [[numpy.full((8 if length else 1, length), length)] for length in range(count)]
    taken = Calls(texts, ((0, 1),), (1,) * count, (1, *[8] * (count - 1))).several(16, 3)
    assert {inputs[0].shape[0] for inputs in taken} == {3}
    assert sorted({inputs[0].shape[1] for inputs in taken}) == lengths


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padding_is_computed_where_outputs_are_compared(judged, tmp_path):
    """By forms in torch as by the model as it is; they are timed as torch runs them, with zeros there."""
    found, _ = judged(SCENE["tagging"])
    worker = Worker(SCENE["tagging"], "", str(tmp_path), torch.get_num_threads())
    worker._material = Material(calls.Flat(found.model, found.recording.calls[0][0].given), None, None)
    worker.open(REFERENCE, str(tmp_path), 2, 16)
    worker.outputs(str(tmp_path / "answers.npz"))
    (expected,), *_ = read_arrays(tmp_path / outputs_file(REFERENCE))
    (answered,), *_ = read_arrays(tmp_path / "answers.npz")
    (timed,) = worker.serve(worker.calls.inputs[0])
    assert numpy.allclose(expected, answered, atol=1e-5)
    assert not numpy.allclose(expected, timed, atol=1e-2)
    assert numpy.allclose(expected[:, :-2], timed[:, :-2], atol=1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_metric_that_reads_padding_is_refused(judged):
    """In evaluation torch has zeros there, and a file has not: it would be another model."""
    with pytest.raises(Refused, match="transformer layers have at padded positions"):
        judged(SCENE["pooling"])
    assert torch.backends.mha.get_fastpath_enabled()
    with padding_computed():  # as the job's file may have it
        judged(SCENE["pooling"])


def test_memory_is_told_where_there_is_no_proc(monkeypatch):
    def unknown(self, **_):
        raise FileNotFoundError(self)

    monkeypatch.setattr(worker_module.Path, "read_text", unknown)
    assert worker_module._peak() > 2**20


def test_a_metric_of_tiny_numbers_is_no_mean_over_samples_for_that(judged, tmp_path):
    """A root mean square in metres: its values of single samples lie within a millionth of anything."""

    def metric(model, batches):
        values = torch.cat([model(images) for images, _ in batches])
        return -1e-7 * float(values.square().mean().sqrt())

    found, _ = judged(made(metric=metric))
    calls.write_arrays(tmp_path / "same.npz", found._theirs)
    assert "jackknife" in found.change(str(tmp_path / "same.npz"), 1e-8)["method"]


def test_samples_that_take_long_alone_are_judged_by_groups(judged, tmp_path, monkeypatch):
    monkeypatch.setattr(judge, "ALONE_SECONDS", 0.0)
    found, _ = judged(made())
    calls.write_arrays(tmp_path / "same.npz", found._theirs)
    assert "jackknife" in found.change(str(tmp_path / "same.npz"), 0.1)["method"]


def test_a_model_that_is_all_right_makes_no_metric_a_mean_over_samples(judged, tmp_path):
    """The recall of single samples is 1, and so is their mean; of a form that loses a class it is not."""

    class Sure(nn.Module):
        def forward(self, images):
            return images.flatten(1)[:, :3]

    labels = torch.arange(200) % 10 // 4  # 0, 1 and, of few, 2
    images = torch.zeros(200, 1, 6, 6)
    images.flatten(1)[torch.arange(200), labels] = 1.0

    def recalls(model, batches):
        pairs = [(model(images).argmax(1), labels) for images, labels in batches]
        found, wanted = (torch.cat(each) for each in zip(*pairs, strict=True))
        return sum(float((found[wanted == one] == one).float().mean()) for one in wanted.unique()) / len(
            wanted.unique()
        )

    def data():
        return DataLoader(list(zip(images, labels, strict=True)), batch_size=50)

    found, facts = judged(made(model=Sure, metric=recalls, validation=data))
    assert facts["metric"] == 1.0
    calls.write_arrays(tmp_path / "same.npz", found._theirs)
    change = found.change(str(tmp_path / "same.npz"), 0.05)
    assert (change["kept"], "sample by sample" in change["method"]) == (True, True)
    lost = [[numpy.where(array.argmax(1, keepdims=True) == 2, -array, array)] for (array,) in found._theirs]
    calls.write_arrays(tmp_path / "lost.npz", lost)
    change = found.change(str(tmp_path / "lost.npz"), 0.05)
    assert change["value"] == pytest.approx(2 / 3)
    assert change["kept"] is False


def test_batches_that_cannot_be_cut_are_judged_whole(judged, tmp_path):
    def data():
        generator = torch.Generator().manual_seed(1)
        lengths = (9, 7, 5, 3)
        return [
            (
                pack_sequence([torch.randn(n, 4, generator=generator) for n in lengths]),
                torch.randint(2, (4,), generator=generator),
            )
            for _ in range(12)
        ]

    def metric(model, batches):
        right = [
            int((model(pad_packed_sequence(rows, batch_first=True)[0]).mean(1).argmax(1) == labels).sum())
            for rows, labels in batches
        ]
        return sum(one**2 for one in right) / len(right)

    found, _ = judged(made(model=lambda: nn.Linear(4, 2), metric=metric, validation=data))
    calls.write_arrays(tmp_path / "same.npz", found._theirs)
    assert "12 groups" in found.change(str(tmp_path / "same.npz"), 0.1)["method"]


class Summed(nn.Module):
    """Takes rows in a row, and of which sample each of them is; or sequences, time first."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, rows, starts=None):
        if starts is None:
            return self.last(rows.mean(0))
        return self.last(torch.stack([part.mean(0) for part in rows.tensor_split(starts[1:])]))


@pytest.mark.parametrize("in_a_row", [False, True])
def test_rows_that_are_no_samples_do_not_pass_for_them(in_a_row):
    def data():
        sizes = [(9, 5), (8, 5), (7, 5), (6, 3)]  # how long the samples are, and how many
        batches = [(torch.rand(*each, 4), torch.zeros(each[1]).long()) for each in sizes]
        return [(rows.flatten(0, 1), labels) for rows, labels in batches] if in_a_row else batches

    def metric(model, batches):
        found = []
        for rows, labels in batches:
            starts = [torch.arange(0, len(rows), len(rows) // len(labels))] if in_a_row else []
            found += (model(rows, *starts).argmax(1) == labels).tolist()
        return sum(found) / len(found)

    told = r"the shapes \[45, 4\] and \[5\] at once" if in_a_row else r"\[9, 5, 4\], and .* has 5 rows"
    with pytest.raises(Refused, match=told):
        Calls.of(recorded(metric, Summed, validation=data))


class Lost(Dataset):
    """Pictures of which every so many cannot be read."""

    def __init__(self, every):
        self.every, self.pictures = every, pictures(70, 1)

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, number):
        if number % self.every == 1:
            raise OSError(5, "Input/output error")
        return self.pictures[number]


@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_damaged_validation_samples_are_told_and_must_be_few(judged, policy):
    def lacking(every):
        return made(validation=lambda: DataLoader(Lost(every), batch_size=10), damaged=policy)

    assert damaged_of(judged(made())[1]) == ""
    _, facts = judged(lacking(20))
    assert facts["samples"] == (66 if policy == "skip" else 70)
    done = "skipped" if policy == "skip" else "replaced"
    assert damaged_of(facts).startswith(f"in the validation data 4 damaged samples were {done}: 1: OSErr")
    with pytest.raises(JobError, match=f"more than damaged='{policy}' may hide"):
        judged(lacking(2))


def test_what_else_is_in_a_batch_may_be_as_long_as_a_sample(judged):
    """Weights of features, say: the model answers with a row for each sample, so these lie first."""

    def data():
        return [(torch.ones(4, 6), torch.ones(6)) for _ in range(3)]

    def metric(model, batches):
        return -sum(float((weights * model(rows)).square().mean()) for rows, weights in batches)

    found, _ = judged(made(model=lambda: nn.Linear(6, 6), metric=metric, validation=data))
    assert Calls.of(found.recording).rows == (4, 4, 4)
