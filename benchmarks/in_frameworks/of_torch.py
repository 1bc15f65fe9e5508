"""The jobs in PyTorch: eager, at the fastest that its guides offer, and under a plan of Vivace."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from common import (
    BLOCKS,
    DROPOUT,
    HEADS,
    HIDDEN,
    LEARNING_RATE,
    LENGTH,
    MOMENTUM,
    STAGES,
    WIDTH,
    WORDS,
    Arrays,
    Task,
    batches,
    weights,
)
from torch import nn
from torch.nn import functional


class Cnn(nn.Module):
    def __init__(self, dropout: bool) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.dense1, self.dense2 = nn.Linear(64 * 12 * 12, 128), nn.Linear(128, 10)
        self.rates = DROPOUT if dropout else (0.0, 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(self.conv2(self.conv1(x).relu()).relu(), 2)
        x = functional.dropout(x, self.rates[0], self.training).flatten(1)
        return self.dense2(functional.dropout(self.dense1(x).relu(), self.rates[1], self.training))


class Resnet18(nn.Module):
    def __init__(self, dropout: bool) -> None:
        super().__init__()
        self.stem, self.stem_norm = self.convolution(3, STAGES[0]), nn.BatchNorm2d(STAGES[0])
        self.names, before = [], STAGES[0]
        for stage, width in enumerate(STAGES):
            for block in range(2):
                name, stride = f"block{stage}{block}", 1 + (before != width)
                self.names.append(name)
                self.add_module(f"{name}_conv1", self.convolution(before, width, stride=stride))
                self.add_module(f"{name}_norm1", nn.BatchNorm2d(width))
                self.add_module(f"{name}_conv2", self.convolution(width, width))
                self.add_module(f"{name}_norm2", nn.BatchNorm2d(width))
                if before != width:
                    self.add_module(f"{name}_short", self.convolution(before, width, 1, stride))
                    self.add_module(f"{name}_norm", nn.BatchNorm2d(width))
                before = width
        self.head = nn.Linear(before, 10)

    @staticmethod
    def convolution(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> nn.Conv2d:
        return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem_norm(self.stem(x)).relu()
        for name in self.names:
            part = dict(self.named_children())
            y = part[f"{name}_norm1"](part[f"{name}_conv1"](x)).relu()
            y = part[f"{name}_norm2"](part[f"{name}_conv2"](y))
            x = part[f"{name}_norm"](part[f"{name}_short"](x)) if f"{name}_short" in part else x
            x = (x + y).relu()
        return self.head(x.mean((2, 3)))


class Lstm(nn.Module):
    def __init__(self, dropout: bool) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, HIDDEN, batch_first=True)
        self.lstm.bias_hh_l0.requires_grad_(False)  # a second bias, which the other frameworks lack
        self.head = nn.Linear(HIDDEN, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.words(x))[0][:, -1])


class Transformer(nn.Module):
    def __init__(self, dropout: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        for number in range(BLOCKS):
            self.add_module(f"norm{number}a", nn.LayerNorm(WIDTH))
            for part in ("query", "key", "value", "output"):
                self.add_module(f"{part}{number}", nn.Linear(WIDTH, WIDTH))
            self.add_module(f"norm{number}b", nn.LayerNorm(WIDTH))
            self.add_module(f"wide{number}", nn.Linear(WIDTH, 2 * WIDTH))
            self.add_module(f"narrow{number}", nn.Linear(2 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = dict(self.named_children())
        x = self.words(x) + self.places.weight
        for number in range(BLOCKS):
            y = part[f"norm{number}a"](x)
            heads = (part[f"{name}{number}"](y) for name in ("query", "key", "value"))
            heads = (h.unflatten(-1, (HEADS, -1)).transpose(1, 2) for h in heads)
            y = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
            x = x + part[f"output{number}"](y)
            x = x + part[f"narrow{number}"](part[f"wide{number}"](part[f"norm{number}b"](x)).relu())
        return self.head(x.mean(1))


MODELS = {"cnn": Cnn, "resnet18": Resnet18, "lstm": Lstm, "transformer": Transformer}


def built(job: str, dropout: bool, arrays: Arrays) -> nn.Module:
    """The model with these weights; a parameter that they do not name (LSTM's second bias) is zero."""
    model = MODELS[job](dropout)
    with torch.no_grad():
        parameters = dict(model.named_parameters())
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(arrays[name])) if name in arrays else parameter.zero_()
    assert set(arrays) <= set(parameters)
    return model


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def optimizer_of(job: str, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), LEARNING_RATE[job], MOMENTUM)


class Contender:
    """Trains a job; `setting` is ``strict`` (fp32), ``fast``, or ``tuned`` with the path of a plan."""

    def __init__(self, job: str, setting: str, dropout: bool, arrays: Arrays, plan: str | None) -> None:
        torch.manual_seed(0)
        self.setting = setting
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if plan is not None:
            self.session = opened(job, dropout, arrays, plan)
            self.model: Any = self.session.model
            return
        self.model = built(job, dropout, arrays).to(self.device)
        if setting == "fast":
            self.model = torch.compile(self.model.to(memory_format=torch.channels_last))
        self.optimizer = optimizer_of(job, self.model)

    def batch(self, inputs: numpy.ndarray, classes: numpy.ndarray) -> Any:
        """A batch where and as the framework wants it."""
        x = torch.from_numpy(inputs).to(self.device)
        x = x.to(memory_format=torch.channels_last) if self.setting == "fast" and x.dim() == 4 else x
        return x, torch.from_numpy(classes).long().to(self.device)

    def step(self, batch: Any) -> Any:
        """One step; the loss, without waiting for it."""
        if self.setting == "tuned":
            return self.session.step(batch)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.setting == "fast"):
            loss = loss_of(self.model, batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def predict(self, batch: Any) -> numpy.ndarray:
        """The classes that the model says, in evaluation mode."""
        self.model.eval()
        fast = self.setting == "fast"
        with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16, enabled=fast):
            found = self.model(batch[0]).argmax(-1).cpu().numpy()
        self.model.train()
        return found


def opened(job: str, dropout: bool, arrays: Arrays, plan: str) -> Any:
    """A session of Vivace under a plan."""
    from vivace import Plan, attach

    model = built(job, dropout, arrays)
    return attach(Plan.load(plan), model=model, optimizer=optimizer_of(job, model), loss=loss_of)


def job_of(name: str, task: Task) -> Any:
    """The same training as a Job, for `vivace.tune`."""
    import vivace

    arrays = weights(task)
    made = [(torch.from_numpy(x), torch.from_numpy(y).long()) for x, y in batches(task)]
    return vivace.Job(
        model=lambda: built(name, True, arrays),
        data=lambda: made * 6,
        loss=loss_of,
        optimizer=lambda model: optimizer_of(name, model),
    )
