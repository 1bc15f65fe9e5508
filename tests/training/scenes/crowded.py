"""A job that runs out of memory above a number of samples, where and how the environment says.

FAILS_AFTER: so many steps before it does. DIES_AFTER: rank 1 kills itself after so many steps of torchrun's
first attempt.
"""

import dataclasses
import os
import signal

import torch
from torch.utils.data import DataLoader, TensorDataset

import vivace

SAMPLES, BATCH = 32, 8
TEXTS = {
    "class": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "text": RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"),
    "host": RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"),
}


def fails(what, samples):
    early = Failing.steps < int(os.environ.get("FAILS_AFTER", "0"))
    most, rank = int(os.environ.get("MOST", "4")), os.environ.get("FAILING_RANK")
    mine = rank is None or rank == os.environ.get("RANK", "0")
    return mine and not early and os.environ.get("FAILS", "forward") == what and samples > most


class Crowded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, what):
        ctx.what = what
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if fails(ctx.what, len(gradient)):
            raise TEXTS[os.environ.get("HOW", "class")]
        return gradient, None


class Net(torch.nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(6, 16), norm(16)
        self.drop, self.last = torch.nn.Dropout(0.3), torch.nn.Linear(16, 3)

    def forward(self, x):
        x = self.norm(self.first(x))
        x = Crowded.apply(x, "backward")
        if fails("forward", len(x)):
            raise TEXTS[os.environ.get("HOW", "class")]
        return self.last(self.drop(torch.relu(x)))


class Failing(torch.optim.Adam):
    steps = 0

    def step(self, closure=None):
        if os.environ.get("FAILS") == "update":
            raise TEXTS["class"]
        found = super().step(closure)
        Failing.steps += 1
        attempt, rank = os.environ.get("TORCHELASTIC_RESTART_COUNT"), os.environ.get("RANK")
        if (str(Failing.steps), attempt, rank) == (os.environ.get("DIES_AFTER"), "0", "1"):
            os.kill(os.getpid(), signal.SIGKILL)
        return found


def data():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), batch_size=BATCH, shuffle=True)


def make(norm=torch.nn.LayerNorm, model=None):
    return vivace.Job(
        model=model or (lambda: Net(norm)),
        data=data,
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: Failing(model.parameters(), lr=0.01),
        epochs=2,
    )


job = make()
normed = make(torch.nn.BatchNorm1d)


def from_others(model, batch):
    """What tells a sample from the others of its batch."""
    found = torch.nn.functional.normalize(model(batch[0]), dim=1)
    return torch.nn.functional.cross_entropy(found @ found.T / 0.1, torch.arange(len(found)))


contrastive = dataclasses.replace(job, loss=from_others)


class Hungry(torch.nn.Module):
    """Needs 4 MiB for each sample of a batch, three times over."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2**20,), 1e-3))
        self.last = torch.nn.Linear(1, 3)

    def forward(self, x):
        return self.last(torch.tanh(x[:, :1] * self.weight).exp().mean(1, keepdim=True))


hungry = vivace.Job(
    model=Hungry,
    data=lambda: [(torch.linspace(-1, 1, 6 * 32).view(32, 6), torch.arange(32) % 3)] * 2,
    loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
)
