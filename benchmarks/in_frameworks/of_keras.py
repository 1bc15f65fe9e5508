"""The jobs in Keras 3, on the backend that the environment names."""

from __future__ import annotations

from typing import Any

import keras
import numpy
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
from keras import layers

EPSILON = 1e-5  # of norms, as in PyTorch


def cnn(dropout: bool) -> keras.Model:
    rates = DROPOUT if dropout else (0.0, 0.0)
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu", name="conv1"),
            layers.Conv2D(64, 3, activation="relu", name="conv2"),
            layers.MaxPooling2D(),
            layers.Dropout(rates[0]),
            layers.Flatten(),
            layers.Dense(128, "relu", name="dense1"),
            layers.Dropout(rates[1]),
            layers.Dense(10, name="dense2"),
        ]
    )


def resnet18(dropout: bool) -> keras.Model:
    def convolution(x: Any, width: int, name: str, size: int = 3, stride: int = 1) -> Any:
        x = layers.ZeroPadding2D(size // 2)(x) if size > 1 else x  # "same" pads one side alone at stride 2
        return layers.Conv2D(width, size, stride, use_bias=False, name=name)(x)

    def norm(x: Any, name: str) -> Any:
        return layers.BatchNormalization(momentum=0.9, epsilon=EPSILON, name=name)(x)

    inputs = keras.Input((32, 32, 3))
    x = layers.ReLU()(norm(convolution(inputs, STAGES[0], "stem"), "stem_norm"))
    before = STAGES[0]
    for stage, width in enumerate(STAGES):
        for block in range(2):
            name, stride = f"block{stage}{block}", 1 + (before != width)
            y = layers.ReLU()(norm(convolution(x, width, f"{name}_conv1", 3, stride), f"{name}_norm1"))
            y = norm(convolution(y, width, f"{name}_conv2"), f"{name}_norm2")
            if before != width:
                x = norm(convolution(x, width, f"{name}_short", 1, stride), f"{name}_norm")
            x, before = layers.ReLU()(x + y), width
    return keras.Model(inputs, layers.Dense(10, name="head")(layers.GlobalAveragePooling2D()(x)))


def lstm(dropout: bool) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"),
            layers.Embedding(WORDS, WIDTH, name="words"),
            layers.LSTM(HIDDEN, name="lstm"),
            layers.Dense(2, name="head"),
        ]
    )


class Places(layers.Layer):
    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=shape[1:], name="table")

    def call(self, x: Any) -> Any:
        return x + self.table


def transformer(dropout: bool) -> keras.Model:
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = Places(name="places")(layers.Embedding(WORDS, WIDTH, name="words")(inputs))
    for number in range(BLOCKS):
        y = layers.LayerNormalization(epsilon=EPSILON, name=f"norm{number}a")(x)
        x = x + layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name=f"attention{number}")(y, y)
        y = layers.LayerNormalization(epsilon=EPSILON, name=f"norm{number}b")(x)
        y = layers.Dense(2 * WIDTH, "relu", name=f"wide{number}")(y)
        x = x + layers.Dense(WIDTH, name=f"narrow{number}")(y)
    return keras.Model(inputs, layers.Dense(2, name="head")(layers.GlobalAveragePooling1D()(x)))


MODELS = {"cnn": cnn, "resnet18": resnet18, "lstm": lstm, "transformer": transformer}


def converted(layer: Any, arrays: Arrays) -> list[numpy.ndarray] | None:
    """A layer's trained weights in Keras' layout; None where it has none."""
    name = layer.name
    if isinstance(layer, layers.MultiHeadAttention):
        number, heads = name.removeprefix("attention"), (HEADS, WIDTH // HEADS)
        found = []
        for part in ("query", "key", "value"):
            found.append(arrays[f"{part}{number}.weight"].T.reshape(WIDTH, *heads))
            found.append(arrays[f"{part}{number}.bias"].reshape(heads))
        output = arrays[f"output{number}.weight"].T.reshape(*heads, WIDTH)
        return [*found, output, arrays[f"output{number}.bias"]]
    if isinstance(layer, layers.LSTM):
        return [arrays["lstm.weight_ih_l0"].T, arrays["lstm.weight_hh_l0"].T, arrays["lstm.bias_ih_l0"]]
    if f"{name}.weight" not in arrays:
        return None
    kernel, bias = arrays[f"{name}.weight"], arrays.get(f"{name}.bias")
    if kernel.ndim == 4:
        kernel = kernel.transpose(2, 3, 1, 0)
    elif isinstance(layer, layers.Dense):
        kernel = channels_last(kernel) if name == "dense1" else kernel.T
    return [kernel] if bias is None else [kernel, bias]


def channels_last(kernel: numpy.ndarray) -> numpy.ndarray:
    """A dense layer's weights after flattened 12x12 pixels, of channels first, for channels last."""
    return kernel.reshape(128, 64, 12, 12).transpose(2, 3, 1, 0).reshape(-1, 128)


class Contender:
    """Trains a job; `setting` is ``strict`` (fp32, as the backend runs it by itself) or ``fast``."""

    def __init__(self, job: str, setting: str, dropout: bool, arrays: Arrays, plan: str | None) -> None:
        keras.utils.set_random_seed(0)
        keras.config.set_dtype_policy("mixed_bfloat16" if setting == "fast" else "float32")
        if keras.backend.backend() == "jax":
            import jax

            jax.config.update("jax_default_matmul_precision", "default" if setting == "fast" else "highest")
        self.model = MODELS[job](dropout)
        held = {layer.name: converted(layer, arrays) for layer in self.model.layers}
        for layer in self.model.layers:
            if held[layer.name] is not None:
                for variable, value in zip(layer.trainable_variables, held[layer.name], strict=True):
                    variable.assign(value)
        assert sum(len(values or ()) for values in held.values()) == len(self.model.trainable_variables)
        self.model.compile(
            optimizer=keras.optimizers.SGD(LEARNING_RATE[job], MOMENTUM),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=True if setting == "fast" else "auto",
        )

    def batch(self, inputs: numpy.ndarray, classes: numpy.ndarray) -> Any:
        """A batch where and as the framework wants it."""
        inputs = inputs.transpose(0, 2, 3, 1).copy() if inputs.ndim == 4 else inputs
        return keras.ops.convert_to_tensor(inputs), keras.ops.convert_to_tensor(classes)

    def step(self, batch: Any) -> Any:
        """One step; the loss."""
        return self.model.train_on_batch(*batch)

    def predict(self, batch: Any) -> numpy.ndarray:
        """The classes that the model says, in evaluation mode."""
        return numpy.asarray(self.model.predict_on_batch(batch[0])).argmax(-1)
