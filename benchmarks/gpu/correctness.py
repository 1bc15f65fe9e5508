"""Are techniques right on this GPU? Scenes first, then the ruler, then the contract.

What matters most comes first, as the time may end anywhere: is each technique for GPUs, and is each plan that
a search is likely to find, still the same model? Then what other techniques leave behind, alone and in pairs
with one for GPUs. Techniques that only feed data are tested on CPUs.

Everything that touches the GPU runs in a child process; this one imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

from book import Book, Case, Server

import vivace
from vivace.errors import PlanError
from vivace.plan import Plan
from vivace.processes.launch import Child, Source
from vivace.technique import Stage, registry
from vivace.verifying.verifier import Verifier

HERE = Path(__file__).resolve().parent
TINY = HERE / "tiny.py"
JOBS = ("cnn", "transformer", "lstm", "mlp")
PAIR_JOBS = ("cnn", "transformer")
# What a search is likely to find on a GPU.
LIKELY = (
    ("bf16_autocast", "fused_optimizer"),
    ("channels_last", "bf16_autocast", "fused_optimizer"),
    ("channels_last", "bf16_autocast", "fused_optimizer", "cuda_graph_step"),
    ("channels_last", "bf16_weights", "fused_optimizer", "pinned_prefetch"),
    ("tf32", "channels_last", "fused_optimizer"),
    ("channels_last", "fp16_autocast", "fused_optimizer"),
    ("bf16_autocast", "compile", "fused_optimizer"),
)
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
    "float8_trains_as_it_is_emulated",
    "exhausted_memory_is_named",
)


def correctness(book: Book) -> None:
    """All cases, the most telling first; compiled plans after the others."""
    for name in SCENES:
        book.case(f"scene {name}", lambda name=name: _scene(book, name), seconds=5)
    with Server(lambda: Child("scenes:Contract", _source("mlp"), {"dry": book.dry})) as server:
        variants = book.case("contract variants", lambda: {"plans": server.ask("variants", 120.0)})
        plans = [plan for plan in variants.get("plans", []) if not _only_feeds(plan)]
        alone = [{name: settings} for plan in plans for name, settings in plan.items()]
        first = [*_possible([{key: {} for key in names} for names in LIKELY]), *filter(_only_cuda, alone)]
        pairs = [plan for plan in _pairs(alone) if _only_cuda(plan)]
        rest = [plan for plan in alone if plan not in first]
        jobs = PAIR_JOBS[:1] if book.dry else PAIR_JOBS
        if book.dry:  # each path with a few plans: the suite has all of them
            graphs = {name: {} for name in LIKELY[3]}
            plans, first, rest, pairs = plans[::10], [*first[::10], graphs], rest[::10], pairs[::50]
        for wanted in (first, rest):
            for compiled in (False, True):
                for job in jobs:
                    _rule(book, job, [plan for plan in wanted if _compiled(plan) == compiled])
        for plan in [plan for plan in [*plans, *pairs] if not _compiled(plan)]:
            for job in jobs if book.dry else (*JOBS, "dictionaries", "gan"):
                _contract(book, server, plan, job)
    for compiled in (False, True):
        for job in jobs:
            _rule(book, job, [plan for plan in pairs if _compiled(plan) == compiled])


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
        if not verdict.judged:
            return {**document, "status": "failed"}
        return {**document, "status": "ok" if verdict.kept else "broken"}

    with Server(lambda: Verifier(_source(job), machine, timeout=book.patience(150.0))) as server:
        for plan in plans:
            seconds = 30 if _compiled(plan) else 6
            book.case(f"ruler {_name(plan)} on {job}", lambda plan=plan: judge(server, plan), seconds=seconds)


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


def _only_cuda(plan: dict[str, Any]) -> bool:
    """Does it hold a technique for GPUs alone?"""
    return any(registry.find(name).card.devices == ("cuda",) for name in plan)


def _only_feeds(plan: dict[str, Any]) -> bool:
    """Does it feed data, and nothing for GPUs alone?"""
    return not _only_cuda(plan) and all(registry.find(name).card.stage == Stage.DATA for name in plan)


def _name(plan: dict[str, Any]) -> str:
    return " + ".join(f"{name} {settings}" if settings else name for name, settings in plan.items())
