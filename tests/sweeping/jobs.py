"""Jobs with parameters, small enough to be trained dozens of times in a second."""

import dataclasses
import fcntl
import os
import random
import signal
import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import vivace

OPTIMIZERS = {
    "sgd": lambda model, lr, decay: torch.optim.SGD(
        model.parameters(), lr=lr, momentum=0.9, weight_decay=decay, nesterov=True
    ),
    "plain": lambda model, lr, decay: torch.optim.SGD(model.parameters(), lr=lr, weight_decay=decay),
    "adam": lambda model, lr, decay: torch.optim.Adam(model.parameters(), lr=lr / 10, weight_decay=decay),
    "adamw": lambda model, lr, decay: torch.optim.AdamW(model.parameters(), lr=lr / 10, weight_decay=decay),
    "groups": lambda model, lr, decay: torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": decay},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=lr / 10,
    ),
    "rmsprop": lambda model, lr, decay: torch.optim.RMSprop(model.parameters(), lr=lr / 100),
}


def table(count=96, features=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, features, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


def pictures(count=64):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(count, 1, 6, 6, generator=generator), torch.randint(3, (count,), generator=generator)
    )


def loss(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def accuracy(model, batches):
    right = total = 0
    for x, y in batches:
        right += int((model(x).argmax(1) == y).sum())
        total += len(y)
    return right / total


def job(
    lr: float = 0.1,
    width: int = 8,
    dropout: float = 0.0,
    optimizer: str = "sgd",
    decay: float = 0.0,
    clip: float = 0.0,
    schedule: str = "",
    batch: int = 16,
    epochs: int = 3,
) -> vivace.Job:
    def model():
        return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 3))

    schedules = {
        "epoch": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
        "step": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, lr, total_steps=6 * epochs),
    }
    return vivace.Job(
        model=model,
        data=lambda: DataLoader(table(), batch_size=batch, shuffle=True),
        validation=lambda: DataLoader(table(60, seed=1), batch_size=60),
        loss=loss,
        optimizer=lambda m: OPTIMIZERS[optimizer](m, lr, decay),
        on_gradients=(lambda m: nn.utils.clip_grad_norm_(m.parameters(), clip)) if clip else None,
        scheduler=schedules.get(schedule),
        scheduler_every="step" if schedule == "step" else "epoch",
        metric=accuracy,
        metric_name="accuracy",
        epochs=epochs,
    )


def convolutions(lr: float = 0.1, dropout: float = 0.2, noise: bool = False) -> vivace.Job:
    def model():
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Flatten(),
            nn.Linear(144, 3),
        )

    def noisy(model, batch):
        return loss(model, (batch[0] * (1 + 0.1 * random.random()), batch[1]))

    return vivace.Job(
        model=model,
        data=lambda: DataLoader(pictures(), batch_size=16, shuffle=True),
        loss=noisy if noise else loss,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=lr, momentum=0.9),
        metric=accuracy,
        epochs=2,
    )


class Gate(nn.Module):
    """Draws random numbers that no dropout of torch's draws."""

    def forward(self, x):
        return x * torch.rand_like(x)


def troubled(trouble: str = "", lr: float = 0.1, epochs: int = 1) -> vivace.Job:
    """A job that fails in the way that it is told to."""

    def hurt(model, batch):
        if trouble == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if trouble == "memory":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 EiB")
        if trouble == "raises":
            raise ValueError("seven is not allowed")
        if trouble == "slow":
            time.sleep(0.1)
        found = loss(model, batch)
        return found * float("nan") if trouble == "nan" else found

    return vivace.Job(
        model=lambda: nn.Linear(6, 3),
        data=lambda: DataLoader(table(48), batch_size=16),
        loss=hurt,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=lr),
        metric=accuracy,
        epochs=epochs,
    )


def headed(width: int = 4, heads: int = 2) -> vivace.Job:
    """A job whose width must be a multiple of its heads."""
    if width % heads:
        raise ValueError(f"{heads} heads do not divide {width}")
    return job(width=width, epochs=1)


def patient(lr: float = 0.1, optimizer: str = "adam", log: str = "", epochs: int = 60) -> vivace.Job:
    """A job whose runs are faster in a stack, because they wait in one step; `log` gets a line an epoch."""

    def slow(model, batch):
        time.sleep(0.02)
        return loss(model, batch)

    def logged(model, batches):
        with open(log, "a") as file:
            file.write(f"{lr}\n")
        return accuracy(model, batches)

    plain = job(lr, optimizer=optimizer, dropout=0.3, schedule="epoch", batch=48, epochs=epochs)
    return dataclasses.replace(plain, loss=slow, metric=logged)


def crowded(lr: float = 0.1, lock: str = "") -> vivace.Job:
    """A job whose steps wait; with a `lock` they get in each other's way: one that waits for it then holds it
    for longer.
    """

    def held(model, batch):
        if not lock:
            time.sleep(0.1)
            return loss(model, batch)
        with open(lock, "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                time.sleep(0.02)
            except BlockingIOError:
                fcntl.flock(file, fcntl.LOCK_EX)
                time.sleep(0.1)
        return loss(model, batch)

    return dataclasses.replace(job(lr), loss=held)


def divided(lr: float = 0.1) -> vivace.Job:
    """A job whose steps take the longer, the more threads divide them."""

    def waiting(model, batch):
        time.sleep(0.02 * torch.get_num_threads())
        return loss(model, batch)

    return dataclasses.replace(job(lr), loss=waiting)


def restless(lr: float = 0.1) -> vivace.Job:
    """A model that cannot be stacked: it draws random numbers of its own."""
    plain = job(lr=lr)
    return vivace.Job(
        model=lambda: nn.Sequential(nn.Linear(6, 8), Gate(), nn.Linear(8, 3)),
        data=plain.data,
        loss=loss,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=lr),
        metric=accuracy,
        epochs=1,
    )
