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


# ---- what shows in no short stretch of training
def then_linear(steps):
    """A job whose learning rate stays for 200 steps, and then falls to zero in so many."""
    return edited(
        epochs=100,
        scheduler_every="step",
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: max(0.0, 1.0 - max(0, step - 200) / steps)
        ),
    )


falling = then_linear(400)
falling_sooner = then_linear(360)
falling_by_hand = dataclasses.replace(
    falling,
    scheduler=lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
            torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=400),
        ],
        milestones=[200],
    ),
)


class Stacked(nn.Module):
    """Blocks that are alike but for their numbers, behind an embedding of which one row is zero."""

    def __init__(self):
        super().__init__()
        self.first = nn.Embedding(20, 16, padding_idx=0)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, inputs):
        hidden = self.first((3 * inputs.abs()).long().clamp(max=19)).mean(1)
        for block in self.blocks:
            hidden = hidden + self.mixed(block, hidden)
        return self.head(hidden)

    def mixed(self, block, hidden):
        return functional.dropout(torch.tanh(block(hidden)), 0.2, self.training)


class DrawnAnew(Stacked):
    def __init__(self):
        super().__init__()
        self.head.reset_parameters()


class Copied(Stacked):
    def __init__(self):
        super().__init__()
        self.blocks[1].load_state_dict(self.blocks[0].state_dict())


class Unpadded(Stacked):
    def __init__(self):
        super().__init__()
        nn.init.normal_(self.first.weight)


class OneMask(Stacked):
    """All blocks leave out the same units."""

    def mixed(self, block, hidden):
        if block is self.blocks[0]:
            self.mask = functional.dropout(torch.ones_like(hidden), 0.2, self.training)
        return torch.tanh(block(hidden)) * self.mask


class MaskOfUnits(Stacked):
    """All samples leave out the same units."""

    def mixed(self, block, hidden):
        mask = functional.dropout(torch.ones_like(hidden[0]), 0.2, self.training)
        return torch.tanh(block(hidden)) * mask


class MasksAtOnce(Stacked):
    """The masks of all blocks are drawn together."""

    def mixed(self, block, hidden):
        if block is self.blocks[0]:
            self.masks = functional.dropout(torch.ones(2, *hidden.shape), 0.2, self.training).unbind()
        return torch.tanh(block(hidden)) * self.masks[0 if block is self.blocks[0] else 1]


class Noisy(torch.utils.data.Dataset):
    """Samples that get other noise each time that they are read; `cached`: the first time alone."""

    def __init__(self, cached):
        self.samples, self.cached = data().dataset, {} if cached else None

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        if self.cached is not None and index in self.cached:
            return self.cached[index]
        inputs, label = self.samples[index]
        found = inputs + 0.1 * torch.randn(FEATURES), label
        if self.cached is not None:
            self.cached[index] = found
        return found


noisy = edited(data=lambda: DataLoader(Noisy(False), batch_size=16, shuffle=True))
noise_cached = edited(data=lambda: DataLoader(Noisy(True), batch_size=16, shuffle=True))


class LostScale(Network):
    """The norm's weight is used, and learns nothing."""

    def forward(self, inputs):
        norm = functional.layer_norm(self.first(inputs), (32,), self.norm.weight.detach(), self.norm.bias)
        return self.head(self.dropout(functional.gelu(norm)))


class SeededItself(Network):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__()


norm_detached = edited(model=LostScale)
seeded_itself = edited(model=SeededItself)
stacked = edited(model=Stacked)
drawn_anew = edited(model=DrawnAnew)
copied = edited(model=Copied)
unpadded = edited(model=Unpadded)
one_mask = edited(model=OneMask)
mask_of_units = edited(model=MaskOfUnits)
masks_at_once = edited(model=MasksAtOnce)
measured_but_the_last = edited(metric=lambda model, batches: accuracy(model, list(batches)[:-1]))


def counting():
    """A metric that depends on how often it was asked."""
    asked = itertools.count()
    return lambda model, batches: accuracy(model, batches) + 0.01 * next(asked)


measured_in_turn = edited(metric=counting())
measured_and_reordered = edited(metric=accuracy, model=Reordered)


class Rewritten(torch.optim.Optimizer):
    """AdamW, with no more settings than it needs."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (first, second), rate = group["betas"], group["lr"]
            for p in group["params"]:
                kept = self.state[p]
                if not kept:
                    kept |= {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p)}
                    kept["exp_avg_sq"] = torch.zeros_like(p)
                kept["step"] += 1
                p.mul_(1 - rate * group["weight_decay"])
                mean = kept["exp_avg"].lerp_(p.grad, 1 - first) / (1 - first ** kept["step"].item())
                square = kept["exp_avg_sq"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                root = (square / (1 - second ** kept["step"].item())).sqrt() + group["eps"]
                p.addcdiv_(mean, root, value=-rate)


rewritten = edited(optimizer=lambda model: Rewritten(groups(model, False).param_groups))
rewritten_without_decay = edited(optimizer=lambda model: Rewritten(model.parameters()))
adam = edited(optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3))
adamw_without_decay = edited(
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
)
adamw_with_decay = edited(optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3))


class MaskLost(Stacked):
    def mixed(self, block, hidden):
        return torch.tanh(block(hidden)) if block is self.blocks[1] else super().mixed(block, hidden)


def stepping_with(model, step=own_step):
    return edited(model=model, loss=None, on_gradients=None, step=step)


def until_chance_ends_it(model, optimizer, batch, beside=0):
    """A step on noisy batches, as many as are drawn; numbers `beside` them are not used."""
    torch.rand(beside)
    parts = []
    while len(parts) < 12 and (not parts or torch.rand(()) > 0.12):
        parts.append(loss(model, (batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1])))
    torch.stack(parts).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(parts).mean().detach()


stacked_in_steps = stepping_with(Stacked)
mask_lost_in_steps = stepping_with(MaskLost)
mask_of_units_in_steps = stepping_with(MaskOfUnits)
by_chance = stepping_with(lambda: Network(0.0), until_chance_ends_it)
by_other_chance = stepping_with(lambda: Network(0.0), lambda *given: until_chance_ends_it(*given, beside=1))
