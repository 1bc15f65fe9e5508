"""Networks of a size that GPUs train, and the memory of their steps: predicted, and as torch takes it.

Run as a program on the stand-in of tests/cuda_stand_in, with a JSON list of [network, plan] and this folder:
prints a row for each. No kernel runs, so that a network of a few GB is measured in a second. Convolutions
allocate what they return: cuDNN is not stood in for, and what it takes for itself is unknown.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import vivace
from vivace.errors import Refused
from vivace.memory.predict import predict
from vivace.session.opening import start
from vivace.tensors.trees import map_tensors

Row = dict[str, Any]

# -----------------------------------------------------------------------------------------------------------
# Networks: all numbers of their batches are zeros


def perceptron(num_inputs: int, width: int, depth: int) -> nn.Sequential:
    """Return a stack of linear layers with GELUs between them."""
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
    return nn.Sequential(nn.Linear(num_inputs, width), *layers, nn.Linear(width, 10))


class Block(nn.Module):
    """A block of a language model: causal attention and two linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequence, attended to."""
        batch, length, width = x.shape
        parts = self.attend(self.before(x)).chunk(3, -1)
        heads = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.layers(self.between(x))


class LanguageModel(nn.Module):
    """A model of the next token."""

    def __init__(
        self, tokens: int, width: int, heads: int, depth: int, length: int, block: type[nn.Module] = Block
    ) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(tokens, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of each next token."""
        return self.head(self.norm(self.blocks(self.embed(tokens) + self.place)))


class Written(nn.Module):
    """A block that is written out: RMSNorm, attention by a softmax, and a gate."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attend, self.out = nn.Linear(width, 3 * width, False), nn.Linear(width, width, False)
        self.gate, self.up = (nn.Linear(width, 3 * width, False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequence, attended to."""
        batch, length, width = x.shape
        parts = self.attend(self.before(x)).chunk(3, -1)
        query, key, value = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        scores = (query @ key.transpose(-1, -2) / (width / self.heads) ** 0.5).softmax(-1)
        x = x + self.out((scores @ value).transpose(1, 2).reshape(batch, length, width))
        given = self.between(x)
        return x + self.down(functional.silu(self.gate(given)) * self.up(given))


class Encoder(nn.Module):
    """torch's own encoder over tokens, and two classes."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
        self.embed, self.head = nn.Embedding(30000, 512), nn.Linear(512, 2)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of both classes."""
        return self.head(self.layers(self.embed(tokens))[:, 0])


class Table(nn.Module):
    """Embeddings of eight categories and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.embeds = nn.ModuleList(nn.Embedding(100_000, 64) for _ in range(8))
        self.layers = perceptron(512, 1024, 2)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the scores of each class."""
        return self.layers(torch.cat([embed(rows[:, at]) for at, embed in enumerate(self.embeds)], 1))


