"""Files that torch cannot write are refused in the person's words."""

import numpy
import pytest
import torch
from torch import nn

from vivace.errors import Refused
from vivace.serving.calls import Calls, Flat
from vivace.serving.files import exported, to_onnx
from vivace.serving.material import Material


class Recurrent(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.reader = layer(3, 4, batch_first=True)

    def forward(self, words):
        return self.reader(words)[0].sum(1)


class Deciding(nn.Module):
    def forward(self, words):
        return words if words.sum() > 0 else -words


class DecidingReader(Recurrent):
    def forward(self, words):
        found = super().forward(words)
        return found if found.sum() > 0 else -found


def material(model, *lengths):
    inputs = [[numpy.ones((4, length, 3), numpy.float32)] for length in lengths]
    dynamic = ((0, 1) if len(set(lengths)) > 1 else (0,),)
    calls = Calls(inputs, dynamic, (1,) * len(lengths), (4,) * len(lengths))
    return Material(Flat(model.eval(), ((torch.ones(1),), {})), calls, calls)


def test_a_recurrent_layer_on_several_lengths_is_named():
    told = r"recurrent layer 'reader' \(LSTM\) for one length, .*pad all of them"
    with pytest.raises(Refused, match=told):
        exported(material(Recurrent(nn.LSTM), 2, 3))
    assert exported(material(Recurrent(nn.LSTM), 2, 2))


def test_onnx_writes_an_rnn_for_one_length_too(tmp_path):
    with pytest.raises(Refused, match=r"'reader' \(RNN\) for one length"):
        to_onnx(material(Recurrent(nn.RNN), 2, 3), tmp_path / "model.onnx")


@pytest.mark.parametrize("lengths", [(2, 3), (2, 2)])
def test_what_fails_on_one_length_as_well_is_no_matter_of_lengths(tmp_path, lengths):
    with pytest.raises(Exception, match="data-dependent") as caught:
        exported(material(DecidingReader(nn.LSTM), *lengths))
    assert not isinstance(caught.value, Refused)
    with pytest.raises(Exception, match="data-dependent") as caught:
        to_onnx(material(DecidingReader(nn.RNN), *lengths), tmp_path / "model.onnx")
    assert not isinstance(caught.value, Refused)


def test_what_the_exporter_for_onnx_stumbled_over_is_told(tmp_path):
    """And not how to report it to PyTorch, which its own text begins with."""
    with pytest.raises(Exception, match="data-dependent") as caught:
        to_onnx(material(Deciding(), 2, 2), tmp_path / "model.onnx")
    assert "step 1/3" not in str(caught.value)
