"""What `fold_eval` brings on a CPU: evaluation of networks as they are against folded, on one core.

    scripts/bench fold_eval [MODEL ...]

Batches of 16 images of 224 px in fp32 and channels-last order. Blocks alternate; the ratio is the median with
its 95 % interval, in one process. Writes a record; exit code 1 where outputs differ by more than rounding.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import _record
import torch
from torch import Tensor, nn
from torchvision import models

import vivace
from vivace.measuring.statistics import speed_ratio
from vivace.techniques.fold_eval.folding import install

MODELS: dict[str, Callable[[], nn.Module]] = {
    name: getattr(models, name) for name in ("resnet50", "mobilenet_v3_large", "densenet121")
}
BATCH, PIXELS, PAIRS = 16, 224, 8
ROUNDING = 1e-4  # of the outputs' norm


def main() -> int:
    """Time the named models, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    chosen = _record.named_jobs(parser, parser.parse_args().models, MODELS)
    torch.set_num_threads(1)
    record = _record.opened("fold_eval", "scripts/bench fold_eval", vivace.inspect())
    record["conditions"] = {"batch": BATCH, "pixels": PIXELS, "threads": 1, "dtype": "float32"}
    record["models"] = {}
    for name in chosen:
        record["models"][name] = found = timed(name)
        print(f"{name}: {found}", flush=True)
    if set(chosen) == set(MODELS):  # else the whole record would give way to a part
        _record.write(record)
    return 1 if any(r["difference"] > ROUNDING for r in record["models"].values()) else 0


@torch.no_grad()
def timed(name: str) -> dict[str, Any]:
    """The ratio of one network, how many BatchNorms were folded, and how far the outputs are apart."""
    torch.manual_seed(0)
    model = MODELS[name]().to(memory_format=torch.channels_last)
    images = torch.randn(BATCH, 3, PIXELS, PIXELS).to(memory_format=torch.channels_last)
    model.train()(images)  # running statistics of its own
    model.eval()
    folded: set[str] = set()
    pairs, outputs = [], list[Tensor]()
    for _ in range(PAIRS + 1):
        plain, seconds = passed(model, images)
        undo, _ = install(model, folded)
        model(images[:1])  # traces
        mine, seconds_folded = passed(model, images)
        undo()
        pairs.append((seconds, seconds_folded))
        outputs = [plain, mine]
    ratio = speed_ratio(pairs[1:])
    return {
        "ratio": {"estimate": ratio.estimate, "low": ratio.low, "high": ratio.high},
        "folded": len(folded),
        "batch_norms": sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()),
        "difference": float((outputs[1] - outputs[0]).norm() / outputs[0].norm()),
    }


def passed(model: nn.Module, images: Tensor) -> tuple[Tensor, float]:
    """Outputs, and seconds that they took."""
    begin = time.perf_counter()
    outputs = model(images)
    return outputs, time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
