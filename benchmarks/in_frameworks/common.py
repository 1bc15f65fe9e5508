"""What every framework trains on: sizes, initial weights and batches, as arrays. Needs numpy alone.

Weights have torch's names and layouts; each framework converts them. One optimizer, SGD with momentum, since
all define it alike: Keras' Adam and PyTorch's differ in where epsilon stands.
"""

from __future__ import annotations

import dataclasses

import numpy

MOMENTUM = 0.9
LEARNING_RATE = {"cnn": 0.01, "resnet18": 0.01, "lstm": 0.05, "transformer": 0.0002}
DROPOUT = (0.25, 0.5)
STAGES = (64, 128, 256, 512)
WORDS, LENGTH, WIDTH, HIDDEN, HEADS, BLOCKS = 2000, 64, 128, 128, 4, 2
NUM_BATCHES, HELD_OUT = 32, 4
TEXTURE, OWN_WORDS, OWN_SHARE = 0.5, 16, 0.4
ACCURACY = 0.95  # of the batches held out, up to which a contender is timed
Arrays = dict[str, numpy.ndarray]
Batch = tuple[numpy.ndarray, numpy.ndarray]


@dataclasses.dataclass(frozen=True)
class Task:
    """What a job is trained on: samples of a shape (channels first; of words: their number), and classes."""

    batch: int
    shape: tuple[int, ...]
    classes: int
    weights: dict[str, tuple[int, ...]]

    @property
    def of_words(self) -> bool:
        """Is a sample a row of word numbers?"""
        return len(self.shape) == 1


def cnn() -> dict[str, tuple[int, ...]]:
    """Keras' example for MNIST."""
    return {
        **convolution("conv1", 1, 32, bias=True),
        **convolution("conv2", 32, 64, bias=True),
        **dense("dense1", 64 * 12 * 12, 128),
        **dense("dense2", 128, 10),
    }


def resnet18() -> dict[str, tuple[int, ...]]:
    """ResNet-18 for pictures of 32x32: a 3x3 stem and no pooling before the stages."""
    found = {**convolution("stem", 3, STAGES[0]), **norm("stem_norm", STAGES[0])}
    before = STAGES[0]
    for stage, width in enumerate(STAGES):
        for block in range(2):
            name = f"block{stage}{block}"
            found |= {**convolution(f"{name}_conv1", before, width), **norm(f"{name}_norm1", width)}
            found |= {**convolution(f"{name}_conv2", width, width), **norm(f"{name}_norm2", width)}
            if before != width:
                found |= {
                    **convolution(f"{name}_short", before, width, size=1),
                    **norm(f"{name}_norm", width),
                }
            before = width
    return {**found, **dense("head", before, 10)}


def lstm() -> dict[str, tuple[int, ...]]:
    """Words, an LSTM, its last state, two classes."""
    return {
        "words.weight": (WORDS, WIDTH),
        "lstm.weight_ih_l0": (4 * HIDDEN, WIDTH),
        "lstm.weight_hh_l0": (4 * HIDDEN, HIDDEN),
        "lstm.bias_ih_l0": (4 * HIDDEN,),
        **dense("head", HIDDEN, 2),
    }


def transformer() -> dict[str, tuple[int, ...]]:
    """Words and places, two blocks with the norm first, their mean, two classes."""
    found = {"words.weight": (WORDS, WIDTH), "places.weight": (LENGTH, WIDTH)}
    for number in range(BLOCKS):
        found |= norm(f"norm{number}a", WIDTH)
        for part in ("query", "key", "value", "output"):
            found |= dense(f"{part}{number}", WIDTH, WIDTH)
        found |= norm(f"norm{number}b", WIDTH)
        found |= {**dense(f"wide{number}", WIDTH, 2 * WIDTH), **dense(f"narrow{number}", 2 * WIDTH, WIDTH)}
    return {**found, **dense("head", WIDTH, 2)}


def dense(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def convolution(
    name: str, inputs: int, outputs: int, size: int = 3, bias: bool = False
) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {f"{name}.weight": (outputs, inputs, size, size)}
    return found | ({f"{name}.bias": (outputs,)} if bias else {})


def norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def tasks(quick: bool) -> dict[str, Task]:
    """All of them; `quick` has small batches, for trying the benchmark itself."""
    part = 8 if quick else 1
    return {
        "cnn": Task(128 // part, (1, 28, 28), 10, cnn()),
        "resnet18": Task(32 // part, (3, 32, 32), 10, resnet18()),
        "lstm": Task(64 // part, (LENGTH,), 2, lstm()),
        "transformer": Task(64 // part, (LENGTH,), 2, transformer()),
    }


def weights(task: Task, noise_seed: int | None = None) -> Arrays:
    """Initial weights by name; with `noise_seed` each is off by about one rounding of fp32."""
    draw = numpy.random.default_rng(0)
    found: Arrays = {}
    for name, shape in task.weights.items():
        if len(shape) == 1:
            value = numpy.ones(shape) if name.endswith("weight") else numpy.zeros(shape)
        else:
            fan_in = WIDTH if name.startswith(("words", "places")) else int(numpy.prod(shape[1:]))
            value = draw.uniform(-1, 1, shape) * numpy.sqrt(3 / fan_in)
        found[name] = value.astype(numpy.float32)
    if noise_seed is not None:
        noise = numpy.random.default_rng(noise_seed + 1)
        for name, value in found.items():
            off = 1 + noise.normal(0, 2.0**-24, value.shape)
            found[name] = (value.astype(numpy.float64) * off).astype(numpy.float32)
    return found


def batches(task: Task, seed: int = 0, number: int = NUM_BATCHES) -> list[Batch]:
    """Made samples: pictures of a class's texture under noise; words, two fifths of them the class's own.

    Another `seed` gives other samples of the same classes.
    """
    textures = numpy.random.default_rng(0).normal(0, 1, (task.classes, task.shape[0], 4, 4))
    draw, found = numpy.random.default_rng(seed), []
    for _ in range(number):
        classes = draw.integers(0, task.classes, task.batch)
        if task.of_words:
            inputs = draw.integers(0, WORDS, (task.batch, *task.shape))
            own = draw.integers(0, OWN_WORDS, inputs.shape) + OWN_WORDS * classes[:, None]
            inputs = numpy.where(draw.random(inputs.shape) < OWN_SHARE, own, inputs).astype(numpy.int32)
        else:
            texture = numpy.tile(textures[classes], (1, 1, task.shape[1] // 4, task.shape[2] // 4))
            inputs = (draw.normal(0, 1, texture.shape) + TEXTURE * texture).astype(numpy.float32)
        found.append((inputs, classes.astype(numpy.int32)))
    return found


def held_out(task: Task) -> list[Batch]:
    """Batches that no contender trains on."""
    return batches(task, seed=1, number=HELD_OUT)
