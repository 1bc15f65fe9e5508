"""A few rates of the device, measured in a child process: large, simple, on random data."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch

from vivace.inspection import inspect
from vivace.job import Job
from vivace.session.opening import training_device

ROUNDS = 7


class Probes:
    """Serves `vivace.processes.launch.Child`: each method returns rates by name, in SI units."""

    def __init__(self, job: Job, dry: bool) -> None:
        self.dry, self.device = dry, training_device(inspect())

    def matmul(self) -> dict[str, float]:
        """FLOP/s of a product of two square matrices of 8192, by the dtype of the inputs."""
        size = 64 if self.dry else 8192
        found = {}
        for name in ("bfloat16", "float16", "tf32", "float32"):
            dtype = getattr(torch, name, torch.float32)
            left, right = (torch.randn(size, size, device=self.device).to(dtype) for _ in range(2))
            out = torch.empty_like(left)
            with ExitStack() as stack:
                stack.enter_context(_tf32(name == "tf32"))
                seconds = self._seconds(lambda a=left, b=right, o=out: torch.mm(a, b, out=o))
            found[f"matmul_{name}"] = 2 * size**3 / seconds
        return found

    def copy(self) -> dict[str, float]:
        """Bytes/s read plus written of a copy on the device, in buffers far larger than its caches."""
        count = 1 << (16 if self.dry else 30)
        source = torch.empty(count, dtype=torch.uint8, device=self.device).random_()
        target = torch.empty_like(source)
        return {"copy_device": 2 * count / self._seconds(lambda: target.copy_(source))}

    def host_to_device(self) -> dict[str, float]:
        """Bytes/s to the device, from ordinary and from page-locked memory."""
        return {f"host_to_device_{kind}": self._transfer(kind, True) for kind in ("pageable", "pinned")}

    def device_to_host(self) -> dict[str, float]:
        """Bytes/s from the device, to ordinary and to page-locked memory."""
        return {f"device_to_host_{kind}": self._transfer(kind, False) for kind in ("pageable", "pinned")}

    def launch(self) -> dict[str, float]:
        """Seconds an operator of one element takes, many in a row, and a whole graph of them."""
        number, count = torch.zeros(1, device=self.device), 100 if self.dry else 1000

        def many() -> None:
            for _ in range(count):
                number.add_(1)

        found = {"launch_seconds": self._seconds(many) / count}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            many()
        return {**found, "graph_node_seconds": self._seconds(graph.replay) / count}

    def _transfer(self, kind: str, to_device: bool) -> float:
        count = 1 << (16 if self.dry else 28)
        host = torch.empty(count, dtype=torch.uint8).random_()
        if kind == "pinned":
            host = host.pin_memory()
        there = torch.empty(count, dtype=torch.uint8, device=self.device)
        pair = (there, host) if to_device else (host, there)
        return count / self._seconds(lambda: pair[0].copy_(pair[1], non_blocking=True))

    def _seconds(self, function: Callable[[], Any]) -> float:
        """Median seconds of one call, by events of the device, so that the host may run ahead."""
        function()
        function()
        times = []
        for _ in range(2 if self.dry else ROUNDS):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            before.record()
            function()
            after.record()
            after.synchronize()
            times.append(before.elapsed_time(after) / 1000)
        return median(times)


class _tf32:  # noqa: N801 - reads as a phrase: with _tf32(False)
    def __init__(self, wanted: bool) -> None:
        self.flag: Any = torch.backends.cuda.matmul
        self.wanted, self.before = wanted, self.flag.allow_tf32

    def __enter__(self) -> None:
        self.flag.allow_tf32 = self.wanted

    def __exit__(self, *_: object) -> None:
        self.flag.allow_tf32 = self.before
