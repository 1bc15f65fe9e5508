"""Every pair of memory techniques on a model with dropout, BatchNorm, tied modules and a custom function."""

import dataclasses
import itertools

import pytest
import torch

import vivace
from vivace.technique import registry

from . import blocky

pytestmark = pytest.mark.usefixtures("one_thread")
MEMORY = {
    "checkpoint": {"blocks": ["blocks.0", "blocks.1"], "cheap": ["blocks.1"]},
    "offload_activations": {"blocks": ["blocks.2"], "smallest_kib": 1},
    "compress_activations": {"blocks": ["blocks.3"]},
    "optimizer_in_backward": {},
    "offload_optimizer": {},
    "micro_batches": {"num": 4},
    "allocator": {"expandable_segments": False, "max_split_size_mib": 64},
}
ROUNDING = ("compress_activations", "micro_batches")  # the others change no bit, beside these neither


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    """Let what needs a GPU act on a CPU, whose "host" memory is a copy: the logic without the streams."""
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", lambda text: None)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", list)
    for name in ("offload_activations", "offload_optimizer", "allocator"):
        cls = registry.find(name)
        monkeypatch.setattr(cls, "card", dataclasses.replace(cls.card, devices=("cpu", "cuda")))


@pytest.mark.parametrize("names", list(itertools.combinations(MEMORY, 2)), ids="-".join)
def test_gradients_stay_and_statistics_move_once(names):
    plan = {name: MEMORY[name] for name in names}
    see = "optimizer_in_backward" not in names  # which leaves no gradient to look at
    if set(names) == {"optimizer_in_backward", "offload_optimizer"}:
        with pytest.raises(vivace.VivaceError, match="update"):
            blocky.opened(plan)
        return
    blocky.Square.passes.update(forward=0, backward=0)
    seen, _ = blocky.course(plan, see=see)
    assert blocky.Square.passes["backward"] == 3 * 4 * (4 if "micro_batches" in names else 1)
    wanted, _ = blocky.course({name: MEMORY[name] for name in names if name in ROUNDING}, see=see)
    assert blocky.differing(seen, wanted) == []
    plain, _ = blocky.course({}, see=see)
    if "micro_batches" not in names:  # whose pieces have statistics of their own
        assert torch.equal(seen["blocks.0.body.1.running_mean"], plain["blocks.0.body.1.running_mean"]) or (
            "compress_activations" in names
        )
        counted = "blocks.0.body.1.num_batches_tracked"
        assert torch.equal(seen[counted], plain[counted])
