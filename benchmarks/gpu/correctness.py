"""Are techniques right on this GPU? Scenes first, then the contract of each technique, then the ruler.

Everything that touches the GPU runs in a child process; this one imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

from book import Book, Case

import vivace
from vivace.errors import ChildFailed, PlanError
from vivace.plan import Plan
from vivace.processes.launch import Child, Source
from vivace.technique import Stage, registry
from vivace.verifying.verifier import Verifier

HERE = Path(__file__).resolve().parent
TINY = HERE / "tiny.py"
JOBS = ("cnn", "transformer", "lstm", "mlp")
PAIR_JOBS = ("cnn", "transformer")
SCENES = (
    "children_see_the_gpu",
    "strict_fp32_is_strict",
    "tf32_acts_and_is_undone",
    "randomness_is_captured_and_restored",
    "graph_follows_shapes_and_scheduler",
    "graph_takes_loaded_states",
    "graph_leaves_evidence_of_precision",
    "graph_memory_is_counted",
    "scaler_skips_a_planted_overflow",
    "prefetched_batches_live_long_enough",
    "training_resumes_bit_for_bit",
    "flags_come_back",
    "compiled_code_runs_on_the_gpu",
    "exhausted_memory_is_named",
)


def correctness(book: Book) -> None:
    """All cases, the cheap ones first; compiled plans last."""
    for name in SCENES:
        book.case(f"scene {name}", lambda name=name: _scene(book, name), seconds=5)
    with Server(lambda: Child("scenes:Contract", _source("mlp"), {"dry": book.dry})) as server:
        variants = book.case("contract variants", lambda: {"plans": server.ask("variants", 120.0)})
        plans = variants.get("plans", [])
        quick = [plan for plan in plans if not _compiled(plan)]
        few = 10 if book.dry else 1  # a dry run takes every tenth pair: the suite has them all
        for plan in [*quick, *_pairs(quick)[::few]]:
            for job in ("cnn",) if book.dry else (*JOBS, "dictionaries", "gan"):
                _contract(book, server, plan, job)
    alone = [{name: settings} for plan in plans for name, settings in plan.items()]
    on_gpus_only = [p for p in _pairs(alone) if any(_only_cuda(name) for name in p)][::few]
    for compiled in (False, True):
        singles = [plan for plan in alone if _compiled(plan) == compiled]
        pairs = [plan for plan in on_gpus_only if _compiled(plan) == compiled]
        for job in JOBS[:1] if book.dry else JOBS:
            _rule(book, job, singles + (pairs if job in PAIR_JOBS else []))


def _scene(book: Book, name: str) -> Case:
    child = Child("scenes:Scenes", _source("mlp"), {"dry": book.dry})
    try:
        return {"found": child.ask(name, book.patience(90.0))}
    finally:
        child.close()


def _contract(book: Book, server: Server, plan: dict[str, Any], job: str) -> None:
    def check() -> Case:
        return server.ask("check", book.patience(60.0), plan=plan, job=job)

    book.case(f"contract {_name(plan)} on {job}", check)


def _rule(book: Book, job: str, plans: list[dict[str, Any]]) -> None:
    """The ruler's verdict on each plan; the reference and its shadows run once for all."""
    if not plans:
        return
    machine = vivace.inspect()

    def judge(verifier: Any, plan: dict[str, Any]) -> Case:
        verdict = verifier.call(lambda v: v.judge(Plan.from_dict(plan), seconds=1.0 if book.dry else None))
        kept = ("promise", "loss_envelopes", "displacement_envelopes", "reason", "steps", "seeds")
        document = {key: getattr(verdict, key) for key in kept}
        if verdict.promise == "semantics":
            return {**document, "status": "refused", "reason": "it promises SEMANTICS here: for the metric"}
        return {**document, "status": "ok" if verdict.kept else "broken"}

    with Server(lambda: Verifier(_source(job), machine, timeout=book.patience(150.0))) as server:
        for plan in plans:
            book.case(f"ruler {_name(plan)} on {job}", lambda plan=plan: judge(server, plan), seconds=6)


class Server:
    """A child that is made when it is first needed, and made anew after it died."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make
        self.child: Any = None

    def call(self, use: Callable[[Any], Any]) -> Any:
        self.child = self.child or self.make()
        try:
            return use(self.child)
        except ChildFailed:  # CUDA errors stay in a process: go on in a new one
            self.close()
            raise

    def ask(self, command: str, timeout: float, **arguments: Any) -> Any:
        return self.call(lambda child: child.ask(command, timeout, **arguments))

    def close(self) -> None:
        if self.child is not None:
            self.child.close()
        self.child = None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _source(job: str) -> Source:
    return Source(f"{TINY}:{job}")


def _pairs(plans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Two techniques at a time with the first setting of each, where they do not exclude each other."""
    first: dict[str, dict[str, Any]] = {}
    for plan in plans:
        for name in plan:
            first.setdefault(name, plan)
    return list(_possible([{**a, **b} for a, b in combinations(first.values(), 2)]))


def _possible(plans: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for plan in plans:
        try:
            Plan.from_dict(plan)
        except PlanError:
            continue
        yield plan


def _compiled(plan: dict[str, Any]) -> bool:
    return any(registry.find(name).card.stage == Stage.COMPILE for name in plan)


def _only_cuda(name: str) -> bool:
    return registry.find(name).card.devices == ("cuda",)


def _name(plan: dict[str, Any]) -> str:
    return " + ".join(f"{name} {settings}" if settings else name for name, settings in plan.items())
