"""How fast each job trains under each plan: blocks in turn with strict fp32, each side in its own process."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from book import Book, Case

import vivace
from vivace import ledger
from vivace.errors import ChildFailed, Code, Refused
from vivace.measuring import paired
from vivace.plan import Plan
from vivace.processes.launch import Source

HERE = Path(__file__).resolve().parent
paired.WORKER = "steady:SteadyWorker"

Settings = dict[str, dict[str, Any]]
FUSED: Settings = {"fused_optimizer": {}}
GRAPH: Settings = {"fused_optimizer": {}, "cuda_graph_step": {}}
IMAGES: Settings = {"channels_last": {}, "cudnn_benchmark": {}}


def plans(base: Settings, *labels: str) -> dict[str, Settings]:
    """The plans of these names for one job: what a person who knows PyTorch would try."""
    half: Settings = {"bf16_autocast": {}, **base}
    compiled: Settings = {"compile": {}}
    known = {
        "fp32, graph": {**base, **GRAPH},
        "bf16": {**half, **FUSED},
        "bf16, graph": {**half, **GRAPH},
        "bf16, compiled": {**half, **FUSED, **compiled},
        "bf16, compiled, graph": {**half, **GRAPH, **compiled},
        "bf16 weights, compiled, graph": {"bf16_weights": {}, **base, **GRAPH, **compiled},
    }
    return {label: known[label] for label in labels}


LARGE = ("bf16", "bf16, compiled", "bf16 weights, compiled, graph")
LAUNCHES = ("fp32, graph", "bf16, graph", "bf16, compiled, graph")
# What matters most comes first; what the time does not reach goes on in the next run.
WORKLOADS: dict[str, dict[str, Settings]] = {
    "resnet50_256": plans(IMAGES, *LARGE),
    "mlp": plans({}, *LAUNCHES),
    "resnet18_32px": plans(IMAGES, *LAUNCHES),
    "gpt": plans({}, *LARGE),
    "bert": plans({}, *LARGE),
    "unet": plans(IMAGES, *LARGE[:2]),
    "resnet50_512": plans(IMAGES, *LARGE[:2]),
    "resnet50_64": plans(IMAGES, *LARGE[:2], "bf16, compiled, graph"),
    "resnet50_128": plans(IMAGES, *LARGE[:2]),
}
# Of a dry run: jobs that differ from others by their size alone, and the plans that are timed.
REPEATED = ("resnet18_32px", "resnet50_64", "resnet50_512", "resnet50_128")
DRY = {"mlp": ("fp32, graph",), "bert": ("PyTorch's defaults", "bf16")}


def speed(book: Book) -> None:
    """Every job under strict fp32, PyTorch's defaults, TF32, and each of its plans."""
    ledger.WIDE = math.inf if book.dry else ledger.WIDE
    for name, own in WORKLOADS.items():
        chosen = {"PyTorch's defaults": {}, "TF32": {"tf32": {}}, **own}
        if book.dry:
            if name in REPEATED:
                continue
            chosen = {label: chosen[label] for label in DRY.get(name, ())}
        with Track(book, name) as track:
            reference = book.case(f"{name} | strict fp32", track.reference_case, seconds=25)
            if reference["status"] != "ok":
                book.unreached += [f"{name} | {label}" for label in chosen]
                continue
            for label, plan in chosen.items():
                book.case(
                    f"{name} | {label}", lambda plan=plan: track.plan_case(plan), seconds=50 if plan else 20
                )


class Track:
    """One job: its reference is opened when a case first needs it, and closed at the end."""

    def __init__(self, book: Book, name: str, file: Path = HERE / "workloads.py") -> None:
        self.book = book
        self.source, self.machine = Source(f"{file}:{name}"), vivace.inspect()
        self.log = book.folder / "children.log"
        self._reference: paired.Contestant | None = None
        self.observed: dict[str, Any] = {}

    def reference(self) -> paired.Contestant:
        """Strict fp32, open, warm and observed; made anew after it died."""
        if self._reference is None or not self._reference.child.alive:
            self.close()
            self._reference = self._contestant()
            self._reference.open(Plan(), warm_seconds=self._seconds(1.0))
            self.observed = self._reference.ask("observe")
        return self._reference

    def reference_case(self) -> Case:
        """Speed, operations and memory of strict fp32."""
        with _fitting():
            contestant = self.reference()
        steps = max(1, round(self._seconds(0.5) / contestant.step_seconds))
        seconds = median(contestant.block(steps) for _ in range(3))
        counted = contestant.ask("count")
        return {
            "samples_per_second": 1 / seconds,
            "flops_per_sample": counted["flops"] / counted["samples"],
            "batch": counted["samples"],
            "peak_bytes": self.observed["peak_bytes"],
        }

    def plan_case(self, plan: Settings) -> Case:
        """One plan against the reference, in turn; the empty plan stands for PyTorch's defaults."""
        reference, contestant = self.reference(), self._contestant()
        try:
            with _fitting():
                contestant.open(Plan.from_dict(plan), strict=bool(plan), warm_seconds=self._seconds(1.0))
                proof = contestant.ask("confirm", reference=self.observed)
                seconds = max(2.0, min(8.0, self.book.left - 5))
                compared = paired.compare(
                    reference, contestant, seconds=self._seconds(seconds), tolerance=self._tolerance
                )
        finally:
            contestant.close()
        return {
            "plan": plan,
            "ratio": dataclasses.asdict(compared.ratio),
            "samples_per_second": 1 / median(pair[1] for pair in compared.pairs),
            "reference_samples_per_second": 1 / median(pair[0] for pair in compared.pairs),
            "pairs": len(compared.pairs),
            "peak_bytes": proof["peak_bytes"],
            "warmup_seconds": contestant.warmup_seconds,
            "evidence": proof["evidence"],
        }

    def close(self) -> None:
        """End the reference's process."""
        if self._reference is not None:
            self._reference.close()
        self._reference = None

    def __enter__(self) -> Track:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _tolerance(self) -> float:
        return 10.0 if self.book.dry else 0.02

    def _seconds(self, wanted: float) -> float:
        return 0.01 if self.book.dry else wanted

    def _contestant(self) -> paired.Contestant:
        return paired.Contestant(self.source, self.machine, log=self.log, timeout=self.book.patience(200.0))


@contextmanager
def _fitting() -> Iterator[None]:
    """What is too large for this GPU is refused: asked for again it would be so again."""
    try:
        yield
    except ChildFailed as failed:
        if failed.code != Code.OUT_OF_MEMORY:
            raise
        raise Refused(f"too large for this GPU beside strict fp32: {failed}") from None
