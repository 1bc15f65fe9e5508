"""Ranks with a GPU each, which exchange by NCCL as torch calls it: they train, and say what ends them."""

import json

import pytest

TRAIN = """
import dataclasses, json, multiprocessing, os, socket, sys
from pathlib import Path
import torch
import vivace
from vivace.testing import jobs

plan, settings = json.loads(sys.argv[2]), json.loads(sys.argv[3])

class Watched(torch.nn.Sequential):
    steps = 0

    def forward(self, features):
        self.steps += self.training
        if self.steps == 3 and os.environ["RANK"] == "1":
            if "dies" in settings:
                os._exit(1)
            if len(features) > settings.get("most_samples", 99):
                torch.empty(90 << 30, dtype=torch.uint8, device="cuda")
        return super().forward(features)

def rank(number, port, answers):
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": str(number), "LOCAL_RANK": str(number)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {name: str(value) for name, value in settings.get("stand_in", {}).items()}
    job = dataclasses.replace(jobs.mlp(), model=lambda: Watched(*jobs.mlp().model()))
    try:
        run = vivace.train(job, vivace.Plan.from_dict(plan), out=Path(sys.argv[1]))
        answers.put((number, run.loss, list(run.notices)))
    except vivace.VivaceError as error:
        answers.put((number, error.kind, str(error)))

vivace.inspect()
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
fork = multiprocessing.get_context("fork")
answers = fork.SimpleQueue()
ranks = [fork.Process(target=rank, args=(number, port, answers)) for number in (0, 1)]
for each in ranks:
    each.start()
if "dies" in settings:
    ranks[1].join()  # else it is there still, and waited for
found = [answers.get() for _ in range(1 if "dies" in settings else 2)]
for each in ranks:
    each.join()
print(json.dumps(sorted(found)))
"""
ALONE = """
import sys
import vivace
from vivace.testing import jobs

print(vivace.train(jobs.mlp(), out=sys.argv[1]).loss)
"""
pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def two_ranks(stand_in, tmp_path):
    def train(plan, **settings):
        words = (tmp_path / "run", json.dumps(plan), json.dumps(settings))
        return json.loads(stand_in.python(TRAIN, *words, computes=True, gpus=2).splitlines()[-1])

    return train


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_they_train(two_ranks, stand_in, tmp_path, name):
    loss = float(stand_in.python(ALONE, tmp_path / "alone", computes=True).splitlines()[-1])
    found = two_ranks({name: {}})
    assert [answer[1] for answer in found] == pytest.approx([loss, loss], rel=1e-5)


def test_the_memory_of_one_ends_and_all_go_on_in_pieces(two_ranks):
    found = two_ranks({"ddp": {}}, most_samples=4)
    assert ["(another rank did)" in " ".join(notices) for _, _, notices in found] == [True, False]
    assert all("2 pieces (micro_batches)" in " ".join(notices) for _, _, notices in found)


def test_one_that_dies_is_named_by_the_other(two_ranks):
    ((_, kind, told),) = two_ranks({"ddp": {}}, dies=True)
    assert kind == "RankLost"
    assert told.startswith("rank 1 (process ")
    assert "has died" in told


def test_where_nccl_does_not_start_no_rank_is_called_lost(two_ranks):
    found = two_ranks({"ddp": {}}, stand_in={"STAND_IN_NCCL_ERROR": 1})
    assert [kind for _, kind, _ in found] == ["InputError", "InputError"]
    for _, _, told in found:
        assert told.startswith("the ranks' GPUs cannot reach each other: NCCL does not start (")
    assert any("unhandled system error" in told for _, _, told in found), "one may see the other end first"