def by_class(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the cross entropy; of sequences that of every token."""
    scores = model(batch[0])
    return functional.cross_entropy(scores.flatten(0, -2), batch[1].flatten())


def by_pixel(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the cross entropy of a mask."""
    return functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW over all weights."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum over all weights."""
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def _job(model: Callable[[], nn.Module], inputs: tuple[int, ...], **more: Any) -> vivace.Job:
    """A job of two batches; `inputs` is the shape of one, `whole` its type, `targets` another shape."""
    dtype = torch.int64 if more.pop("whole", False) else torch.float32
    targets = more.pop("targets", inputs[:1])
    loss = more.get("loss", by_class)

    def data() -> list[list[Tensor]]:
        wanted = torch.zeros(targets, dtype=torch.int64 if loss is by_class else torch.float32)
        return [[torch.zeros(inputs, dtype=dtype), wanted] for _ in range(3)]

    return vivace.Job(model=model, data=data, **{"loss": loss, "optimizer": adamw, **more})


def _pictures(name: str, num: int, **more: Any) -> Callable[[], vivace.Job]:
    """A network of torchvision's on so many pictures."""

    def job() -> vivace.Job:
        import torchvision

        return _job(getattr(torchvision.models, name), (num, 3, 224, 224), **more)

    return job


def _unet() -> vivace.Job:
    import jobs

    shape = (8, 3, 256, 256)
    return _job(jobs.UNet, shape, targets=(8, 1, 256, 256), loss=by_pixel)


NETWORKS: dict[str, Callable[[], vivace.Job]] = {
    "small_mlp": lambda: _job(lambda: perceptron(256, 256, 4), (8192, 256)),
    "mlp": lambda: _job(lambda: perceptron(1024, 4096, 6), (4096, 1024)),
    "table": lambda: _job(Table, (8192, 8), whole=True),
    "small_gpt": lambda: _job(
        lambda: LanguageModel(128, 256, 4, 6, 256), (64, 256), whole=True, targets=(64, 256)
    ),
    "gpt": lambda: _job(
        lambda: LanguageModel(32000, 768, 12, 12, 1024), (4, 1024), whole=True, targets=(4, 1024)
    ),
    "written_gpt": lambda: _job(
        lambda: LanguageModel(8000, 512, 8, 6, 512, Written), (8, 512), whole=True, targets=(8, 512)
    ),
    "encoder": lambda: _job(Encoder, (64, 128), whole=True),
    "vit_b_16": _pictures("vit_b_16", 32),
    "resnet18": _pictures("resnet18", 64, optimizer=sgd),
    "resnet50": _pictures("resnet50", 64, optimizer=sgd),
    "mobilenet_v3_small": _pictures("mobilenet_v3_small", 64, optimizer=sgd),
    "densenet121": _pictures("densenet121", 32, optimizer=sgd),
    "convnext_tiny": _pictures("convnext_tiny", 32),
    "unet": _unet,
}
PLANS: dict[str, dict[str, dict[str, Any]]] = {
    "reference": {},
    "bf16": {"bf16_autocast": {}},
    "fp16": {"fp16_autocast": {}},
    "recomputed": {"checkpoint": {}},
    "pieces": {"micro_batches": {"num": 4}},
    "channels_last": {"channels_last": {}, "bf16_autocast": {}},
    "fused": {"fused_optimizer": {}},
    "in_backward": {"optimizer_in_backward": {}},
    "bf16_weights": {"bf16_weights": {}},
    "ahead": {"pinned_prefetch": {}, "tf32": {}},
}

# -----------------------------------------------------------------------------------------------------------
# Memory


def predicted(asked: list[list[str]]) -> list[Row]:
    """What Vivace predicts for an absent GPU, or its refusal."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    rows: list[Row] = []
    for network, plan in asked:
        try:
            found = predict(NETWORKS[network](), vivace.Plan.from_dict(PLANS[plan]), device="cuda")
            rows.append({"peak": found.peak_bytes, "reserved": found.reserved_bytes})
        except Refused as refused:
            rows.append({"refused": str(refused)})
    return rows


def taken(asked: list[list[str]]) -> list[Row]:
    """What torch's allocator hands out and reserves for the second step on, or the refusal."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    kernels = _convolutions()
    rows = list(map(_taken, asked))
    del kernels
    return rows


def _taken(asked: list[str]) -> Row:
    network, plan = asked
    job = NETWORKS[network]()
    try:
        with start(job, vivace.Plan.from_dict(PLANS[plan]), vivace.inspect()) as session:
            for number, batch in enumerate(session.batches(job.data())):
                if number == 1:
                    torch.cuda.reset_peak_memory_stats()
                session.step(batch)
            batch = None
            return {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    except Refused as refused:
        return {"refused": str(refused)}
    except Exception as error:  # of one pair, which shall not end the table
        return {"failed": f"{type(error).__name__}: {error}"}
    finally:
        session = None
        gc.collect()
        torch.cuda.empty_cache()


def _convolutions() -> torch.library.Library:
    """Both convolutions allocate what they return; they stay so as long as the library lives."""
    library = torch.library.Library("aten", "IMPL")
    for name in ("convolution", "convolution_backward"):
        operator = getattr(torch.ops.aten, name).default
        library.impl(name, lambda *given, own=operator: _made(own, given), "CUDA", allow_override=True)
    return library


def _made(operator: Any, given: tuple[Any, ...]) -> Any:
    def there(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="cuda")

    made = operator(*(one.to("meta") if isinstance(one, Tensor) else one for one in given))
    if any(map(_is_channels_last, given)):  # then cuDNN returns so, too
        order = {"memory_format": torch.channels_last}
        made = map_tensors(made, lambda one: one.contiguous(**order) if one.dim() == 4 else one)
    return there(made) if isinstance(made, Tensor) else tuple(map(there, made))


def _is_channels_last(one: Any) -> bool:
    return (
        isinstance(one, Tensor)
        and one.dim() == 4
        and one.is_contiguous(memory_format=torch.channels_last)
        and not one.is_contiguous()
    )


def compared(asked: list[list[str]]) -> Iterator[Row]:
    """A row for each pair; both sides in a forked process, as one has a GPU and the other none."""
    context = multiprocessing.get_context("fork")
    sides = []
    for side in (predicted, taken):
        with context.Pool(1) as pool:
            sides.append(pool.apply(side, (asked,)))
    for (network, plan), mine, real in zip(asked, *sides, strict=True):
        row = {"network": network, "plan": plan}
        if "failed" in real:
            yield {**row, **real}
            continue
        reason = mine.get("refused") or real.get("refused")
        if reason:
            yield {**row, "refused": reason}
            continue
        yield row | {
            f"{what}_{key}": value
            for key in ("peak", "reserved")
            for what, value in {
                "predicted": mine[key],
                "real": real[key],
                "error_percent": round(100 * (mine[key] / real[key] - 1), 2),
            }.items()
        }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.path.insert(0, sys.argv[2])  # this folder: the program may be given as text
    print(json.dumps(list(compared(json.loads(sys.argv[1])))))
