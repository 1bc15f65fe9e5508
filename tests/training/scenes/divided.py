"""Jobs of repeated blocks for ranks that divide the weights; no size is a multiple of a number of ranks.

OUT_OF_MEMORY, NOT_FINITE: in which step the rank in FAILING_RANK fails so. DIES_AFTER: rank 1 kills itself
after so many steps; STOPS_AFTER: it is asked to stop then.
"""

import dataclasses
import os
import signal

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import vivace

SAMPLES, BATCH, WIDTH, EPOCHS = 36, 12, 7, 3
STEPS = SAMPLES // BATCH * EPOCHS


class Block(torch.nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm, self.drop = torch.nn.LayerNorm(WIDTH), torch.nn.Dropout(dropout)
        self.inner, self.outer = torch.nn.Linear(WIDTH, 11), torch.nn.Linear(11, WIDTH, bias=False)

    def forward(self, x):
        return x + self.outer(self.drop(functional.gelu(self.inner(self.norm(x)))))


class Net(torch.nn.Module):
    """Tied: what encodes a token also scores it. `seen` is a buffer that each forward pass moves."""

    def __init__(self, dropout=0.2):
        super().__init__()
        self.tokens = torch.nn.Embedding(9, WIDTH)
        self.blocks = torch.nn.ModuleList(Block(dropout) for _ in range(3))
        self.head = torch.nn.Linear(WIDTH, 9, bias=False)
        self.head.weight = self.tokens.weight
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(WIDTH))

    def encode(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens):
        x = self.encode(tokens)
        if self.training:
            self.seen = 0.9 * self.seen + 0.1 * x.detach().mean((0, 1))
        return self.head(x + 0.1 * self.seen) * self.scale


def data():
    tokens = torch.randint(9, (SAMPLES, 5), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(tokens, tokens.roll(1, 1)), batch_size=BATCH, shuffle=True)


def loss(model, batch):
    Steps.taken += 1
    value = functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
    if os.environ.get("FAILING_RANK") == os.environ.get("RANK"):
        if os.environ.get("OUT_OF_MEMORY") == str(Steps.taken):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if os.environ.get("NOT_FINITE") == str(Steps.taken):
            return value * float("nan")
    return value


class Steps:
    taken = 0


def schedule(optimizer):
    """Hears of each step that has ended, too."""

    def rate(step):
        for name, number in (("DIES_AFTER", signal.SIGKILL), ("STOPS_AFTER", signal.SIGTERM)):
            if os.environ.get("RANK") == "1" and os.environ.get(name) == str(step):
                os.kill(os.getpid(), number)
        return 0.9**step

    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def metric(model, batches):
    """Calls the model other than by its forward, and looks at its weights."""
    found = [functional.linear(model.encode(tokens), model.head.weight) for tokens, _ in batches]
    assert all(type(weight) is torch.nn.Parameter for weight in model.parameters())
    return float(torch.cat(found).softmax(-1).max(-1).values.mean())


def trained(model, folder):
    assert all(type(weight) is torch.nn.Parameter for weight in model.parameters())
    torch.save(model.state_dict(), folder.parent / "handed_on.pt")


def make(model=Net, optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01)):
    return vivace.Job(
        model=model,
        data=data,
        loss=loss,
        optimizer=optimizer,
        scheduler=schedule,
        scheduler_every="step",
        metric=metric,
        on_gradients=lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5),
        on_trained=trained,
        epochs=EPOCHS,
    )


job = make()
unclipped = dataclasses.replace(job, on_gradients=None)
steady = make(lambda: Net(0.0), lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
