"""What Vivace costs a step: microseconds of `Session.step`, of the steps that `vivace.tune` times, and of the
loop of `vivace.train`, above the same loop written by hand; and of that loop above what `tune` times.

    scripts/bench overhead [--blocks 15]

A linear model does next to nothing, so that nothing hides the seams; a multilayer perceptron and a
convolutional network with BatchNorm read a DataLoader. Blocks of the four loops alternate in one process;
the figures are median differences of processor time on one thread, with 95 % intervals. Demanded: at most 20
for the seams.

Then, by itself, what `train` notes before every step so that one that runs out of memory can be taken again:
the mean of a block, as it looks at Python's and NumPy's random streams only now and then; the median of the
blocks, and the least and the most. Demanded: at most 10 where a step moves neither these nor a buffer.

These are times of one machine, and differ from run to run by more than a change would: no record is kept.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import vivace
from vivace.measuring.statistics import speed_ratio
from vivace.measuring.worker import Worker
from vivace.training.snapshot import Snapshot

DEMANDED_MICROSECONDS, DEMANDED_OF_NOTES = 20.0, 10.0
SEAMS_STEPS, LOOP_STEPS, WARM_UP_STEPS, BATCH = 2000, 300, 50, 32


def main() -> None:
    """Print what seams and train loop add; exit code 1 where seams or notes take more than is demanded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--blocks", type=int, default=15, help="of steps; at least 3")
    blocks = parser.parse_args().blocks
    torch.set_num_threads(1)
    high = seams(blocks)
    loops(blocks, "multilayer perceptron", perceptron, (64,))
    loops(blocks, "convolutional network", convolutional, (3, 8, 8))
    unmoved = notes(blocks, "nothing moves", perceptron, (64,), lambda: None)
    notes(blocks, "NumPy's stream moves", perceptron, (64,), lambda: numpy.random.rand())
    notes(blocks, "buffers of BatchNorm move", convolutional, (3, 8, 8), lambda: None)
    if high > DEMANDED_MICROSECONDS or unmoved > DEMANDED_OF_NOTES:
        raise SystemExit("more than is demanded")


def perceptron() -> nn.Module:
    """Two linear layers."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def convolutional() -> nn.Module:
    """Four convolutions, each with BatchNorm."""
    widths = (3, 16, 16, 16, 16)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The cross entropy of a batch."""
    return functional.cross_entropy(model(batch[0]), batch[1])


def seams(blocks: int) -> float:
    """Print what the seams add to one step on one batch; the upper end of the interval."""
    batch = (torch.randn(2, 4), torch.randint(2, (2,)))
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def by_hand() -> None:
        images, labels = batch[0].to("cpu"), batch[1].to("cpu")
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    with vivace.attach(vivace.Plan(), model=model, optimizer=optimizer, loss=loss) as session:
        pairs = [(seconds_of(by_hand), seconds_of(lambda: session.step(batch))) for _ in range(blocks + 1)]
    hand, extra, low, high = difference(pairs[1:])
    print(
        f"linear, one batch: by hand {hand:.1f} us a step; the seams add {extra:.1f} "
        f"({low:.1f} to {high:.1f})"
    )
    return high


def seconds_of(step: Callable[[], object]) -> float:
    """Processor seconds of one step, over a block."""
    begin = time.process_time()
    for _ in range(SEAMS_STEPS):
        step()
    return (time.process_time() - begin) / SEAMS_STEPS


def difference(pairs: list[tuple[float, float]]) -> tuple[float, float, float, float]:
    """Microseconds of the first of each pair, and how many more the second takes: median, low, high."""
    hand = statistics.median(first for first, _ in pairs) * 1e6
    ratio = speed_ratio([(second, first) for first, second in pairs])
    extra, low, high = (hand * (value - 1) for value in (ratio.estimate, ratio.low, ratio.high))
    return hand, extra, low, high


