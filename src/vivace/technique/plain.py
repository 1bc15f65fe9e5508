"""What a person writes in place of a technique: in plain PyTorch, and in the words of a trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

Keywords = Mapping[str, object]


@dataclasses.dataclass(frozen=True)
class Plain:
    """The same without Vivace; each part is left empty where there is nothing to write.

    Args:
        environment: variables that must be set before Python starts.
        start: statements before the model is built; `torch` is imported.
        model: statements on `model`, once it is built and on its device.
        optimizer: keywords of the person's own optimizer.
        loader: keywords of the person's own DataLoader.
        autocast: dtype of `torch.autocast` around the model and the loss, such as ``bfloat16``.
        scaler: keywords of the `GradScaler` that float16 needs, which a trainer builds without them.
        transformers: keywords of `TrainingArguments` that do all of it; None: it has none.
        lightning: keywords of Lightning's `Trainer`; None: it has none.
        accelerate: keywords of `Accelerator`; None: it has none.
        note: a sentence on what is not quite the same.
    """

    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    start: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    optimizer: Keywords = dataclasses.field(default_factory=dict)
    loader: Keywords = dataclasses.field(default_factory=dict)
    autocast: str = ""
    scaler: Keywords = dataclasses.field(default_factory=dict)
    transformers: Keywords | None = None
    lightning: Keywords | None = None
    accelerate: Keywords | None = None
    note: str = ""
