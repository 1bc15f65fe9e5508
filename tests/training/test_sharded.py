"""Streams in shards on two ranks that exchange over gloo: every sample trains once an epoch, on one rank."""

import itertools
from pathlib import Path

import pytest
import webdataset

SCENE = Path(__file__).parent / "scenes" / "sharded.py"
SAMPLES, BATCH, SHARDS = 24, 4, 3
DDP = "format = 1\n[techniques.ddp]\n"


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    each = SAMPLES // SHARDS
    for shard in range(SHARDS):
        with webdataset.TarWriter(str(folder / f"{shard}.tar")) as tar:
            for number in range(shard * each, (shard + 1) * each):
                tar.write({"__key__": f"{number:02}", "cls": number})
    return folder


@pytest.fixture
def trained(launch, places, tmp_path, shards):
    """``(job, ranks, run, arguments...) -> (exit codes, answers)``: a run in one part for each arguments."""

    def train(job, num_ranks, run, *parts):
        for arguments in parts:
            children = []
            for place in places(num_ranks) if num_ranks > 1 else [{}]:
                scene = {"environment": {"SHARDS": str(shards), "RUN": run, **place}}
                scene |= {"plan": DDP} if num_ranks > 1 else {}
                found = {"out": str(tmp_path / run), **arguments}
                children.append(launch(job, found, file=SCENE, **scene))
            codes = [child.wait() for child in children]
        return codes, [child.answer for child in children]

    return train


def steps_of(shards, run, rank):
    """The numbers of the samples in each step of a rank."""
    lines = (shards / f"{run}_{rank}").read_text().splitlines()
    return [[int(number) for number in line.split()] for line in lines]


def once_each(steps):
    """Is every sample in one of each epoch's steps, and only there?"""
    length = SAMPLES // BATCH
    epochs = [list(itertools.chain(*steps[start : start + length])) for start in (0, length)]
    assert len(steps) == 2 * length
    return all(sorted(epoch) == list(range(SAMPLES)) for epoch in epochs)


@pytest.mark.parametrize(("job", "parts"), [("tars", [{"max_steps": 8}, {"resume": True}]), ("rows", [{}])])
def test_no_sample_is_lost_or_twice(job, parts, trained, shards):
    codes, answers = trained(job, 2, "ranks", *parts)
    assert codes == [0, 0], answers
    assert answers[0]["resumed_from_step"] == parts[0].get("max_steps")
    ranks = [steps_of(shards, "ranks", rank) for rank in range(2)]
    assert {len(step) for steps in ranks for step in steps} == {BATCH // 2}
    together = [first + second for first, second in zip(*ranks, strict=True)]
    assert once_each(together)
    assert together != sorted(together)


def test_two_ranks_read_what_one_process_reads(trained, shards):
    for num_ranks, run in ((2, "ranks"), (1, "alone")):
        trained("tars", num_ranks, run, {"max_steps": 9})
    ranks = [steps_of(shards, "ranks", rank) for rank in range(2)]
    together = [first + second for first, second in zip(*ranks, strict=True)]
    assert together == steps_of(shards, "alone", "alone")


@pytest.mark.parametrize(
    ("job", "message"),
    [("split", "leave out what splits the data by rank ("), ("untold", "nodesplitter")],
)
def test_what_would_lose_samples_ends_on_both_ranks(job, message, trained):
    codes, answers = trained(job, 2, "ranks", {})
    assert codes == [2, 2]
    assert answers[0] == answers[1]
    assert message in answers[0]["error"]["message"]
