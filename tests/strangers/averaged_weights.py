"""A network that is evaluated by a moving average of its weights, on scikit-learn's wine data."""

import copy

import torch
from sklearn.datasets import load_wine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vivace


class Averaged(nn.Module):
    """A network, and a moving average of its weights, by which it is evaluated."""

    def __init__(self, network, decay=0.999):
        super().__init__()
        self.network, self.decay = network, decay
        self.average = copy.deepcopy(network).requires_grad_(False)

    def forward(self, x):
        return self.network(x) if self.training else self.average(x)

    @torch.no_grad()
    def follow(self, *_):
        for mine, theirs in zip(self.average.parameters(), self.network.parameters(), strict=True):
            mine.lerp_(theirs, 1 - self.decay)
        for mine, theirs in zip(self.average.buffers(), self.network.buffers(), strict=True):
            mine.copy_(theirs)


def optimizer(model):
    found = torch.optim.AdamW(model.network.parameters(), lr=1e-3)
    found.register_step_post_hook(model.follow)
    return found


def data():
    x, y = load_wine(return_X_y=True)
    x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
    return DataLoader(TensorDataset(x, torch.tensor(y)), batch_size=32, shuffle=True)


def network():
    return nn.Sequential(nn.Linear(13, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))


def accuracy(model, batches):
    right = [(model(x).argmax(1) == y).float().mean() for x, y in batches]
    return float(torch.stack(right).mean())


job = vivace.Job(
    model=lambda: Averaged(network()),
    data=data,
    loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    optimizer=optimizer,
    metric=accuracy,
)
