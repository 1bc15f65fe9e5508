"""The child's side of the part feed: what placing batches costs, hidden and not, as floats and as bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch
import torchvision
from torch.nn import functional
from torchvision import transforms

from vivace.inspection import inspect
from vivace.job import Job
from vivace.mechanisms.pixels import cut
from vivace.plan import Plan
from vivace.session.opening import start, training_device
from vivace.session.session import Session

NORMALIZE = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class Arrivals:
    """Serves `vivace.processes.launch.Child`: ResNet-50 in bfloat16; in a dry run ResNet-18, tiny images."""

    def __init__(self, job: Job, dry: bool) -> None:
        self.dry, self.device, self.stack = dry, training_device(inspect()), ExitStack()
        self.samples, self.side = (4, 32) if dry else (256, 224)
        self.rounds, self.steps = (2, 2) if dry else (7, 8)

    def overlap(self) -> dict[str, float]:
        """Seconds of a step on batches that are there, that come, and that come ahead; the share hidden.

        The three take turns. Batches lie in page-locked memory, as a loader with ``pin_memory`` leaves them.
        """
        half = {} if self.dry else {"bf16_autocast": {}, "channels_last": {}}
        host = [self._batch() for _ in range(self.steps)]
        there = [(pixels.to(self.device), labels.to(self.device)) for pixels, labels in host]
        plain, ahead = (self._session({**half, **more}) for more in ({}, {"pinned_prefetch": {}}))
        ways = {"there": (plain, there), "coming": (plain, host), "ahead": (ahead, host)}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(self.rounds):
            for name, (session, batches) in ways.items():
                times[name].append(self._seconds(lambda s=session, b=batches: _train(s, b)) / self.steps)
        found = {f"{name}_seconds": median(seconds[1:]) for name, seconds in times.items()}
        placing = found["coming_seconds"] - found["there_seconds"]
        left = found["ahead_seconds"] - found["there_seconds"]
        return found | ({"hidden_share": 1 - left / placing} if placing > 0 else {})

    def sent(self) -> dict[str, float]:
        """Seconds to place a batch as floats, and as bytes with scaling on the device; are the bits equal?"""
        dataset = torchvision.datasets.FakeData(
            self.samples,
            (3, self.side, self.side),
            transform=transforms.Compose([transforms.ToTensor(), NORMALIZE]),
        )
        found = cut(dataset)
        few = range(min(16, self.samples))
        floats, numbers = (torch.stack([d[i][0] for i in few]) for d in (dataset, found.dataset))
        equal = torch.equal(found.finish(numbers.to(self.device)).cpu(), floats)
        repeats = (self.samples // len(few), 1, 1, 1)
        floats, numbers = (batch.repeat(repeats).pin_memory() for batch in (floats, numbers))
        place: dict[str, Callable[[], Any]] = {
            "float32": lambda: floats.to(self.device, non_blocking=True),
            "uint8": lambda: found.finish(numbers.to(self.device, non_blocking=True)),
        }
        times: dict[str, list[float]] = {name: [] for name in place}
        for _ in range(self.rounds):
            for name, function in place.items():
                times[name].append(self._seconds(function))
        seconds = {f"{name}_seconds": median(those[1:]) for name, those in times.items()}
        return {**seconds, "bits_equal": float(equal)}

    def _session(self, plan: dict[str, Any]) -> Session:
        model = torchvision.models.resnet18 if self.dry else torchvision.models.resnet50
        job = Job(
            model=model,
            data=list,
            loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        )
        return self.stack.enter_context(start(job, Plan.from_dict(plan), inspect()))

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = torch.randn(self.samples, 3, self.side, self.side)
        return pixels.pin_memory(), torch.randint(1000, (self.samples,)).pin_memory()

    def _seconds(self, function: Callable[[], Any]) -> float:
        torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        function()
        torch.cuda.synchronize(self.device)
        return time.perf_counter() - begin


def _train(session: Session, batches: list[Any]) -> None:
    for batch in session.batches(batches):
        session.step(batch)
