"""Trees of tensors, modules that models share, and optimizers that get more to do."""

from collections import defaultdict

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from vivace.tensors.modules import patched
from vivace.tensors.optimizers import switch_optimizer
from vivace.tensors.trees import map_tensors, tensors


def test_a_dictionary_of_another_kind_stays_one():
    batch = defaultdict(list, x=torch.ones(2), y=[torch.zeros(1)])
    found = map_tensors(batch, lambda tensor: tensor + 1)
    assert found.default_factory is list
    assert [float(one[0]) for one in tensors(found)] == [2.0, 1.0]
    assert float(batch["x"][0]) == 1.0


def test_a_packed_sequence_keeps_its_lengths_as_they_are():
    packed = pack_padded_sequence(torch.randn(3, 2, 4), torch.tensor([2, 3]), enforce_sorted=False)
    found = map_tensors(packed, torch.Tensor.double)
    assert found.data.dtype == torch.float64
    assert torch.equal(found.batch_sizes, packed.batch_sizes)
    assert torch.equal(found.sorted_indices, packed.sorted_indices)
    nn.LSTM(4, 2).double()(found)


def test_a_module_that_two_models_share_is_its_own_again():
    layer = nn.Linear(1, 1)
    with patched([layer, layer], "forward", [abs, abs]):
        assert layer.forward is abs
    assert "forward" not in vars(layer)


def test_a_group_that_is_added_later_is_saved_as_it_is():
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    undo = switch_optimizer(optimizer, {"fused": True, "foreach": False})
    optimizer.add_param_group({"params": list(other.parameters()), "lr": 0.2})
    groups = optimizer.state_dict()["param_groups"]
    assert [group["lr"] for group in groups] == [0.1, 0.2]
    assert groups[0]["fused"] is None
    undo()
    assert optimizer.param_groups[0]["fused"] is None
