"""A job of a few milliseconds a step in which everything is random: order, augmentation, dropout, metric."""

import random
import time

import numpy
import torch
from torch.utils.data import DataLoader, Dataset

import vivace

SAMPLES, BATCH, EPOCHS = 40, 8, 3
STEPS_AN_EPOCH = SAMPLES // BATCH
STEPS = STEPS_AN_EPOCH * EPOCHS


class Noisy(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        noise = torch.rand(6) + random.random() + float(numpy.random.rand())
        return torch.full((6,), index / SAMPLES) + 0.1 * noise, index % 3


def build_model():
    layers = torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 3)
    return torch.nn.Sequential(*layers)


def loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def slow_loss(model, batch):
    time.sleep(0.02)
    return loss(model, batch)


def slower_loss(model, batch):
    time.sleep(0.1)
    return loss(model, batch)


def metric(model, batches):
    torch.rand(1)
    right = [(model(inputs).argmax(1) == labels).float().mean().item() for inputs, labels in batches]
    return sum(right) / len(right)


def make(num_workers=0, loss=loss, model=build_model, **changes):
    fields = {
        "model": model,
        "data": lambda: DataLoader(Noisy(), batch_size=BATCH, shuffle=True, num_workers=num_workers),
        "loss": loss,
        "optimizer": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        "metric": metric,
        "epochs": EPOCHS,
    }
    return vivace.Job(**{**fields, **changes})


def own_step(models, optimizers, batch):
    """As a GAN trains: two models, two optimizers, two updates a step."""
    time.sleep(0.02)
    (first, second), found = models, []
    for optimizer in optimizers:
        loss = torch.nn.functional.cross_entropy(second(first(batch[0])), batch[1])
        loss.backward()
        optimizer.step()
        for each in optimizers:
            each.zero_grad()
        found.append(loss)
    return sum(found)


def build_two():
    return [torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.3)), torch.nn.Linear(8, 3)]


two_models = vivace.Job(
    model=build_two,
    data=lambda: DataLoader(Noisy(), batch_size=BATCH, shuffle=True),
    optimizer=lambda models: [torch.optim.Adam(model.parameters(), lr=0.01) for model in models],
    step=own_step,
    epochs=EPOCHS,
)
job = make()
workers = make(num_workers=2)
slow = make(loss=slow_loss)
slower = make(loss=slower_loss)  # until another process has done something
long = make(loss=slow_loss, epochs=12)
wider = make(model=lambda: torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)))
longer = make(data=lambda: DataLoader(Noisy(), batch_size=10, shuffle=True))
