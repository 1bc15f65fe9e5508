"""A job that asks for two threads, and writes down in the file $THREADS_SEEN how many its losses have."""

import os
from pathlib import Path

import torch

import vivace

torch.set_num_threads(2)


def loss(model, batch):
    with Path(os.environ["THREADS_SEEN"]).open("a", encoding="utf-8") as file:
        print(torch.get_num_threads(), file=file)
    return model(batch).square().mean()


job = vivace.Job(
    model=lambda: torch.nn.Linear(4, 1),
    data=lambda: list(torch.randn(9, 2, 4, generator=torch.Generator().manual_seed(0))),
    loss=loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
)
