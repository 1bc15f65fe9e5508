"""Convolutional networks: are the kernels right, how far does each step of the waterfall come, and why?

The most telling cases come first; what the time does not reach goes on in the next run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from book import Book, Server
from counters import measured
from norm_shapes import ALLOWED, NUM_CASES, PRODUCTS, SHAPES
from speed import Settings, Track

from vivace import ledger
from vivace.processes.launch import Child, Source

HERE = Path(__file__).resolve().parent
JOBS = HERE / "cnn_jobs.py"
TINY = Source(f"{HERE / 'tiny.py'}:cnn")
HALF: Settings = {"bf16_autocast": {}}
NHWC: Settings = {**HALF, "channels_last": {}, "cudnn_benchmark": {}}
NORM: Settings = {**NHWC, "fused_batchnorm": {}}
COMPILED: Settings = {**NORM, "fused_optimizer": {}, "compile": {}}
# Every step keeps what the ones before it had; TF32 gives way to bf16.
WATERFALL: dict[str, Settings] = {
    "TF32": {"tf32": {}},
    "bf16": HALF,
    "+ channels_last": NHWC,
    "+ fused_batchnorm": NORM,
    "+ compile": COMPILED,
    "+ graph": {**COMPILED, "cuda_graph_step": {}},
}
GRAPH: Settings = {"fused_optimizer": {}, "cuda_graph_step": {}}
ASIDE: dict[str, Settings] = {  # what one technique is worth where the others are there
    "graph without compile": {**NORM, **GRAPH},
    "graph without fused_batchnorm": {**NHWC, **GRAPH, "compile": {}},
    "graph without both": {**NHWC, **GRAPH},
    "bf16 weights, graph": {**{k: v for k, v in NORM.items() if k not in HALF}, "bf16_weights": {}, **GRAPH},
    "padded_stem": {**NORM, **GRAPH, "padded_stem": {}},
    "conv_gemm": {**NORM, **GRAPH, "conv_gemm": {}},
    "products": {**NORM, **GRAPH, "fused_batchnorm": {"products": True}},
}
MEASURED = ("56x56x64", "56x56x256 + add")
SHORT = ("+ channels_last", "+ fused_batchnorm", "+ graph")
NETWORKS = ("resnext101_32x8d", "mobilenet_v3_large", "efficientnet_b0", "densenet121", "vgg16_bn", "unet")
PARITY: tuple[Settings, ...] = (
    {},
    {"channels_last": {}},
    {"bf16_autocast": {}, "channels_last": {}},
    {"fp16_autocast": {}},
    {"bf16_weights": {}},
    {"compile": {}},
    GRAPH,
)


def cnn(book: Book) -> None:
    """Ceilings, kernels at few shapes, the waterfall of ResNet-50; then many shapes and other networks."""
    _in_child(book, "probes:Probes", {"ceiling matmul": ("matmul", {}), "ceiling copy": ("copy", {})})
    kernels, products = "norm_kernels:NormKernels", "product_kernels:ProductKernels"
    _check(book, few=True)
    _waterfall(book, "resnet50_256", WATERFALL)
    _in_child(book, kernels, {f"kernels at {s}": ("ablate", {"shape": s}) for s in SHAPES})
    _in_child(book, products, {f"kernels at {s}": ("ablate", {"shape": s}) for s in PRODUCTS})
    _waterfall(book, "resnet50_256", ASIDE)
    _contract(book)
    for shape in () if book.dry else MEASURED:
        book.case(
            f"counters at {shape}",
            lambda s=shape: {"moved": measured(s, book.patience(90.0))},
            seconds=20,
        )
    _check(book, few=False)
    for name, plans in _rest():
        if book.dry and name != "unet_256":
            continue
        _waterfall(book, name, plans)


def _check(book: Book, *, few: bool) -> None:
    """Are the kernels right? Every shape compiles kernels of its own: minutes, for the many."""
    shapes = "" if few else f", {NUM_CASES} shapes"
    for kind, entry in (
        ("kernels", "norm_kernels:NormKernels"),
        ("products", "product_kernels:ProductKernels"),
    ):
        cases = {f"{kind} {d}{shapes}": ("check", {"dtype": d, "few": few}) for d in ALLOWED}
        _in_child(book, entry, cases)


def _rest() -> Iterator[tuple[str, dict[str, Settings]]]:
    yield "resnet50_32", WATERFALL
    short = {label: WATERFALL[label] for label in SHORT}
    for batch in (256, 32):
        for network in NETWORKS:
            yield f"{network}_{batch}", short
        yield f"convnext_tiny_{batch}", short  # no BatchNorm: refused, and said so


def _in_child(book: Book, entry: str, cases: dict[str, tuple[str, dict[str, Any]]]) -> None:
    if book.done(*cases):
        return
    with Server(lambda: Child(entry, TINY, {"dry": book.dry})) as server:
        for name, (command, arguments) in cases.items():
            timeout = book.patience(90.0)
            book.case(
                name,
                lambda c=command, t=timeout, a=arguments: {"found": server.ask(c, t, **a)},
                seconds=4,
            )


def _contract(book: Book) -> None:
    """The contract of the technique beside those that it will be used with."""
    plans: list[Settings] = [{"fused_batchnorm": {}, **others} for others in PARITY]
    with Server(lambda: Child("scenes:Contract", TINY, {"dry": book.dry})) as server:
        for plan in plans:
            if not (book.dry and "compile" in plan):
                timeout = book.patience(90.0)
                book.case(
                    f"contract {' + '.join(plan)}",
                    lambda p=plan, t=timeout: server.ask("check", t, plan=p, job="cnn"),
                    seconds=60 if "compile" in plan else 8,
                )


def _waterfall(book: Book, name: str, plans: dict[str, Settings]) -> None:
    """Strict fp32, then each plan beside it, with the bytes that its kernels must move and the bound."""
    ledger.WIDE = math.inf if book.dry else ledger.WIDE
    if book.dry:
        plans = {"+ fused_batchnorm": {k: v for k, v in NORM.items() if k != "cudnn_benchmark"}}
        plans["graph without compile"] = {**plans["+ fused_batchnorm"], **GRAPH}
    with Track(book, name, JOBS) as track:
        reference = book.case(f"{name} | strict fp32", track.reference_case, seconds=25)
        if reference["status"] != "ok":
            book.unreached += [f"{name} | {label}" for label in plans]
            return
        _count(book, name)
        for label, plan in plans.items():
            seconds = 45 if "compile" in plan else 20
            book.case(f"{name} | {label}", lambda plan=plan: track.plan_case(plan), seconds=seconds)


def _count(book: Book, name: str) -> None:
    """Bytes an image and bounds of a network at the ceilings measured here."""
    rates = {k: v for c in ("matmul", "copy") for k, v in book.cases[f"ceiling {c}"].get("found", {}).items()}
    if {"copy_device", "matmul_bfloat16", "matmul_float32"} <= rates.keys():
        arguments = {
            "name": name.rpartition("_")[0],
            "bandwidth": rates["copy_device"],
            "rates": {dtype: rates[f"matmul_{dtype}"] for dtype in ("float32", "bfloat16")},
        }
        _in_child(book, "counted:Counted", {f"{name} | bytes": ("traffic", arguments)})
