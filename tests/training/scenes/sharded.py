"""Numbered samples in shards, read as streams; each rank's steps append their samples' numbers to a file.

The folder SHARDS holds the tars. `tars` and `rows` leave it to Vivace to split, the other jobs do not.
"""

import os
from pathlib import Path

import torch
import webdataset
from torch import nn
from torch.utils.data import DataLoader

import vivace

FOLDER, RANK = Path(os.environ["SHARDS"]), os.environ.get("RANK", "alone")


def tar_loader(nodesplitter):
    shards = sorted(map(str, FOLDER.glob("*.tar")))
    data = webdataset.WebDataset(shards, shardshuffle=3, seed=3, nodesplitter=nodesplitter)
    data = data.shuffle(4, seed=5).decode().to_tuple("cls").map_tuple(float)
    return DataLoader(data, batch_size=4, num_workers=2)


def row_loader():
    import datasets

    data = datasets.Dataset.from_dict({"number": list(range(24))}).to_iterable_dataset(num_shards=3)
    return DataLoader(data.shuffle(seed=3, buffer_size=4), batch_size=4)


def loss(model, batch):
    numbers = batch["number"] if isinstance(batch, dict) else batch[0]
    with (FOLDER / f"{os.environ['RUN']}_{RANK}").open("a") as file:
        print(*map(int, numbers), file=file)
    return model(numbers[:, None].float() / 24).mean()


def job(data):
    return vivace.Job(
        model=lambda: nn.Linear(1, 1),
        data=data,
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        epochs=2,
    )


tars = job(lambda: tar_loader(None))
rows = job(row_loader)
split = job(lambda: tar_loader(webdataset.split_by_node))
untold = job(lambda: tar_loader(webdataset.shardlists.single_node_only))
