"""A metric that would let any form pass is refused; what it does not use of the outputs is known."""

import numpy
import pytest

from vivace.errors import JobError, Refused
from vivace.job import load
from vivace.serving.judge import Judge
from vivace.serving.use import astray, require_use, unjudged

STREAM = numpy.random.default_rng(0)
LABELS = STREAM.integers(0, 4, 200)


def classes(share, *more):
    """Two calls of 100 samples; the given share of answers is right."""
    right = STREAM.random(200) < share
    answers = numpy.where(right, LABELS, (LABELS + 1 + STREAM.integers(0, 3, 200)) % 4)
    logits = numpy.eye(4, dtype=numpy.float32)[answers]
    return [[logits[:100], *more], [logits[100:], *more]]


def accuracy(outputs):
    assert all(isinstance(one, numpy.ndarray) for arrays in outputs for one in arrays)
    answers = numpy.concatenate([arrays[0] for arrays in outputs]).argmax(1)
    return float((answers == LABELS).mean())


def error(outputs):
    return 1.0 - accuracy(outputs)


def required(ask, outputs):
    return require_use(ask, outputs, ask(outputs), "metric")


def test_a_metric_that_says_the_same_of_every_model_is_refused():
    with pytest.raises(Refused, match=r"metric is 0\.9 whatever the model returns"):
        required(lambda outputs: 0.9, classes(0.8))


def test_a_metric_that_is_better_where_answers_are_wrong_is_refused():
    with pytest.raises(Refused, match=r"is 0\.\d+, and 0\.\d+ where each sample has the answer of another"):
        required(error, classes(0.8))
    target = STREAM.standard_normal((200, 1))
    near = (target + 0.3 * STREAM.standard_normal((200, 1))).astype(numpy.float32)

    def squared(outputs):
        return float(numpy.square(numpy.concatenate([one for (one,) in outputs]) - target).mean())

    with pytest.raises(Refused, match="let it return an error times -1"):
        required(squared, [[near[:100]], [near[100:]]])
    assert required(lambda outputs: -squared(outputs), [[near[:100]], [near[100:]]]) == []


@pytest.mark.parametrize("share", [0.25, 0.4, 1.0])
def test_models_that_know_little_or_all_are_judged(share):
    for _ in range(20):
        assert required(accuracy, classes(share)) == []


def test_a_model_that_gives_all_samples_one_answer_is_judged():
    alike = [[numpy.full((100, 1), 0.1, numpy.float32)] for _ in range(2)]
    assert (
        required(lambda outputs: float(numpy.mean([(one > 0.5).mean() for (one,) in outputs])), alike) == []
    )
    labels = [[numpy.zeros(100, numpy.int64)] for _ in range(2)]
    assert (
        required(lambda outputs: float(numpy.mean([(one == 3).mean() for (one,) in outputs])), labels) == []
    )


def test_outputs_that_a_metric_does_not_use_are_known():
    beside = [numpy.zeros(shape, numpy.float32) for shape in ((100, 3), (), (5, 2), (100,))]
    outputs = classes(0.8, *beside, numpy.ones((100, 2), bool), numpy.ones(100, numpy.int32))
    assert required(accuracy, outputs) == [1, 2, 3, 4, 5, 6]

    def masked(outputs):
        if not all(numpy.isfinite(arrays[2]).all() for arrays in outputs):
            raise JobError("the Job's metric is nan; it must be a finite number")
        return accuracy(outputs) * float(numpy.mean([arrays[5].mean() for arrays in outputs]))

    assert required(masked, outputs) == [1, 3, 4, 6]


def test_the_judge_tells_which_outputs_the_jobs_metric_leaves(trained, tmp_path):
    reference, run = trained("wide")
    judge = Judge(load(reference), str(run), str(tmp_path))
    assert judge.record()["outputs"] == ["output['label']", "output['size']"]
    assert judge.unused() == [1]


def test_what_is_not_judged_may_not_be_another_models():
    checks = [{"output": "label", "share": 0.9}, {"output": "size", "share": 0.02}]
    assert astray(checks, [1]) == ""
    assert unjudged(checks, [1]) == "the metric does not use 'size', which is off by 2.0 % of its spread"
    checks[1]["share"] = 1.4
    assert astray(checks, [1]) == "the metric does not use 'size', which is off by 140 % of its spread"
    assert astray(checks, []) == unjudged(checks, []) == ""
