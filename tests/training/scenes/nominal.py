"""Streams whose length is only what they say: fewer samples come, of `odd` too few for the last batch, and of
`uneven` fewer on rank 0.
"""

import os
import time

import torch
from torch.utils.data import DataLoader, IterableDataset

import vivace

SAID = 48


class Numbers(IterableDataset):
    def __init__(self, num):
        self.num = num

    def __len__(self):
        return SAID

    def __iter__(self):
        inputs = torch.randn(SAID, 6, generator=torch.Generator().manual_seed(0))
        return ((x, x[:3].argmax()) for x in inputs[: self.num])


def trained(model, folder):
    time.sleep(2.0)  # the other rank has ended by then
    (folder / "handed_on").touch()


def make(num):
    return vivace.Job(
        model=lambda: torch.nn.Linear(6, 3),
        data=lambda: DataLoader(Numbers(num), batch_size=4),
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        on_trained=trained,
        epochs=2,
    )


short, odd, uneven = make(36), make(35), make(24 + 8 * int(os.environ.get("RANK", "0")))
