"""A training step as a CUDA graph: warm-up, capture and replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vivace.errors import Refused
from vivace.surgery import map_tensors, tensors

WARM_UP_STEPS = 3


class StepGraph:
    """Trains a few steps eagerly on a side stream, then records one step and replays it on static buffers.

    Args:
        optimizer: capturable, or fused with a learning rate on the device.
        notes: ``replays`` counts the steps that ran from the graph.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, notes: dict[str, Any]) -> None:
        self.optimizer, self.notes = optimizer, notes
        self.forget()

    def forget(self, _: Any = None) -> None:
        """Drop the graph; the next steps warm up and capture afresh."""
        self.graph: Any = None
        self.num_steps, self.shapes = 0, ""

    def step(self, following: Callable[[Any], torch.Tensor], batch: Any) -> torch.Tensor:
        """One training step; batches unlike the first one run uncaptured."""
        shapes = repr(map_tensors(batch, lambda t: (t.shape, t.dtype)))
        self.shapes = self.shapes or shapes
        if shapes != self.shapes:
            return following(batch)
        self.num_steps += 1
        if self.num_steps <= WARM_UP_STEPS:
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                loss = following(batch)
            torch.cuda.current_stream().wait_stream(stream)
            return loss
        if self.graph is None:
            self.capture(following, batch)
        if self.settings() != self.frozen:
            raise Refused(
                "the scheduler changes more than the learning rate: a captured step cannot follow it"
            )
        for static, tensor in zip(tensors(self.batch), tensors(batch), strict=True):
            static.copy_(tensor, non_blocking=True)
        for rate, group in zip(self.rates, self.optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        self.graph.replay()
        self.notes["replays"] += 1
        return self.loss.clone()

    def capture(self, following: Callable[[Any], torch.Tensor], batch: Any) -> None:
        """Record `following`; raises Refused with torch's reason. Recording trains nothing."""
        groups = self.optimizer.param_groups
        own = [group["lr"] for group in groups]
        device = groups[0]["params"][0].device
        self.batch = map_tensors(batch, torch.clone)
        self.rates = [torch.tensor(float(rate), device=device) for rate in own]
        self.frozen = self.settings()
        graph = torch.cuda.CUDAGraph()
        try:
            for group, rate in zip(groups, self.rates, strict=True):
                group["lr"] = rate
            with torch.cuda.graph(graph):
                self.loss = following(self.batch)
        except RuntimeError as error:
            raise Refused(f"the step cannot be captured: {str(error).splitlines()[0]}") from error
        finally:
            for group, rate in zip(groups, own, strict=True):
                group["lr"] = rate
        self.graph = graph

    def settings(self) -> list[dict[str, Any]]:
        """The optimizer's settings that a graph freezes: all but the learning rate."""
        return [
            {k: v for k, v in g.items() if k not in ("params", "lr")} for g in self.optimizer.param_groups
        ]
