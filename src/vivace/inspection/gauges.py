"""The gauges that torch reads: matrix and convolution rates, copies, launches. Imports torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from vivace.inspection import host_gauges
from vivace.inspection.all_reduce import all_reduce
from vivace.inspection.limits import usable_cores
from vivace.inspection.reading import Gauge, Reading
from vivace.tensors.precision import without_tf32
from vivace.tensors.settings import on_threads
from vivace.torch_internals.tensors import int8_product

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUTS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
SMALLEST_SIZE, LARGEST_SIZE = 256, 8192
CHANNELS, PIXELS, KERNEL = 256, 14, 3
SMALLEST_BATCH, LARGEST_BATCH = 1, 512
SLOW_SECONDS, CHOOSING_CALLS = 0.3, 5
MIB = 2**20


@contextmanager
def open_device(name: str, absent: dict[str, str]) -> Iterator[list[Gauge]]:
    """The gauges of a device; inside, fp32 is strict and cuDNN searches, and both are set back afterwards.

    Keys that this kind of device cannot have go to `absent`. Raises where torch does not know the device.
    """
    device = torch.device(name)
    torch.ones(1, device=device)
    bench = _Bench(device)
    with ExitStack() as stack:
        backends: Any = torch.backends
        for owner in (backends.cuda.matmul, backends.cudnn.conv):
            stack.enter_context(_setting(owner, "fp32_precision", "ieee"))
        stack.enter_context(_setting(backends.cudnn, "benchmark", True))
        # torch counts the cores that it can see, and not those that the container grants
        stack.enter_context(on_threads(min(torch.get_num_threads(), usable_cores())))
        stack.callback(torch.cuda.empty_cache)
        yield [*_gauges(bench, absent), *host_gauges.gauges(stack), _exchange(device, stack)]


def _gauges(bench: _Bench, absent: dict[str, str]) -> Iterator[Gauge]:
    kinds = ["fp32", "bf16", "fp16"]
    if bench.device.type == "cuda":
        if reason := without_tf32(bench.device):
            absent["matmul_tf32"] = reason
        else:
            kinds.insert(1, "tf32")
    for kind in kinds:
        yield Gauge(f"matmul_{kind}", partial(bench.matmul, kind))
    yield Gauge("matmul_int8", bench.matmul_int8)
    for kind in kinds:
        for layout in LAYOUTS if kind != "fp16" or bench.device.type == "cuda" else ():
            yield Gauge(f"convolution_{kind}_{layout}", partial(bench.convolution, kind, layout))
    yield Gauge("copy_device", bench.copy_device)
    for key in ("host_to_device_pageable", "host_to_device_pinned", "device_to_host_pinned"):
        if bench.device.type == "cpu":
            absent[key] = "the device is the CPU: nothing is copied to it"
        else:
            yield Gauge(key, partial(bench.copy_host, key))
    yield Gauge("launch_seconds", bench.launch)


def _exchange(device: torch.device, stack: ExitStack) -> Gauge:
    """Between all visible GPUs; on the CPU between two processes, where there are two cores."""
    num_ranks = torch.cuda.device_count() if device.type == "cuda" else min(2, usable_cores())
    return Gauge("all_reduce", partial(all_reduce, device.type, num_ranks, stack))


class _Bench:
    """Runs operators on one device and times them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_cpu = device.type == "cpu"
        self.enough_seconds = 0.02 if on_cpu else 0.002  # of one call, when choosing a size
        self.reading_seconds = 0.1 if on_cpu else 0.05

    def matmul(self, kind: str) -> Reading:
        """A square product, doubled in size until one takes long enough; the best rate's size is kept."""

        def make(size: int) -> Callable[[], object]:
            left, right, out = (
                torch.randn(size, size, device=self.device, dtype=DTYPES[kind]) for _ in "abc"
            )
            return _with_tf32(torch.backends.cuda.matmul, kind, lambda: torch.mm(left, right, out=out))

        return self._largest(make, lambda size: 2.0 * size**3, SMALLEST_SIZE, LARGEST_SIZE)

    def matmul_int8(self) -> Reading:
        """A square product of int8 with int32 sums."""

        def make(size: int) -> Callable[[], object]:
            left, right = (
                torch.randint(-8, 8, (size, size), device=self.device, dtype=torch.int8) for _ in "ab"
            )
            return lambda: int8_product(left, right.t())

        return self._largest(make, lambda size: 2.0 * size**3, SMALLEST_SIZE, LARGEST_SIZE)

    def convolution(self, kind: str, layout: str) -> Reading:
        """A 3x3 convolution, 256 -> 256 channels on 14x14 pixels, padding 1: forward and both gradients."""

        def make(batch: int) -> Callable[[], object]:
            options: Any = {"device": self.device, "dtype": DTYPES[kind]}
            inputs = torch.randn(batch, CHANNELS, PIXELS, PIXELS, **options)
            weight = torch.randn(CHANNELS, CHANNELS, KERNEL, KERNEL, **options)
            inputs, weight = (
                x.to(memory_format=LAYOUTS[layout]).requires_grad_()
                for x in (inputs, weight)  # type: ignore[call-overload]
            )
            gradient = torch.randn_like(inputs)

            def run() -> object:
                output = torch.nn.functional.conv2d(inputs, weight, padding=KERNEL // 2)
                return torch.autograd.grad(output, (inputs, weight), gradient)

            return _with_tf32(torch.backends.cudnn.conv, kind, run)  # type: ignore[attr-defined]

        def work(batch: int) -> float:
            return 3 * 2.0 * batch * (CHANNELS * PIXELS * KERNEL) ** 2

        return self._largest(make, work, SMALLEST_BATCH, LARGEST_BATCH)

    def copy_device(self) -> Reading:
        """One buffer into another, both larger than the caches."""
        count = self._copied_bytes() // 4
        source, target = (torch.zeros(count, device=self.device) for _ in "ab")
        return self._rate(lambda: target.copy_(source), 2.0 * 4 * count)

    def copy_host(self, key: str) -> Reading:
        """Between host memory, pinned or not, and the device."""
        count = 256 * MIB
        host = torch.zeros(count, dtype=torch.uint8, pin_memory=key.endswith("pinned"))
        there = torch.zeros(count, dtype=torch.uint8, device=self.device)
        source, target = (there, host) if key.startswith("device") else (host, there)
        return self._rate(lambda: target.copy_(source, non_blocking=True), float(count))

    def launch(self) -> Reading:
        """An in-place addition to one number, handed over many times in a row; seconds a call."""
        number = torch.zeros(1, device=self.device)
        rate = self._rate(lambda: number.add_(1.0), 1.0)
        return lambda: 1 / rate()

    def _copied_bytes(self) -> int:
        if self.device.type == "cpu":
            return host_gauges.beyond_the_caches()
        free, _ = torch.cuda.mem_get_info(self.device)
        return min(1024 * MIB, int(free) // 8)

    def _largest(
        self,
        make: Callable[[int], Callable[[], object]],
        work: Callable[[int], float],
        smallest: int,
        largest: int,
    ) -> Reading:
        """Double the size until a call takes long enough; keep the size with the best rate."""
        best: tuple[float, int] = (0.0, smallest)
        size = smallest
        while True:
            run = make(size)
            run()  # libraries load, algorithms are searched
            seconds = self._seconds_of(run, 1)
            if seconds < SLOW_SECONDS:
                seconds = min(seconds, *(self._seconds_of(run, 1) for _ in range(CHOOSING_CALLS)))
            best = max(best, (work(size) / seconds, size))
            if seconds >= self.enough_seconds or size >= largest:
                break
            size *= 2
        return self._rate(make(best[1]), work(best[1]))

    def _rate(self, run: Callable[[], object], work: float) -> Reading:
        """A reading of `work` a second, `run` called as often as fills a reading's time."""
        run()
        calls, seconds = 1, self._seconds_of(run, 1)
        while seconds < self.reading_seconds / 2:
            calls = max(2 * calls, round(calls * self.reading_seconds / max(seconds, 1e-9) / 2))
            seconds = self._seconds_of(run, calls)
        return lambda: work * calls / self._seconds_of(run, calls)

    def _seconds_of(self, run: Callable[[], object], calls: int) -> float:
        self._wait()
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        self._wait()
        return time.perf_counter() - begin

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def _with_tf32(owner: object, kind: str, run: Callable[[], object]) -> Callable[[], object]:
    """`run`, with TF32 allowed meanwhile where the kind asks for it."""
    if kind != "tf32":
        return run

    def allowed() -> object:
        with _setting(owner, "fp32_precision", "tf32"):
            return run()

    return allowed


@contextmanager
def _setting(owner: object, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
