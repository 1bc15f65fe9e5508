"""The READMEs' tables of ResNet-50 on GPUs, step by step, from the records of `gpu`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

JOB = "resnet50_256"
WORDS: dict[str, dict[str, Any]] = {
    "README.md": {
        "head": "ResNet-50 in training, 224 px, batch 256, on {device}, {date}; driver {driver}, "
        "torch {torch}; `{command}`:",
        "columns": ("plan", "images/s", "over strict fp32, 95 % interval", "peak GiB", "of the bound"),
        "strict": "strict fp32",
        "none": "No GPU has been recorded yet: `benchmarks/gpu.sh`.",
    },
    "README.zh-CN.md": {
        "head": "训练 ResNet-50，224 像素，批大小 256，{device}，{date}；驱动 {driver}，torch {torch}；"
        "`{command}`：",
        "columns": ("方案", "张/秒", "与严格 fp32 之比（95% 区间）", "峰值显存（GiB）", "达到上限的比例"),
        "strict": "严格 fp32",
        "none": "尚无 GPU 的记录：`benchmarks/gpu.sh`。",
    },
}


def table(records: Iterable[dict[str, Any]], file: str) -> str:
    """The newest record of each machine: every plan that was measured, in the order of measuring."""
    words, parts = WORDS[file], []
    trained = [record for record in records if any(steps(record))]
    newest = {record["machine"]["fingerprint"]: record for record in reversed(trained)}
    for record in newest.values():
        told = {"device": record["machine"]["device"], **record["versions"]}
        rows = [words["columns"], ("---",) * len(words["columns"]), *_rows(record, words)]
        parts.append(words["head"].format(**told, date=record["date"], command=record["command"]))
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    return "\n" + "\n\n".join(parts or [words["none"]]) + "\n\n"


def steps(record: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each plan of ResNet-50 that was timed, and its case."""
    for name, case in record["parts"].get("cnn", {}).items():
        if name.startswith(f"{JOB} | ") and "ratio" in case:
            yield " + ".join(f"`{technique}`" for technique in case["plan"]), case


def kernels(record: dict[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    """Of BatchNorm's kernels, and of products with statistics: how fast beside PyTorch's operators."""
    timed = {
        name.removeprefix("kernels at "): case["found"]
        for name, case in record["parts"].get("cnn", {}).items()
        if name.startswith("kernels at ") and case["status"] == "ok"
    }
    for kind in ("norms", "products"):
        with_products = kind == "products"
        found = {
            at: one["pytorch_seconds"] / one["seconds"]
            for at, one in timed.items()
            if ("statistics_mm" in one["kernels"]) == with_products
        }
        if found:
            yield kind, found


def _rows(record: dict[str, Any], words: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    cases = record["parts"]["cnn"]
    bounds = cases.get(f"{JOB} | bytes", {}).get("found", {})
    strict = cases.get(f"{JOB} | strict fp32", {})

    def cells(plan: str, case: dict[str, Any], shown: str, counted: str) -> tuple[str, ...]:
        rate, peak = case["samples_per_second"], f"{case['peak_bytes'] / 2**30:.1f}"
        share = f"{rate / bounds[counted]['bound']:.0%}" if counted in bounds else ""
        return plan, f"{rate:,.0f}", shown, peak, share

    if "samples_per_second" in strict:
        yield cells(words["strict"], strict, "1", "float32")
    for plan, case in steps(record):
        ratio, norm = case["ratio"], case["plan"].get("fused_batchnorm")
        fused = "" if norm is None else " products" if norm.get("products") else " fused"
        shown = f"{ratio['estimate']:.2f}x ({ratio['low']:.2f}-{ratio['high']:.2f})"
        yield cells(plan, case, shown, f"bfloat16{fused}" if "bf16_autocast" in case["plan"] else "")
