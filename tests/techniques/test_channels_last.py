import pytest
import torch

from vivace import registry
from vivace.engine.opening import start
from vivace.errors import Refused
from vivace.inspect import inspect
from vivace.plan import Plan
from vivace.testing import TINY_JOBS, TechniqueContract

ChannelsLast = registry.find("channels_last")


@pytest.mark.usefixtures("one_thread")
class TestChannelsLast(TechniqueContract):
    technique = ChannelsLast


def test_weights_and_batches_are_reordered_and_weights_are_set_back():
    job = TINY_JOBS["cnn"]()
    with start(job, Plan([ChannelsLast()]), inspect()) as session:
        weight = session.model[0].weight
        inputs, labels = session.place(next(iter(job.data())))
        assert weight.is_contiguous(memory_format=torch.channels_last)
        assert inputs.is_contiguous(memory_format=torch.channels_last)
        assert labels.dim() == 1
    assert weight.is_contiguous()


def test_refuses_a_model_without_images():
    with pytest.raises(Refused, match="channels_last: the model has no 2-D convolution"):
        start(TINY_JOBS["lstm"](), Plan([ChannelsLast()]), inspect())
