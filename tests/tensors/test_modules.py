"""Names of parameters, buffers and modules, as the person knows them."""

import pytest
from torch import nn

from vivace.tensors.modules import has_batch_norm, named_buffers, named_modules, named_parameters


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


def test_a_model_itself_has_a_name_too():
    one, other = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    assert [name for name, _ in named_modules([one])] == ["the model", "0"]
    assert [name for name, _ in named_modules([one, other])] == ["0", "0.0", "1"]
