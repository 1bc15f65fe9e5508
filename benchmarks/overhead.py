"""What the seams cost: microseconds a step of `Session.step` above the same loop written by hand.

    scripts/bench overhead

The model does next to nothing, so that nothing hides the difference. Blocks alternate; the figure is the
median difference with its 95 % interval, in one process. Demanded: at most 20.
"""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.nn import functional

import vivace
from vivace.measuring.statistics import speed_ratio

STEPS, BLOCKS, DEMANDED_MICROSECONDS = 2000, 15, 20.0


def main() -> None:
    """Print the overhead of the empty plan; exit code 1 where it is more than demanded."""
    torch.set_num_threads(1)
    batch = (torch.randn(2, 4), torch.randint(2, (2,)))
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def by_hand() -> None:
        images, labels = batch[0].to("cpu"), batch[1].to("cpu")
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    with vivace.attach(vivace.Plan(), model=model, optimizer=optimizer, loss=loss) as session:
        pairs = []
        for _ in range(BLOCKS + 1):
            pairs.append((seconds_of(by_hand), seconds_of(lambda: session.step(batch))))
    pairs = pairs[1:]
    hand = sorted(a for a, _ in pairs)[len(pairs) // 2] / STEPS * 1e6
    ratio = speed_ratio([(b, a) for a, b in pairs])
    extra, low, high = (hand * (value - 1) for value in (ratio.estimate, ratio.low, ratio.high))
    print(f"by hand {hand:.1f} us a step; the seams add {extra:.1f} us ({low:.1f} to {high:.1f})")
    if high > DEMANDED_MICROSECONDS:
        raise SystemExit(f"more than the {DEMANDED_MICROSECONDS:.0f} us that are demanded")


def seconds_of(step: object) -> float:
    """Time one block of steps."""
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()  # type: ignore[operator]
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
