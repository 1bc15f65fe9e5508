"""Convolutional networks under `fused_batchnorm` on a CPU: what is matched, and is it the same model?

    scripts/bench cnn_models [MODEL ...] [--only ruler | float64]

Each model trains 50 steps on small images through the reference path of the kernels, which a GPU would run,
and the ruler of `vivace verify` judges the course. The same steps, with products, are followed in float64
too, where a difference would be a fault: residual branches begin at zero, since small batches of small images
blow up every rounding otherwise. What cannot be matched is refused, with its reason. Writes a record, model
by model; exit code 1 where a promise was broken. Nothing here is a speed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import _record
import jobs
import torch
from torch import Tensor, nn
from torchvision import models

import vivace
from vivace.errors import Refused
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.technique import registry
from vivace.techniques.fused_batchnorm.matching import install
from vivace.verifying.effort import Effort
from vivace.verifying.ruler import Ruler

STEPS = 50
EFFORT = Effort(
    seeds=5, snapshots=2, lockstep=2, course=STEPS, course_seeds=2, rehearsal=8, life_seeds=2, pairs=8
)
BATCH, SIZE, NUM_CLASSES, LEARNING_RATE = 8, 32, 10, 0.001
PIXELS = {"efficientnet_b0": 64}  # of whose last feature maps one pixel would be left
MOST_IN_FLOAT64 = 1e-6  # of a loss, and of what training has moved: roundings of 1e-16, blown up
PLAN = {"fused_batchnorm": {}}


def small_vgg(build: Callable[..., nn.Module]) -> nn.Module:
    """VGG-16 with a classifier for small images: its three wide linear layers are no part of the question."""
    model: Any = build(num_classes=NUM_CLASSES)
    model.avgpool, model.classifier = nn.AdaptiveAvgPool2d(1), nn.Linear(512, NUM_CLASSES)
    return model


def calm_efficientnet() -> nn.Module:
    """EfficientNet whose residual branches begin at zero, as those of ResNets do by `zero_init_residual`."""
    model = models.efficientnet_b0(num_classes=NUM_CLASSES)
    for module in model.modules():
        if getattr(module, "use_res_connect", False):
            nn.init.zeros_(module.block[-1][1].weight)
    return model


CALM: Any = {"num_classes": NUM_CLASSES, "zero_init_residual": True}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet50": lambda: models.resnet50(**CALM),
    "resnext101_32x8d": lambda: models.resnext101_32x8d(**CALM),
    "mobilenet_v3_large": lambda: models.mobilenet_v3_large(num_classes=NUM_CLASSES),
    "efficientnet_b0": calm_efficientnet,
    "convnext_tiny": lambda: models.convnext_tiny(num_classes=NUM_CLASSES),
    "unet": jobs.UNet,
    "vgg16": lambda: small_vgg(models.vgg16),
    "vgg16_bn": lambda: small_vgg(models.vgg16_bn),
    "densenet121": lambda: models.densenet121(num_classes=NUM_CLASSES),
}


def batches(name: str) -> list[tuple[Tensor, Tensor]]:
    """As many batches of coloured noise as there are steps, with labels that can be learned from it."""
    size, segmented = PIXELS.get(name, SIZE), name == "unet"
    numbers = torch.Generator().manual_seed(0)
    found = []
    for _ in range(STEPS + 1):
        labels = torch.randint(NUM_CLASSES, (BATCH,), generator=numbers)
        pixels = torch.randn(BATCH, 3, size, size, generator=numbers)
        pixels += labels[:, None, None, None] / NUM_CLASSES
        found.append((pixels, (pixels[:, :1] > 0.5).float() if segmented else labels))
    return found


def job_of(name: str) -> vivace.Job:
    """One model's job."""
    return vivace.Job(
        model=MODELS[name],
        data=lambda: batches(name),
        loss=jobs.segmentation_loss if name == "unet" else jobs.classification_loss,
        optimizer=jobs.sgd(LEARNING_RATE),
    )


