"""Names of parameters, buffers and modules, as the person knows them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vivace.tensors.modules import (
    has_batch_norm,
    in_evaluation,
    kinds_of,
    named_buffers,
    named_modules,
    named_parameters,
    padding_of,
)


@pytest.mark.parametrize(("count", "before"), [(1, [""]), (2, ["0.", "1."])])
def test_a_number_stands_before_a_name_only_where_there_are_several_models(count, before):
    models = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(count)]
    parameters, buffers = dict(named_parameters(models)), dict(named_buffers(iter(models)))
    for start, model in zip(before, models, strict=True):
        assert parameters[f"{start}0.weight"] is model[0].weight
        assert buffers[f"{start}1.running_mean"] is model[1].running_mean
    assert (len(parameters), len(buffers)) == (4 * count, 3 * count)


def test_only_norms_over_all_ranks_do_not_mix_the_samples_of_one():
    norms = [nn.SyncBatchNorm(2), nn.BatchNorm2d(2), nn.LayerNorm(2)]
    assert [has_batch_norm(norm) for norm in norms] == [True, True, False]
    assert [has_batch_norm(norm, over_ranks=True) for norm in norms] == [False, True, False]


@pytest.mark.parametrize(
    ("layer", "kinds"),
    [
        (nn.GRU(2, 2), {"recurrent", "stepwise_recurrent"}),
        (nn.RNN(2, 2), {"recurrent", "stepwise_recurrent"}),
        (nn.LSTM(2, 2), {"recurrent"}),
        (nn.GRUCell(2, 2), {"recurrent"}),
        (nn.Sequential(nn.Conv2d(2, 2, 1), nn.Dropout(0.1)), {"convolution_2d", "dropout"}),
        (nn.BatchNorm1d(2), {"batch_norm"}),
    ],
)
def test_which_kinds_of_layers_a_model_has(layer, kinds):
    assert {
        name for name, there in kinds_of([nn.Linear(2, 2), nn.Sequential(layer)]).items() if there
    } == kinds


class Sampling(nn.Dropout):
    """Stays on in evaluation, as Monte Carlo dropout does."""

    def train(self, mode=True):
        return super().train(True)


class Merging(nn.Module):
    """Has in evaluation an update within its weight, which it takes out again up to rounding."""

    def __init__(self):
        super().__init__()
        self.weight, self.update = nn.Parameter(torch.randn(64)), torch.randn(64)
        self.merged, self.times = False, 0

    def train(self, mode=True):
        self.times += 1
        if self.merged is mode:
            self.weight.data += (-1 if mode else 1) * self.update
            self.merged = not mode
        return super().train(mode)


def test_a_model_is_put_into_evaluation_as_its_own_eval_does_and_is_afterwards_as_it_was():
    model = nn.Sequential(nn.Linear(2, 2), Sampling(), nn.BatchNorm1d(2), Merging()).train()
    model[2].eval()
    merging, weight, modes = model[3], model[3].weight.clone(), [part.training for part in model.modules()]
    times = merging.times
    with in_evaluation([model]):
        assert [part.training for part in model] == [False, True, False, False]
        assert merging.merged
        assert torch.equal(merging.weight, weight + merging.update)
    assert torch.equal(merging.weight, weight)
    assert (merging.merged, merging.times) == (False, times)
    assert [part.training for part in model.modules()] == modes


class Freezing(nn.Module):
    """Freezes a part whenever it is put into training, and begins the norm's statistics anew."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)

    def train(self, mode=True):
        super().train(mode)
        if mode:
            self.stem.requires_grad_(False)
            self.norm.reset_running_stats()
        return self


def test_what_putting_a_model_back_into_training_changes_is_as_it_was_too():
    model = Freezing().train()
    model.stem.requires_grad_(True)
    model.norm.running_mean.fill_(3.0)
    with in_evaluation([model]):
        model.norm.running_var.fill_(2.0)  # by the metric, whose it is
    assert model.training
    assert model.stem.weight.requires_grad
    assert (model.norm.running_mean == 3.0).all()
    assert (model.norm.running_var == 2.0).all()


def test_a_model_itself_has_a_name_too():
    one, other = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    assert [name for name, _ in named_modules([one])] == ["the model", "0"]
    assert [name for name, _ in named_modules([one, other])] == ["0", "0.0", "1"]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@settings(max_examples=100, deadline=None)
@given(
    window=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    dilation=st.one_of(st.tuples(st.integers(1, 3)), st.tuples(st.integers(1, 3), st.integers(1, 3))),
    padding=st.one_of(
        st.sampled_from(["same", "valid"]),
        st.integers(0, 4),
        st.tuples(st.integers(0, 4)),
        st.tuples(st.integers(0, 4), st.integers(0, 4)),
    ),
)
def test_a_convolutions_padding_as_numbers_gives_what_the_module_gives(window, dilation, padding):
    """None where a module asks for zeros of which one side has more."""
    layer, x = nn.Conv2d(1, 1, window, padding=padding, dilation=dilation), torch.randn(1, 1, 19, 18)
    found, reach = padding_of(layer), [(k - 1) * d for k, d in zip(window, dilation * 2, strict=False)]
    assert (found is None) == (padding == "same" and any(zeros % 2 for zeros in reach))
    if found is not None:
        assert len(found) == 2
        given_as_numbers = nn.functional.conv2d(x, layer.weight, layer.bias, 1, found, dilation)
        torch.testing.assert_close(given_as_numbers, layer(x))
