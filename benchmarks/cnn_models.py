"""Convolutional networks under `fused_batchnorm` on a CPU: what is matched, and is it the same model?

    python benchmarks/cnn_models.py [MODEL ...]

Each model trains 50 steps on small images through the reference path of the kernels, which a GPU would run,
and the ruler of `vivace verify` judges the course. What cannot be matched is refused, with its reason. Writes
a record, model by model; exit code 1 where a promise was broken. Nothing here is a speed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import _record
import jobs
import torch
from torch import Tensor, nn
from torchvision import models

import vivace
from vivace.engine.opening import start
from vivace.errors import Refused
from vivace.plan import Plan
from vivace.testing.fake_cuda import fake_cuda
from vivace.verify.effort import Effort
from vivace.verify.ruler import Ruler

STEPS = 50
EFFORT = Effort(seeds=5, snapshots=2, lockstep=2, course=STEPS, course_seeds=2, rehearsal=8)
BATCH, SIZE, NUM_CLASSES = 8, 32, 10
PLAN = {"fused_batchnorm": {}}


def small_vgg(build: Callable[..., nn.Module]) -> nn.Module:
    """VGG-16 with a classifier for small images: its three wide linear layers are no part of the question."""
    model: Any = build(num_classes=NUM_CLASSES)
    model.avgpool, model.classifier = nn.AdaptiveAvgPool2d(1), nn.Linear(512, NUM_CLASSES)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet50": lambda: models.resnet50(num_classes=NUM_CLASSES),
    "resnext101_32x8d": lambda: models.resnext101_32x8d(num_classes=NUM_CLASSES),
    "mobilenet_v3_large": lambda: models.mobilenet_v3_large(num_classes=NUM_CLASSES),
    "efficientnet_b0": lambda: models.efficientnet_b0(num_classes=NUM_CLASSES),
    "convnext_tiny": lambda: models.convnext_tiny(num_classes=NUM_CLASSES),
    "unet": jobs.UNet,
    "vgg16": lambda: small_vgg(models.vgg16),
    "vgg16_bn": lambda: small_vgg(models.vgg16_bn),
    "densenet121": lambda: models.densenet121(num_classes=NUM_CLASSES),
}


def batches(segmented: bool) -> list[tuple[Tensor, Tensor]]:
    """As many batches of coloured noise as there are steps, with labels that can be learned from it."""
    numbers = torch.Generator().manual_seed(0)
    found = []
    for _ in range(STEPS + 1):
        labels = torch.randint(NUM_CLASSES, (BATCH,), generator=numbers)
        pixels = torch.randn(BATCH, 3, SIZE, SIZE, generator=numbers)
        pixels += labels[:, None, None, None] / NUM_CLASSES
        found.append((pixels, (pixels[:, :1] > 0.5).float() if segmented else labels))
    return found


def job_of(name: str) -> vivace.Job:
    """One model's job."""
    return vivace.Job(
        model=MODELS[name],
        data=lambda: batches(name == "unet"),
        loss=jobs.segmentation_loss if name == "unet" else jobs.classification_loss,
        optimizer=jobs.sgd(0.001),
    )


def main() -> int:
    """Judge the named models, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    chosen = _record.named_jobs(parser, parser.parse_args().models, MODELS)
    record = _record.opened("cnn_models", "python benchmarks/cnn_models.py", vivace.inspect())
    if _record.path_of(record).exists():  # the other models' results of today
        record["models"] = json.loads(_record.path_of(record).read_text(encoding="utf-8"))["models"]
    record.setdefault("models", {})
    for name in chosen:
        record["models"][name] = found = judged(name)
        print(f"{name}: {found}", flush=True)
        _record.write(record)
    return 1 if any(r["status"] == "broken" for r in record["models"].values()) else 0


def judged(name: str) -> dict[str, Any]:
    """The ruler's verdict on one model, or why it is refused."""
    begin, machine = time.monotonic(), vivace.inspect()
    with fake_cuda(), mock.patch.object(Effort, "within", return_value=EFFORT):
        try:
            with start(job_of(name), Plan.from_dict(PLAN), machine) as session:
                session.step(batches(name == "unet")[0])
                chains, norms = session.build.notes["fused_chains"], session.build.notes["batch_norms"]
                kinds = Counter(str(chain) for chain in chains.values())
        except Refused as refused:
            return {"status": "refused", "reason": str(refused)}
        ruler = Ruler(job_of(name), machine.to_dict())
        ruler.prepare()
        verdict = ruler.judge(PLAN)
    kept = ("promise", "kept", "loss_envelopes", "displacement_envelopes", "reason", "seeds")
    curves = verdict["curves"]
    gaps = [abs(a - b) / abs(a) for a, b in zip(curves["reference"], curves["plan"], strict=True)]
    return {
        "status": "kept" if verdict["kept"] else "broken",
        **{key: verdict[key] for key in kept},
        "batch_norms": norms,
        "fused": dict(kinds),
        "steps": len(curves["plan"]),
        "losses": {side: [curves[side][0], curves[side][-1]] for side in ("reference", "plan")},
        "largest_difference_of_loss": max(gaps),
        "seconds": round(time.monotonic() - begin, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
