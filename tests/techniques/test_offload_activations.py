import dataclasses

import pytest
import torch

import vivace
from vivace.ledger import Observation
from vivace.technique import registry
from vivace.testing import TechniqueContract

from . import blocky

OffloadActivations = registry.find("offload_activations")


@pytest.mark.usefixtures("one_thread")
class TestOffloadActivations(TechniqueContract):
    technique = OffloadActivations


@pytest.fixture
def anywhere(monkeypatch):
    """Let the technique act on a CPU, whose "host" memory is a copy: the logic without the streams."""
    card = dataclasses.replace(OffloadActivations.card, devices=("cpu", "cuda"))
    monkeypatch.setattr(OffloadActivations, "card", card)


def test_a_cpu_has_nowhere_to_offload_to():
    with pytest.raises(
        vivace.Refused, match=r"^offload_activations: it acts on cuda, and this job runs on cpu"
    ):
        blocky.opened({"offload_activations": {}})


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("blocks", [["*"], ["blocks.0", "blocks.2"]])
@pytest.mark.parametrize("beside", [{}, {"bf16_autocast": {}}, {"micro_batches": {"num": 4}}])
def test_no_bit_differs(blocks, beside):
    seen, notes = blocky.course({**beside, "offload_activations": {"blocks": blocks, "smallest_kib": 1}})
    wanted, _ = blocky.course(beside)
    assert blocky.differing(seen, wanted) == []
    assert len(notes["offloaded_bytes"]) == (4 if blocks == ["*"] else 2)
    assert all(notes["offloaded_bytes"].values())


@pytest.mark.usefixtures("anywhere")
def test_techniques_share_the_blocks_of_one_model():
    plan = {
        "checkpoint": {"blocks": ["blocks.0"]},
        "offload_activations": {"blocks": ["blocks.1", "blocks.3"], "smallest_kib": 1},
    }
    seen, notes = blocky.course(plan)
    wanted, _ = blocky.course({})
    assert blocky.differing(seen, wanted) == []
    assert (notes["recomputed_blocks"], notes["offloaded_blocks"]) == (1, 2)


@pytest.mark.usefixtures("anywhere")
def test_small_tensors_and_what_stays_alive_anyway_are_not_copied():
    with blocky.opened({"offload_activations": {"smallest_kib": 10_000}}) as session:
        session.step(blocky.BATCHES[0])
        assert not any(session.build.notes["offloaded_bytes"].values())
    wide = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 5))
    batch = torch.randn(256, 512), torch.randint(5, (256,))
    with blocky.opened({"offload_activations": {"smallest_kib": 1}}, wide) as session:
        session.step(batch)
        # The batch and the weights are as large as the activations, and only the latter are copied.
        assert session.build.notes["offloaded_bytes"] == {"0-1": 256 * 512 * 4, "2-2": 0}


def test_confirmation_names_blocks_and_bytes():
    notes = {"offloaded_blocks": 2, "offloaded_bytes": {"a": 2**20, "b": 2**19}}
    seen = Observation({}, {}, 0, 0.0, notes=notes)
    assert OffloadActivations().confirm(seen, seen) == "2 blocks keep 1.50 MiB in the host's memory"
    with pytest.raises(vivace.Refused, match="changed nothing"):
        OffloadActivations().confirm(Observation({}, {}, 0, 0.0), seen)