def loops(blocks: int, name: str, model: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    """Print what `Session.step`, what `tune` times and the loop of `train` add to a loop by hand."""
    samples = torch.randn(BATCH * LOOP_STEPS, *shape)
    data = TensorDataset(samples, torch.randint(10, (len(samples),)))
    watch = Watch()
    job = vivace.Job(
        model=model,
        data=lambda: DataLoader(data, batch_size=BATCH, shuffle=True),
        loss=watch.loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    )
    ways: tuple[Callable[[vivace.Job], None], ...] = (by_hand, by_session, by_tune, by_train)
    found: list[list[float]] = []
    for _ in range(blocks + 1):
        found.append([])
        for way in ways:
            watch.calls = 0
            way(job)
            found[-1].append(watch.seconds())
    for number, way_name in ((1, "Session.step"), (2, "what tune times"), (3, "the train loop")):
        hand, extra, low, high = difference([(block[0], block[number]) for block in found[1:]])
        print(f"{name}: by hand {hand:.0f} us a step; {way_name} adds {extra:.0f} ({low:.0f} to {high:.0f})")
    timed, extra, low, high = difference([(block[2], block[3]) for block in found[1:]])
    print(f"{name}: tune times {timed:.0f} us a step; train adds {extra:.0f} ({low:.0f} to {high:.0f})")


def notes(
    blocks: int, name: str, model: Callable[[], nn.Module], shape: tuple[int, ...], move: Callable[[], Any]
) -> float:
    """Print what noting the state before a step takes, between steps; the median of the blocks."""
    batch = (torch.randn(BATCH, *shape), torch.randint(10, (BATCH,)))
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
    found = []
    with vivace.attach(vivace.Plan(), model=trained, optimizer=optimizer, loss=loss) as session:
        snapshot = Snapshot(session)
        for _ in range(blocks + 1):
            spent = 0.0
            for _ in range(LOOP_STEPS):
                begin = time.thread_time()
                between = time.thread_time()
                snapshot.take()
                spent += time.thread_time() - between - (between - begin)  # less what the clock itself takes
                session.step(batch)
                move()
            found.append(1e6 * spent / LOOP_STEPS)
    middle, *ends = statistics.median(found[1:]), min(found[1:]), max(found[1:])
    print(f"noting the state, {name}: {middle:.1f} us a step ({ends[0]:.1f} to {ends[1]:.1f})")
    return middle


class Watch:
    """The loss of a job, which notes when its first and its last step after the warm-up begin."""

    def __init__(self) -> None:
        self.calls, self.begin, self.end = 0, 0.0, 0.0

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The loss of a batch."""
        self.calls += 1
        if self.calls == WARM_UP_STEPS:
            self.begin = time.process_time()
        self.end = time.process_time()
        return loss(model, batch)

    def seconds(self) -> float:
        """Processor seconds of a step since the warm-up."""
        return (self.end - self.begin) / (self.calls - WARM_UP_STEPS)


def by_hand(job: vivace.Job) -> None:
    """Train for one epoch in a plain loop."""
    model = job.model()
    optimizer = job.optimizer(model)
    for batch in job.data():
        job.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def by_session(job: vivace.Job) -> None:
    """Train for one epoch in a plain loop with a session's steps."""
    model = job.model()
    optimizer = job.optimizer(model)
    with vivace.attach(vivace.Plan(), model=model, optimizer=optimizer, loss=job.loss) as session:
        for batch in session.batches(job.data()):
            session.step(batch)


def by_tune(job: vivace.Job) -> None:
    """The steps of a timed block, in the object that answers `tune` in a child process."""
    worker = Worker(job, vivace.inspect().to_dict())
    worker.open({})
    worker.block(LOOP_STEPS)
    assert worker.session is not None
    worker.session.close()


def by_train(job: vivace.Job) -> None:
    """Train for one epoch with `vivace.train`, whose first and last moments are not counted."""
    with tempfile.TemporaryDirectory() as folder:
        vivace.train(job, out=Path(folder) / "run")


if __name__ == "__main__":
    main()
