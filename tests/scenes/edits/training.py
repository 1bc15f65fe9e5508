"""A small training and edits of it: what an engineer, or an agent, might hand in as faster or tidier."""

import dataclasses
import itertools

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import vivace

torch.set_num_threads(1)
SAMPLES, FEATURES, CLASSES = 96, 12, 4


def data(shift=0):
    numbers = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, FEATURES, generator=numbers)
    labels = inputs[:, :CLASSES].argmax(1).roll(shift)
    return DataLoader(TensorDataset(inputs, labels), batch_size=16, shuffle=True)


class Network(nn.Module):
    def __init__(self, rate=0.2):
        super().__init__()
        self.first = nn.Linear(FEATURES, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, CLASSES)
        self.dropout = nn.Dropout(rate)

    def forward(self, inputs):
        return self.head(self.dropout(functional.gelu(self.norm(self.first(inputs)))))


class Reordered(Network):
    def __init__(self):
        super().__init__()
        self.head.reset_parameters()  # other draws, from the same distribution

    def forward(self, inputs):
        hidden = functional.linear(inputs.flip(1), self.first.weight.flip(1))  # the sums in another order
        hidden = functional.gelu(self.norm(hidden + self.first.bias))
        return self.head(self.dropout(hidden))


class Wider(Network):
    def __init__(self):
        super().__init__()
        nn.init.normal_(self.first.weight, std=0.3)


class Renamed(Network):
    def __init__(self):
        super().__init__()
        self.classifier = self.head
        del self.head


class InHalf(Network):
    def forward(self, inputs):
        with torch.autocast("cpu", torch.bfloat16):
            found = super().forward(inputs)
        return found.float()


def loss(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def summed(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum") / 10


def groups(model, decay_on_biases):
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    decays = [(weights, 0.05), (biases, 0.05 if decay_on_biases else 0.0)]
    return torch.optim.AdamW([{"params": p, "weight_decay": decay} for p, decay in decays], lr=1e-3)


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


job = vivace.Job(
    model=Network,
    data=data,
    loss=loss,
    optimizer=lambda model: groups(model, False),
    on_gradients=clip,
    epochs=3,
)


def edited(**changes):
    return dataclasses.replace(job, **changes)


tidied = edited(loss=lambda model, batch: loss(model, tuple(batch)))
reordered = edited(model=Reordered, data=lambda: data())
compiled = edited(model=lambda: torch.compile(Network(), backend="eager"))
in_half = edited(model=InHalf)
leaning = edited(model=InHalf, loss=lambda model, batch: loss(model, batch) * 1.03)
grouped_anew = edited(
    optimizer=lambda model: torch.optim.AdamW(
        [
            {"params": [p], "weight_decay": 0.0 if name.endswith("bias") else 0.05}
            for name, p in model.named_parameters()
        ],
        lr=1e-3,
    )
)
reduction_changed = edited(loss=summed)
dropout_swapped = edited(model=lambda: Network(0.5))
biases_decayed = edited(optimizer=lambda model: groups(model, True))
labels_shifted = edited(data=lambda: data(1))
clipping_lost = edited(on_gradients=None)
begun_wider = edited(model=Wider)
renamed = edited(model=Renamed)
shortened = edited(epochs=2)


def later(factor):
    """A Job whose 300th loss and all after it are multiplied by `factor`."""
    calls = itertools.count(1)

    def of_batch(model, batch):
        found = loss(model, batch)
        return found * factor if torch.is_grad_enabled() and next(calls) >= 300 else found

    return edited(loss=of_batch)


scaled_later = later(1.05)
rounded_later = later(1.0 + 2.0**-22)


def accuracy(model, batches):
    hits = [(model(inputs).argmax(1) == labels).float() for inputs, labels in batches]
    return torch.cat(hits).mean().item()


def accuracy_in_half(model, batches):
    """Faster, and the weights come back rounded."""
    model.bfloat16()
    found = accuracy(model, [(inputs.bfloat16(), labels) for inputs, labels in batches])
    model.float()
    return found


measured = edited(metric=accuracy)
measured_tidily = edited(metric=lambda model, batches: accuracy(model, list(batches)))
measured_in_half = edited(metric=accuracy_in_half)


def long_data():
    """The last of its 151 batches has half as many samples."""
    numbers = torch.Generator().manual_seed(0)
    inputs = torch.randn(150 * 16 + 8, FEATURES, generator=numbers)
    return DataLoader(TensorDataset(inputs, inputs[:, :CLASSES].argmax(1)), batch_size=16)


def per_full_batch(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum") / 16


long = edited(data=long_data)
long_and_reordered = edited(data=long_data, model=Reordered)
last_batch_lighter = edited(data=long_data, model=Reordered, loss=per_full_batch)


class Warming(Network):
    """Its outputs grow with the passes that it has counted."""

    def __init__(self, persistent):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()), persistent=persistent)

    def forward(self, inputs):
        if self.training:
            self.passes += 1.0
        return super().forward(inputs) * (1.0 + 0.05 * self.passes)


warming = edited(model=lambda: Warming(True))
warming_anew = edited(model=lambda: Warming(False))


class Averaged(torch.optim.Optimizer):
    """Steps along a running mean of the gradients, which is kept under a name."""

    def __init__(self, parameters, kept_as):
        super().__init__(parameters, {"lr": 0.1})
        self.kept_as = kept_as

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault(self.kept_as, torch.zeros_like(p))
                p.sub_(group["lr"] * mean.lerp_(p.grad, 0.1))


averaged = edited(optimizer=lambda model: Averaged(model.parameters(), "mean"))
own_momentum = edited(optimizer=lambda model: Averaged(model.parameters(), "average"))


def own_step(model, optimizer, batch, clears=True):
    found = loss(model, batch)
    torch.autograd.backward(found)
    optimizer.step()
    if clears:
        optimizer.zero_grad()
    return found.detach()


stepping = edited(loss=None, on_gradients=None, step=own_step)
gradients_kept = edited(
    loss=None,
    on_gradients=None,
    step=lambda model, optimizer, batch: own_step(model, optimizer, batch, False),
)
