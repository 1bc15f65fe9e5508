"""The jobs in plain JAX: flax's nnx and optax, each step compiled."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax
import numpy
import optax
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
)
from flax import nnx
from jax import numpy as jnp

EPSILON = 1e-5  # of norms, as in PyTorch


class Cnn(nnx.Module):
    def __init__(self, dropout: bool, **kind: Any) -> None:
        self.conv1 = nnx.Conv(1, 32, (3, 3), padding="VALID", **kind)
        self.conv2 = nnx.Conv(32, 64, (3, 3), padding="VALID", **kind)
        self.dense1, self.dense2 = nnx.Linear(64 * 12 * 12, 128, **kind), nnx.Linear(128, 10, **kind)
        rates = DROPOUT if dropout else (0.0, 0.0)
        self.drop1, self.drop2 = (nnx.Dropout(rate, rngs=kind["rngs"]) for rate in rates)

    def __call__(self, x: Any) -> Any:
        x = nnx.max_pool(nnx.relu(self.conv2(nnx.relu(self.conv1(x)))), (2, 2), (2, 2))
        x = self.drop1(x).reshape(len(x), -1)
        return self.dense2(self.drop2(nnx.relu(self.dense1(x))))


class Block(nnx.Module):
    def __init__(self, inputs: int, outputs: int, **kind: Any) -> None:
        stride = 1 + (inputs != outputs)
        self.conv1, self.norm1 = convolution(inputs, outputs, 3, stride, **kind), norm(outputs, **kind)
        self.conv2, self.norm2 = convolution(outputs, outputs, 3, 1, **kind), norm(outputs, **kind)
        self.short = convolution(inputs, outputs, 1, stride, **kind) if stride > 1 else None
        self.norm = norm(outputs, **kind) if stride > 1 else None

    def __call__(self, x: Any) -> Any:
        y = self.norm2(self.conv2(nnx.relu(self.norm1(self.conv1(x)))))
        x = self.norm(self.short(x)) if self.short is not None else x
        return nnx.relu(x + y)


def convolution(inputs: int, outputs: int, size: int, stride: int, **kind: Any) -> nnx.Conv:
    pad = ((size // 2, size // 2),) * 2
    return nnx.Conv(inputs, outputs, (size, size), stride, padding=pad, use_bias=False, **kind)


def norm(width: int, **kind: Any) -> nnx.BatchNorm:
    return nnx.BatchNorm(width, momentum=0.9, epsilon=EPSILON, **kind)


class Resnet18(nnx.Module):
    def __init__(self, dropout: bool, **kind: Any) -> None:
        self.stem, self.stem_norm = convolution(3, STAGES[0], 3, 1, **kind), norm(STAGES[0], **kind)
        widths = [STAGES[0], *(width for width in STAGES for _ in range(2))]
        pairs = list(pairwise(widths))
        self.names = [f"block{stage}{block}" for stage in range(len(STAGES)) for block in range(2)]
        for name, (inputs, outputs) in zip(self.names, pairs, strict=True):
            setattr(self, name, Block(inputs, outputs, **kind))
        self.head = nnx.Linear(widths[-1], 10, **kind)

    def __call__(self, x: Any) -> Any:
        x = nnx.relu(self.stem_norm(self.stem(x)))
        for name in self.names:
            x = getattr(self, name)(x)
        return self.head(x.mean((1, 2)))


class Lstm(nnx.Module):
    def __init__(self, dropout: bool, **kind: Any) -> None:
        self.words = nnx.Embed(WORDS, WIDTH, **kind)
        self.lstm = nnx.RNN(nnx.OptimizedLSTMCell(WIDTH, HIDDEN, **kind))
        self.head = nnx.Linear(HIDDEN, 2, **kind)

    def __call__(self, x: Any) -> Any:
        return self.head(self.lstm(self.words(x))[:, -1])


class Transformer(nnx.Module):
    def __init__(self, dropout: bool, **kind: Any) -> None:
        self.words, self.places = nnx.Embed(WORDS, WIDTH, **kind), nnx.Embed(LENGTH, WIDTH, **kind)
        for number in range(BLOCKS):
            setattr(self, f"norm{number}a", nnx.LayerNorm(WIDTH, epsilon=EPSILON, **kind))
            attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, **kind)
            setattr(self, f"attention{number}", attention)
            setattr(self, f"norm{number}b", nnx.LayerNorm(WIDTH, epsilon=EPSILON, **kind))
            setattr(self, f"wide{number}", nnx.Linear(WIDTH, 2 * WIDTH, **kind))
            setattr(self, f"narrow{number}", nnx.Linear(2 * WIDTH, WIDTH, **kind))
        self.head = nnx.Linear(WIDTH, 2, **kind)

    def __call__(self, x: Any) -> Any:
        x = self.words(x) + self.places(jnp.arange(LENGTH))
        for number in range(BLOCKS):
            part = {name: getattr(self, name.format(number)) for name in PARTS}
            x = x + part["attention{}"](part["norm{}a"](x))
            x = x + part["narrow{}"](nnx.relu(part["wide{}"](part["norm{}b"](x))))
        return self.head(x.mean(1))


PARTS = ("norm{}a", "attention{}", "norm{}b", "wide{}", "narrow{}")
MODELS = {"cnn": Cnn, "resnet18": Resnet18, "lstm": Lstm, "transformer": Transformer}


def converted(path: tuple[str, ...], arrays: Arrays) -> numpy.ndarray:
    """The weight at a place of the model, in flax's layout."""
    *where, kind = path
    name = "_".join(where)
    if "attention" in where[0]:
        number, heads = where[0].removeprefix("attention"), (HEADS, WIDTH // HEADS)
        part = {"out": "output"}.get(where[1], where[1])
        value = arrays[f"{part}{number}.{'bias' if kind == 'bias' else 'weight'}"]
        if kind == "bias":
            return value if part == "output" else value.reshape(heads)
        return value.T.reshape((*heads, WIDTH) if part == "output" else (WIDTH, *heads))
    if where[0] == "lstm":
        if kind == "bias":
            return arrays["lstm.bias_ih_l0"]
        return arrays[f"lstm.weight_{'ih' if where[-1] == 'dense_i' else 'hh'}_l0"].T
    value = arrays[f"{name}.{'bias' if kind == 'bias' else 'weight'}"]
    if value.ndim == 4:
        return value.transpose(2, 3, 1, 0)
    if name == "dense1" and value.ndim == 2:
        return value.reshape(128, 64, 12, 12).transpose(2, 3, 1, 0).reshape(-1, 128)
    return value.T if value.ndim == 2 and kind == "kernel" else value


class Contender:
    """Trains a job; `setting` is ``strict`` (fp32) or ``fast`` (bfloat16 with fp32 weights)."""

    def __init__(self, job: str, setting: str, dropout: bool, arrays: Arrays, plan: str | None) -> None:
        fast = setting == "fast"
        jax.config.update("jax_default_matmul_precision", "default" if fast else "highest")
        kind = {"rngs": nnx.Rngs(0), "dtype": jnp.bfloat16 if fast else jnp.float32}
        self.model = MODELS[job](dropout, **kind)
        state = nnx.state(self.model, nnx.Param)
        values = nnx.to_flat_state(state)
        assert len(values) == len(arrays)
        for path, parameter in values:
            found = converted(tuple(map(str, path)), arrays)
            assert found.shape == parameter.shape, path
            parameter[...] = jnp.asarray(found)
        nnx.update(self.model, state)
        self.model.train()
        self.optimizer = nnx.Optimizer(self.model, optax.sgd(LEARNING_RATE[job], MOMENTUM), wrt=nnx.Param)

    def batch(self, inputs: numpy.ndarray, classes: numpy.ndarray) -> Any:
        """A batch where and as the framework wants it."""
        return jnp.asarray(inputs.transpose(0, 2, 3, 1) if inputs.ndim == 4 else inputs), jnp.asarray(classes)

    def step(self, batch: Any) -> Any:
        """One step; the loss, without waiting for it."""
        return train_step(self.model, self.optimizer, *batch)

    def predict(self, batch: Any) -> numpy.ndarray:
        """The classes that the model says, in evaluation mode."""
        self.model.eval()
        found = numpy.asarray(classes_of(self.model, batch[0]))
        self.model.train()
        return found


@nnx.jit
def train_step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    def loss_of(model: Any) -> Any:
        logits = model(x).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def classes_of(model: Any, x: Any) -> Any:
    return model(x).argmax(-1)
