"""The training that most cases edit: a small network with BatchNorm and dropout on scikit-learn's digits."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import vivace

torch.set_num_threads(1)
DIGITS = load_digits()
PICTURES = torch.tensor(DIGITS.images, dtype=torch.float32)[:, None] / 16
LABELS = torch.tensor(DIGITS.target)
TRAINED = 1024


def model():
    """Two stages of a convolution, BatchNorm and ReLU, and a classifier with dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(128, 10),
    )


def data():
    """Shuffled batches of 32."""
    return DataLoader(TensorDataset(PICTURES[:TRAINED], LABELS[:TRAINED]), batch_size=32, shuffle=True)


def held_out():
    """The other digits."""
    return DataLoader(TensorDataset(PICTURES[TRAINED:], LABELS[TRAINED:]), batch_size=128)


def loss(model, batch):
    """The mean cross entropy."""
    return functional.cross_entropy(model(batch[0]), batch[1])


def accuracy(model, batches):
    """The share of digits that are told right."""
    right = [(model(pictures).argmax(1) == labels).float() for pictures, labels in batches]
    return float(torch.cat(right).mean())


job = vivace.Job(
    model=model,
    data=data,
    loss=loss,
    optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
    validation=held_out,
    metric=accuracy,
    epochs=4,
)
