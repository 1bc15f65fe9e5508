"""What each block costs kept, recomputed or compressed on this machine, and the plan that fits a budget."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from vivace.blocks import Block, find_blocks, forwards
from vivace.engine.opening import call, first_batches, start
from vivace.engine.session import Session
from vivace.engine.streams import capture, restore
from vivace.errors import AnswerIsNo, Refused
from vivace.job import Job
from vivace.machine import Machine
from vivace.memory.planner import Decision, Option, decide, pareto, smallest
from vivace.plan import Plan
from vivace.profile.observe import observe
from vivace.recompute import Recomputer
from vivace.registry import find
from vivace.saved import Bfloat16Store, HostStore, Store
from vivace.surgery import map_tensors, patched, tensors
from vivace.technique import Numerics

REPEATS = 3
ATTEMPTS = 4
TECHNIQUES = {
    "recompute": "checkpoint",
    "compress": "compress_activations",
    "offload": "offload_activations",
}


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A plan whose measured peak is within the budget.

    `curve` holds (bytes at the peak, seconds a step more than keeping everything), smallest first; it rests
    on the blocks' own costs, `peak_bytes` on a measured step.
    """

    plan: Plan
    peak_bytes: int
    kept_bytes: int
    curve: list[tuple[int, float]]

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return {**dataclasses.asdict(self), "plan": self.plan.to_dict()}


def choose(
    job: Job, machine: Machine, budget_bytes: int, allow: Numerics = Numerics.EXACT, base: Plan | None = None
) -> Chosen:
    """The cheapest decisions for the job's blocks under which a step's peak is within `budget_bytes`.

    Each kind of block is timed alone, forward and backward, under each decision. A plan whose measured peak
    is above the budget is chosen again with as much less room. Raises AnswerIsNo with the smallest peak that
    is possible, and Refused where the model has no blocks.
    """
    base = base or Plan()
    batches = first_batches(call(job, "data"), 2)
    with start(job, base, machine) as session:
        options = measure(session, batches[0], allow)
        kept = observe(session, batches).peak_bytes
    if not options:
        raise Refused("no part of the model is repeated, and no nn.Sequential can be cut")
    blocks = list(options.values())
    rest = kept - sum(each[0].held_bytes for each in blocks)
    curve = [(rest + d.peak_bytes, d.seconds) for d in pareto(blocks)]
    room, measured = budget_bytes - rest, list[int]()
    for _ in range(ATTEMPTS):
        try:
            decision = decide(blocks, room)
        except AnswerIsNo:
            decision = smallest(blocks)
        plan = plan_of(decision, list(options), base)
        with start(job, plan, machine) as session:
            peak = observe(session, batches).peak_bytes
        if peak <= budget_bytes:
            return Chosen(plan, peak, kept, curve)
        measured.append(peak)
        if decision.names == smallest(blocks).names:
            break
        room -= peak - budget_bytes
    raise AnswerIsNo(
        f"no decisions for the blocks bring the peak to {budget_bytes / 2**20:.1f} MiB; the smallest "
        f"measured is {min(measured) / 2**20:.1f} MiB"
    )


def plan_of(decision: Decision, names: list[str], base: Plan) -> Plan:
    """`base` with the techniques that carry out a decision for the blocks called `names`."""
    plan = base
    for word, technique in TECHNIQUES.items():
        chosen = tuple(name for name, made in zip(names, decision.names, strict=True) if made == word)
        if chosen:
            everything = len(chosen) == len(names)
            plan = plan.adding(find(technique)(blocks=("*",) if everything else chosen))  # type: ignore[call-arg]
    return plan


def measure(session: Session, batch: Any, allow: Numerics) -> dict[str, list[Option]]:
    """The options of every block by name, in the order in which the blocks run; keeping comes first.

    Blocks of one kind on inputs of one shape share a measurement. The session's step runs once; weights,
    buffers and random streams are given back.
    """
    calls: dict[str, _Call] = {}

    def around(block: Block, own: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
        if block.name not in calls:
            calls[block.name] = _Call(block, own, (arguments, keywords))
        return own(*arguments, **keywords)

    blocks = find_blocks(session.build.models)
    modules = [module for block in blocks for module in block.modules]
    instead = [function for block in blocks for function in forwards(block, around)]
    with patched(modules, "forward", instead):
        session.step(batch)
    known: dict[str, list[Option]] = {}
    for one in calls.values():
        if one.kind not in known:
            known[one.kind] = one.options(session, allow)
    return {name: known[one.kind] for name, one in calls.items()}


class _Call:
    """One call of one block, which can be repeated alone."""

    def __init__(self, block: Block, own: Callable[..., Any], inputs: Any) -> None:
        self.block, self.own = block, own
        self.inputs = map_tensors(inputs, lambda t: t.detach().requires_grad_(t.requires_grad))
        shapes = [(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors(self.inputs)]
        self.kind = f"{block.kind} {shapes}"

    def options(self, session: Session, allow: Numerics) -> list[Option]:
        """Keep, and whatever this device and promise allow."""
        build = session.build
        recomputer = Recomputer(build.device)
        plain = self._seconds(build.device, None)
        again = self._seconds(build.device, recomputer.around)
        whole = recomputer.released[self.block.name]
        found = [Option("keep", whole, whole, 0.0), Option("recompute", 0, whole, max(0.0, again - plain))]
        stores: dict[str, Store] = {}
        if allow >= Numerics.ROUNDING:
            stores["compress"] = Bfloat16Store(build, "compress_activations")
        if build.device.type == "cuda":
            stores["offload"] = HostStore(build, "offload_activations", 2**20)
        for word, store in stores.items():
            seconds = self._seconds(build.device, store.around)
            held = max(0, whole - store.spared[self.block.name])
            found.append(Option(word, held, whole, max(0.0, seconds - plain)))
        return found

    def _seconds(self, device: torch.device, around: Callable[..., Any] | None) -> float:
        """Median seconds of the block's forward and backward, once warm."""
        times = []
        for _ in range(REPEATS + 1):
            streams, buffers = (
                capture(device),
                [(b, b.clone()) for m in self.block.modules for b in m.buffers()],
            )
            begin = _now(device)
            arguments, keywords = self.inputs
            if around is None:
                result = self.own(*arguments, **keywords)
            else:
                result = around(self.block, self.own, arguments, keywords)
            ends = [t for t in tensors(result) if t.requires_grad]
            if ends:
                torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
            times.append(_now(device) - begin)
            restore(streams, device)
            for buffer, before in buffers:
                buffer.data.copy_(before)
            for tensor in (*tensors(self.inputs), *(p for m in self.block.modules for p in m.parameters())):
                tensor.grad = None
        return statistics.median(times[1:])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
