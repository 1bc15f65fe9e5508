"""One rank of a launch: asks a Ruler of this process what it says of a plan on one of the jobs below.

The global SCENE holds `environment`, `job`, `plan` and `answer`, the file for the verdict or the error.
"""

import dataclasses
import json
import os
from pathlib import Path

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.utils import clip_grad_norm_ as clip
from torch.utils.data import DataLoader, TensorDataset

import vivace
from vivace.verifying.effort import Effort
from vivace.verifying.ruler import Ruler

SAMPLES, BATCH = 96, 8
SHORT = Effort(8, 2, 2, 8, 3, rehearsal=64, life_seeds=3)  # a little more than half of the usual one


def data(size=BATCH):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    weights = torch.randint(0, 2, (SAMPLES,), generator=generator).float()
    return DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1), weights), batch_size=size, shuffle=True)


def mean_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def weighted_loss(model, batch):
    """A mean over the samples that count, as over tokens that are no padding: on ranks a mean of means."""
    losses = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return (losses * batch[2]).sum() / batch[2].sum().clamp(min=1.0)


def right(model, batches):
    return sum((model(x).argmax(1) == y).float().mean().item() for x, y, _ in batches)


def job(loss=mean_loss, norm=nn.Identity, drop=0.0, data=data):
    layers = lambda: (nn.Linear(6, 16), norm(16), nn.ReLU(), nn.Dropout(drop), nn.Linear(16, 3))  # noqa: E731
    return vivace.Job(
        model=lambda: nn.Sequential(*layers()),
        data=data,
        loss=loss,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
        metric=right,
        epochs=2,
    )


def blocks():
    """Of equal ones, which are gathered one at a time where ranks hold parts."""
    inner = (nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))
    return nn.Sequential(nn.Linear(6, 16), *inner, nn.Linear(16, 3))


plain = job()


def clipped(model):
    """Notes the compiled graphs where no ruler puts it back."""
    most = max(int(os.environ.get("GRAPHS", "0")), counters["stats"]["unique_graphs"])
    os.environ["GRAPHS"] = str(most)
    clip(model.parameters(), 0.5)


blocked = dataclasses.replace(plain, model=blocks, on_gradients=clipped)
dropping = job(drop=0.4)
weighted = job(weighted_loss)
blocked_weighted = dataclasses.replace(weighted, model=blocks)
normed = job(norm=nn.BatchNorm1d)
uneven = job(data=lambda: data(9))


def main(scene):
    os.environ.update(scene["environment"])
    torch.set_num_threads(1)
    try:
        ruler = Ruler(globals()[scene["job"]], vivace.inspect().to_dict(), scene["meeting"])
        Effort.within = classmethod(lambda cls, seconds, step_seconds: SHORT)
        ruler.prepare()
        answer = ruler.judge(scene["plan"]) | {"compiled_graphs": int(os.environ.get("GRAPHS", "0"))}
    except vivace.VivaceError as error:
        answer = {"error": str(error)}
    Path(scene["answer"]).write_text(json.dumps(answer))
    os._exit(0)


if "SCENE" in globals():
    main(globals()["SCENE"])