def main() -> int:
    """Judge the named models, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--only", choices=PARTS, help="one of the two ways to judge")
    arguments = parser.parse_args()
    chosen = _record.named_jobs(parser, arguments.models, MODELS)
    record = _record.opened("cnn_models", "scripts/bench cnn_models", vivace.inspect())
    before = _record.newest_like(record, ("machine", "versions", "vivace"))
    if before is not None and (arguments.models or arguments.only or before["date"] == record["date"]):
        record |= {key: before[key] for key in ("models", "date")}  # the others' results stay, and their date
    record.setdefault("models", {})
    record["conditions"] = {
        "batch": BATCH,
        "pixels": SIZE,
        "learning_rate": LEARNING_RATE,
        "pixels_of": PIXELS,
    }
    for name in chosen:
        found = judged(name, [arguments.only] if arguments.only else list(PARTS))
        before = record["models"].get(name, {})
        if "broken" in (before.get("status"), found["status"]) and arguments.only:
            found["status"] = "broken"
        record["models"][name] = {**(before if arguments.only else {}), **found, "date": _record.today()}
        print(f"{name}: {found}", flush=True)
        _record.write(record)
    return 1 if any(r["status"] == "broken" for r in record["models"].values()) else 0


def judged(name: str, parts: list[str]) -> dict[str, Any]:
    """The verdict of the ruler and that of float64 on one model, or why it is refused."""
    begin, machine = time.monotonic(), vivace.inspect()
    fused = registry.find("fused_batchnorm")
    on_cpus = dataclasses.replace(fused.card, devices=("cpu", "cuda"))
    effort = mock.patch.object(Effort, "within", return_value=EFFORT)
    with mock.patch.object(fused, "card", on_cpus), effort:
        try:
            with start(job_of(name), Plan.from_dict(PLAN), machine) as session:
                session.step(batches(name)[0])
                chains, norms = session.build.notes["fused_chains"], session.build.notes["batch_norms"]
                kinds = Counter(str(chain) for chain in chains.values())
        except Refused as refused:
            return {"status": "refused", "reason": str(refused)}
        found: dict[str, Any] = {"batch_norms": norms, "fused": dict(kinds), "steps": STEPS}
        found["unmatched"] = norms - len(chains) - sum(bool(chain.other) for chain in chains.values())
        kept = True
        for part in parts:
            more = PARTS[part](name)
            kept = kept and more.pop("kept")
            found |= {**more, f"{part}_seconds": round(time.monotonic() - begin, 1)}
            begin = time.monotonic()
    return {"status": "kept" if kept else "broken", **found}


def by_ruler(name: str) -> dict[str, Any]:
    """In fp32, beside runs whose roundings are disturbed."""
    ruler = Ruler(job_of(name), vivace.inspect().to_dict())
    ruler.prepare()
    verdict = ruler.judge(PLAN)
    curves = verdict["curves"]
    gaps = [abs(a - b) / abs(a) for a, b in zip(curves["reference"], curves["plan"], strict=True)]
    return {
        **{key: verdict[key] for key in ("kept", "promise", "reason", "seeds")},
        **{key: verdict[key] for key in ("loss_envelopes", "displacement_envelopes")},
        "losses": {side: [curves[side][0], curves[side][-1]] for side in ("reference", "plan")},
        "largest_difference_of_loss": max(gaps),
    }


def in_float64(name: str) -> dict[str, Any]:
    """The largest relative differences between PyTorch's own BatchNorm and the fused one with products."""
    losses, before, after = followed(name, fused=False)
    seen, _, state = followed(name, fused=True)
    found = {
        "loss": max(abs(a - b) / abs(a) for a, b in zip(losses, seen, strict=True)),
        "displacement": norm(state[k] - after[k] for k in after) / norm(after[k] - before[k] for k in after),
    }
    return {
        "kept": max(found.values()) < MOST_IN_FLOAT64,
        "float64": {**found, "losses": losses[:: STEPS - 1]},
    }


def followed(name: str, *, fused: bool) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, and the weights and buffers before and after."""
    torch.manual_seed(0)
    job = job_of(name)
    model: Any = job.model().double().train()
    before = {k: v.clone() for k, v in model.state_dict().items() if v.is_floating_point()}
    optimizer: Any = job.optimizer(model)
    undo, _ = install(model, {}, products=True) if fused else (lambda: None, False)
    losses = []
    for inputs, labels in batches(name)[:STEPS]:
        wide = labels.double() if labels.is_floating_point() else labels
        loss = job.loss(model, (inputs.double(), wide))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    undo()
    return losses, before, {key: model.state_dict()[key] for key in before}


def norm(tensors: Iterable[Tensor]) -> float:
    """Of all elements together."""
    return sum(float(t.square().sum()) for t in tensors) ** 0.5


PARTS: dict[str, Callable[[str], dict[str, Any]]] = {"ruler": by_ruler, "float64": in_float64}

if __name__ == "__main__":
    sys.exit(main())
