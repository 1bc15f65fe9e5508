"""How long loops say that they are going to be, read in their source."""

import argparse
import functools
import random
from types import SimpleNamespace

import pytest
import torch

from vivace.live.length import Length

PASS = 30


def looked(train, a_pass=None):
    """What was said of the run's steps at each eighth step of ``train(step)``, and how many there were; of
    the data `a_pass` has so many.
    """
    length, said, count = Length(), [], 0
    of_passes = train in OF_PASSES or isinstance(train, functools.partial)
    batches = a_pass or (PASS if of_passes else 0)

    def step():
        nonlocal count
        count += 1
        if count % 8 == 0:
            left = batches - 1 - (count - 1) % batches if batches else 0
            length.look(count, left, batches)
            said.append(length.num_steps)

    train(step)
    return said, count


def epochs_of_settings(step):
    args = argparse.Namespace(epochs=4)
    for _epoch in range(1, args.epochs + 1):
        for _batch in [None] * PASS:
            step()


def epochs_of_a_table(step):
    config = {"num_epochs": 3}
    for epoch in range(int(config["num_epochs"])):  # noqa: B007
        for _batch in [None] * PASS:
            step()


def steps_alone(step):
    for _, _number in enumerate(range(120)):
        step()


class Trainer:
    """Its epochs and its steps are loops of different methods."""

    args = SimpleNamespace(epochs=5)

    def train(self, step):
        for self_epoch in range(self.args.epochs):
            self.one(step, self_epoch)

    def one(self, step, epoch):
        for _number in range(20):
            step()


def trained_by_methods(step):
    Trainer().train(step)


def counted(step):
    number = 0
    while number < 100:
        step()
        number += 1


def as_mingpt(step):
    config, number = SimpleNamespace(max_iters=100), 0
    while True:
        step()
        number += 1
        if config.max_iters is not None and number >= config.max_iters:
            break


def as_makemore(step):
    args, number = SimpleNamespace(max_steps=100), 0
    while True:
        step()
        number += 1
        if args.max_steps >= 0 and number >= args.max_steps:
            break


def as_nanogpt(step):
    number, most = 0, 99
    while True:
        step()
        number += 1
        if number > most:
            break


def counted_in_tokens(step):
    seen = 0
    while not seen >= 6400 and seen < 10_000:
        step()
        seen += 64
        if seen >= 6400 or seen > 9000:
            break


def counted_down(step):
    left = 100
    while left > 0:
        step()
        left -= 1


def steps_over_passes(step):
    """Batches are drawn from pass after pass."""
    for _number in range(8 * PASS):
        step()


def until_it_is_good(step):
    best, worse = 0, 0
    while worse < 10:
        step()
        best += 1
        if best > 100:
            worse += 1


def for_a_time(step):
    begin, number = 0.0, 0
    while begin < 10.0:
        step()
        number += 1
        begin += 0.1


def epochs_of_slices(step):
    ids, length = torch.zeros(2, 125), 5
    for _epoch in range(3):
        for _first in range(0, ids.size(1) - length, length):
            step()


def epochs_of_unknown_length(step):
    for _epoch in range(6):
        number = 0
        while number < 50:
            step()
            number += 1


def backwards(step):
    for _number in reversed(range(120)):
        step()


def drawn(step):
    for _seed in random.Random(0).sample(range(10_000), 120):
        step()


OF_PASSES = (epochs_of_settings, epochs_of_a_table, steps_over_passes)
OF_WHILE = (counted, as_mingpt, as_makemore, as_nanogpt, counted_down)


@pytest.mark.parametrize(
    "train", [epochs_of_settings, epochs_of_a_table, steps_alone, epochs_of_slices, *OF_WHILE]
)
def test_loops_over_ranges_say_how_long_they_are(train):
    said, count = looked(train)
    assert set(said[1:]) == {count}


def test_what_is_said_is_never_more_than_comes():
    said, count = looked(trained_by_methods)
    assert max(said) <= count
    assert said[2] > count / 2


def test_an_epoch_is_as_long_as_those_before_it():
    said, count = looked(epochs_of_unknown_length)
    after_two = [number for number, steps in zip(said, range(8, count, 8), strict=False) if 120 < steps < 250]
    assert count * 0.7 < min(after_two)
    assert max(said) <= count
    assert said[-1] < count * 1.05  # the last epoch promises no other


def test_a_number_that_counts_something_else_says_as_much():
    said, count = looked(counted_in_tokens)
    assert all(abs(number - count) < 1 for number in said[1:])


def test_steps_that_are_counted_over_passes_are_no_passes():
    said, count = looked(steps_over_passes)
    assert count <= said[-1] <= count + PASS


def test_steps_that_are_counted_end_a_pass_that_is_longer():
    """As minGPT's, whose sampler has 10,000,000,000 pictures."""
    said, count = looked(as_mingpt, a_pass=10**9)
    assert set(said[1:]) == {count}


def test_a_loop_that_begins_again_is_a_part_of_the_pass():
    def several_steps_a_batch(step):
        for _batch in [None] * 40:
            for _again in range(5):
                step()

    said, count = looked(several_steps_a_batch, a_pass=200)
    assert set(said[3:]) == {count}


@pytest.mark.parametrize("train", [until_it_is_good, for_a_time, backwards, drawn])
def test_what_says_nothing_is_not_guessed(train):
    said, _ = looked(train)
    assert said == [8 * number for number in range(1, len(said) + 1)]


def test_bars_around_a_range_change_nothing():
    tqdm = SimpleNamespace(auto=SimpleNamespace(tqdm=iter))

    def shown(step):
        for _number in tqdm.auto.tqdm(range(120)):
            step()

    said, count = looked(shown)
    assert set(said[1:]) == {count}


def test_code_without_a_source_says_nothing():
    names = {}
    exec("def train(step):\n    for number in range(100):\n        step()", names)
    said, _ = looked(names["train"])
    assert said[-1] == 8 * len(said)


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")
def test_lightning_says_its_epochs():
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self, step):
            super().__init__()
            self.layer, self.ended = torch.nn.Linear(2, 1), step

        def training_step(self, batch, number):
            self.ended()
            return self.layer(batch[0]).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def train(step, **limits):
        data = torch.utils.data.TensorDataset(torch.ones(PASS, 2))
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = lightning.Trainer(accelerator="cpu", **quiet, enable_model_summary=False, **limits)
        trainer.fit(Module(step), torch.utils.data.DataLoader(data))

    said, count = looked(functools.partial(train, max_epochs=3))
    assert count == 3 * PASS
    assert set(said[1:]) == {count}
    said, _ = looked(functools.partial(train, max_epochs=3, max_steps=40))
    assert max(said) == 2 * PASS, "by the passes over the data alone"
