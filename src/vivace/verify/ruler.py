"""The child's side of verification: lockstep and course of reference, shadows and plan, and the judgement."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from vivace.engine.opening import call, checked_step, first_batches, start
from vivace.engine.session import Session
from vivace.job import Job
from vivace.machine import Machine
from vivace.plan import Plan
from vivace.surgery import map_tensors
from vivace.technique import UNIT_ROUNDOFF, Numerics, Stage
from vivace.verify.displacement import Outcome, State, distances, identical
from vivace.verify.shadow import Rounding

LIMIT = 4.0  # envelopes, for figures over the whole model
LAYER_LIMIT = 12.0  # envelopes, for each of many layers
IMPLEMENTATION_FLAGS = ("fused", "foreach", "capturable", "differentiable")


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much to run: shadow seeds, snapshots along the course, lockstep steps from each, steps of the course."""

    seeds: int = 8
    snapshots: int = 3
    lockstep: int = 3
    course: int = 24
    course_seeds: int = 4

    def seconds(self, step_seconds: float) -> float:
        """About how long it takes; a shadow step costs about twice a plain one."""
        shadows = self.seeds * self.snapshots * self.lockstep + self.course_seeds * self.course
        plain = 2 * (self.snapshots * self.lockstep + self.course)
        return step_seconds * (2 * shadows + plain)

    @classmethod
    def within(cls, seconds: float | None, step_seconds: float) -> Effort:
        """The largest effort that fits into `seconds`, else the smallest there is."""
        efforts = [
            cls(),
            cls(course=12, course_seeds=3),
            cls(8, 2, 2, 8, 3),
            cls(6, 2, 2, 6, 2),
            cls(5, 2, 1, 4, 2),
        ]
        fitting = (e for e in efforts if seconds is None or e.seconds(step_seconds) <= seconds)
        return next(fitting, efforts[-1])


@dataclasses.dataclass
class Snapshot:
    """A point along the reference's run: model, optimizers, and the index of the next batch."""

    state: State
    optimizers: list[dict[str, Any]]
    position: int
    reference: Outcome | None = None
    decay: dict[str, float] = dataclasses.field(default_factory=dict)


class Ruler:
    """Serves `vivace.engine.launch.Child`: verifies plans of one job, keeping the reference and the shadows."""

    def __init__(self, job: Job, machine: dict[str, Any]) -> None:
        self.job = job
        self.machine = Machine.from_dict(machine)
        self.effort = Effort()
        self.batches: list[Any] = []
        self.snapshots: list[Snapshot] = []
        self.curve: list[float] = []
        self.end: State | None = None
        self.shadows: dict[
            tuple[float, bool], tuple[list[list[dict[str, float]]], list[list[float]], list[float]]
        ] = {}

    def prepare(self, seconds: float | None = None) -> dict[str, Any]:
        """Run the reference once, with snapshots at the start, the middle and late; `seconds` bound the effort."""
        begin = time.perf_counter()
        self.batches = first_batches(call(self.job, "data"), self.effort.course)
        with start(self.job, Plan(), self.machine) as trial:
            checked_step(trial, clone(self.batches[0]))
            before = time.perf_counter()
            self._step(trial, 0)
            self.effort = effort = Effort.within(seconds, time.perf_counter() - before)
        self.session = start(self.job, Plan(), self.machine)
        self.evaluation_batch = self.session.place(self.batches[-1])
        last = max(0, effort.course - effort.lockstep)
        marks = {round(i * last / max(1, effort.snapshots - 1)) for i in range(effort.snapshots)}
        torch.manual_seed(1)
        for position in range(effort.course):
            if position in marks:
                self.snapshots.append(self._snapshot(position))
            self.curve.append(self._step(self.session, position))
        self.end = state_of(self.session)
        for index, snapshot in enumerate(self.snapshots):
            snapshot.reference = self._lockstep(self.session, snapshot, seed=index)
        return {"seconds": time.perf_counter() - begin, "batches": len(self.batches)}

    def judge(self, plan: dict[str, Any]) -> dict[str, Any]:
        """Run a plan in lockstep and along the course; return the verdict's document (see `Verdict`)."""
        loaded = Plan.from_dict(plan)
        compiled = any(technique.card.stage == Stage.COMPILE for technique in loaded.techniques)
        with _equal_random_streams(compiled), start(self.job, loaded, self.machine) as session:
            promise = session.promise
            outcomes = [
                self._lockstep(session, s, seed=i, evaluate=False) for i, s in enumerate(self.snapshots)
            ]
            curve, end = self._course(session)
            roundoff = max(session.build.unit_roundoff, UNIT_ROUNDOFF["float32"])
        for outcome in outcomes:
            outcome.outputs = self._evaluate(outcome.after)
        document: dict[str, Any] = {
            "promise": promise.name.lower(),
            "steps": self.effort.course + self.effort.lockstep * len(self.snapshots),
            "seeds": self.effort.seeds,
            "curves": {"steps": list(range(len(curve))), "reference": self.curve, "plan": curve},
        }
        if promise == Numerics.EXACT:
            return {**document, **self._judge_exact(outcomes, curve)}
        same_streams = all(
            torch.equal(outcome.random_state, snapshot.reference.random_state)  # type: ignore[union-attr]
            for outcome, snapshot in zip(outcomes, self.snapshots, strict=True)
        )
        return {**document, **self._judge_rounding(outcomes, curve, end, roundoff, same_streams)}

    def _judge_exact(self, outcomes: list[Outcome], curve: list[float]) -> dict[str, Any]:
        different: list[str] = []
        for outcome, snapshot in zip(outcomes, self.snapshots, strict=True):
            assert snapshot.reference is not None
            different += identical(outcome, snapshot.reference)
        if curve != self.curve:
            different.append("loss curve")
        check = {"name": "bit-identical", "value": float(len(different)), "envelope": 0.0, "limit": 0.0}
        reason = f"promised to be bit-identical, and {different[0]} is not" if different else ""
        worst = math.inf if different else 0.0
        return {
            "kept": not different,
            "reason": reason,
            "loss_envelopes": worst,
            "displacement_envelopes": worst,
            "checks": [{**check, "kept": not different}],
        }

    def _judge_rounding(
        self, outcomes: list[Outcome], curve: list[float], end: State, roundoff: float, same_streams: bool
    ) -> dict[str, Any]:
        lockstep, courses, ends = self._shadow_runs(roundoff, same_streams)
        checks: list[dict[str, Any]] = []
        for index, (outcome, snapshot) in enumerate(zip(outcomes, self.snapshots, strict=True)):
            values = self._distances(outcome, snapshot)
            for name, value in values.items():
                envelope = math.sqrt(sum(run[name] ** 2 for run in lockstep[index]) / len(lockstep[index]))
                checks.append(
                    _check(f"{name}, from step {snapshot.position}", value, envelope, roundoff, name)
                )
        band = _band(self.curve, courses)
        drift = sum(abs(a - b) / w for a, b, w in zip(curve, self.curve, band, strict=True)) / len(curve)
        checks.append(
            {"name": "loss curve", "value": drift, "envelope": 1.0, "limit": LIMIT, "kept": drift <= LIMIT}
        )
        envelope = math.sqrt(sum(value**2 for value in ends) / len(ends))
        checks.append(_check("displacement of the course", self._apart(end), envelope, roundoff, "residual"))
        worst = max(checks, key=lambda check: check["score"] / check["limit"] if "score" in check else 0.0)
        broken = [check for check in checks if not check["kept"]]
        note = "" if same_streams else " (random streams differ: compared over seeds)"
        reason = _sentence(max(broken, key=lambda c: c.get("score", c["value"]))) if broken else ""
        shown = [c for c in checks if " of " not in c["name"] or not c["kept"] or c is worst]
        return {
            "kept": not broken,
            "reason": reason + note,
            "loss_envelopes": max(c.get("score", c["value"]) for c in checks if c["name"].startswith("loss")),
            "displacement_envelopes": max(
                c.get("score", 0.0) for c in checks if not c["name"].startswith("loss")
            ),
            "checks": shown[:200],
            "num_checks": len(checks),
            "curves": {
                "steps": list(range(len(curve))),
                "reference": self.curve,
                "plan": curve,
                "low": [a - LIMIT * w for a, w in zip(self.curve, band, strict=True)],
                "high": [a + LIMIT * w for a, w in zip(self.curve, band, strict=True)],
            },
        }

    def _shadow_runs(
        self, roundoff: float, same_streams: bool
    ) -> tuple[list[list[dict[str, float]]], list[list[float]], list[float]]:
        key = (roundoff, same_streams)
        if key in self.shadows:
            return self.shadows[key]
        lockstep: list[list[dict[str, float]]] = []
        for index, snapshot in enumerate(self.snapshots):
            runs = []
            for seed in range(self.effort.seeds):
                stream = index if same_streams else 1000 * (seed + 1) + index
                noise = Rounding(roundoff, seed=100 * index + seed)
                runs.append(
                    self._distances(
                        self._lockstep(self.session, snapshot, seed=stream, noise=noise), snapshot
                    )
                )
            lockstep.append(runs)
        courses, ends = [], []
        for seed in range(self.effort.course_seeds):
            stream = 1 if same_streams else 2000 + seed
            curve, end = self._course(self.session, noise=Rounding(roundoff, seed=9000 + seed), stream=stream)
            courses.append(curve)
            ends.append(self._apart(end))
        self.shadows[key] = lockstep, courses, ends
        return self.shadows[key]

    def _distances(self, outcome: Outcome, snapshot: Snapshot) -> dict[str, float]:
        assert snapshot.reference is not None
        return distances(outcome, snapshot.reference, snapshot.state, snapshot.decay, self.effort.lockstep)

    def _apart(self, end: State) -> float:
        assert self.end is not None
        begin = self.snapshots[0].state.parameters
        gap = sum(
            float((end.parameters[n] - t).double().square().sum()) for n, t in self.end.parameters.items()
        )
        way = sum(float((t - begin[n]).double().square().sum()) for n, t in self.end.parameters.items())
        return math.sqrt(gap / way) if way else math.inf if gap else 0.0

    def _snapshot(self, position: int) -> Snapshot:
        optimizers = [copy.deepcopy(o.state_dict()) for o in self.session.optimizers]
        return Snapshot(state_of(self.session), optimizers, position, decay=_decay_of(self.session))

    def _step(self, session: Session, position: int) -> float:
        loss = session.step(clone(self.batches[position % len(self.batches)]))
        return float(torch.as_tensor(loss).detach())

    def _lockstep(
        self,
        session: Session,
        snapshot: Snapshot,
        *,
        seed: int,
        noise: AbstractContextManager[Any] | None = None,
        evaluate: bool = True,
    ) -> Outcome:
        restore(session, snapshot)
        torch.manual_seed(seed)
        with noise or nullcontext():
            losses = [self._step(session, snapshot.position + i) for i in range(self.effort.lockstep)]
        random_state = torch.get_rng_state()
        after = state_of(session)
        return Outcome(losses, after, self._evaluate(after) if evaluate else torch.empty(0), random_state)

    def _course(
        self, session: Session, noise: AbstractContextManager[Any] | None = None, stream: int = 1
    ) -> tuple[list[float], State]:
        restore(session, self.snapshots[0])
        torch.manual_seed(stream)
        with noise or nullcontext():
            curve = [self._step(session, position) for position in range(self.effort.course)]
        return curve, state_of(session)

    def _evaluate(self, state: State) -> torch.Tensor:
        """The plain model's outputs on one batch in evaluation mode, with the weights and buffers of `state`."""
        models = self.session.build.models
        load_state(self.session, state)
        outputs: list[torch.Tensor] = []
        hooks = [model.register_forward_hook(_keep(outputs)) for model in models]
        modes = [(m, m.training) for model in models for m in model.modules()]
        try:
            for model in models:
                model.eval()
            torch.manual_seed(2)
            with torch.no_grad():
                self._call_for_outputs()
        finally:
            for module, mode in modes:
                module.training = mode
            for hook in hooks:
                hook.remove()
        return torch.cat(outputs) if outputs else torch.zeros(1)

    def _call_for_outputs(self) -> None:
        if self.job.loss is not None:
            self.job.loss(self.session.model, clone(self.evaluation_batch))


def _keep(outputs: list[torch.Tensor]) -> Callable[..., None]:
    def hook(module: Any, arguments: Any, output: Any) -> None:
        map_tensors(
            output, lambda t: outputs.append(t.detach().float().flatten()) if t.is_floating_point() else None
        )

    return hook


def clone(batch: Any) -> Any:
    """A copy of a batch's tensors, so that a step that edits its batch in place cannot change the next run."""
    return map_tensors(batch, torch.Tensor.clone)


def state_of(session: Session) -> State:
    """Copies of all parameters and buffers, in one memory order, by name."""
    parameters, buffers = {}, {}
    for index, model in enumerate(session.build.models):
        parameters.update({f"{index}.{n}": p.detach().clone() for n, p in model.named_parameters()})
        buffers.update({f"{index}.{n}": b.detach().clone() for n, b in model.named_buffers()})
    return State(parameters, buffers)


def load_state(session: Session, state: State) -> None:
    """Copy parameters and buffers back in place."""
    with torch.no_grad():
        for index, model in enumerate(session.build.models):
            for name, parameter in model.named_parameters():
                parameter.copy_(state.parameters[f"{index}.{name}"])
            for name, buffer in model.named_buffers():
                buffer.copy_(state.buffers[f"{index}.{name}"])


def restore(session: Session, snapshot: Snapshot) -> None:
    """Put a session back to a snapshot; a technique's choice of optimizer implementation stays."""
    load_state(session, snapshot.state)
    for optimizer, saved in zip(session.optimizers, snapshot.optimizers, strict=True):
        state = copy.deepcopy(saved)
        for group, mine in zip(state["param_groups"], optimizer.param_groups, strict=True):
            group.update({flag: mine[flag] for flag in IMPLEMENTATION_FLAGS if flag in mine})
        optimizer.load_state_dict(state)
        optimizer.zero_grad(set_to_none=True)


def _decay_of(session: Session) -> dict[str, float]:
    names = {id(p): f"{i}.{n}" for i, m in enumerate(session.build.models) for n, p in m.named_parameters()}
    groups = [group for optimizer in session.optimizers for group in optimizer.param_groups]
    return {
        names[id(p)]: float(group["lr"]) * float(group.get("weight_decay", 0.0))
        for group in groups
        for p in group["params"]
        if id(p) in names
    }


def _equal_random_streams(compiled: bool) -> AbstractContextManager[Any]:
    if not compiled:
        return nullcontext()
    from torch._inductor import config

    patched: AbstractContextManager[Any] = config.patch(fallback_random=True)
    return patched


def _check(name: str, value: float, envelope: float, roundoff: float, kind: str) -> dict[str, Any]:
    limit = LAYER_LIMIT if " of " in kind or kind.startswith("buffer ") else LIMIT
    floor = {"loss": 2.0**-22, "decay": 1e-3}.get(kind, 0.02 * roundoff)
    score = abs(value) / max(envelope, floor) if value else 0.0
    return {
        "name": name,
        "value": value,
        "envelope": envelope,
        "score": score,
        "limit": limit,
        "kept": score <= limit,
    }


def _band(reference: list[float], courses: list[list[float]]) -> list[float]:
    """Half a width of the envelope at every step: root mean square of the shadows' deviation, over 5 steps."""
    squares = [sum((c[i] - r) ** 2 for c in courses) / len(courses) for i, r in enumerate(reference)]
    smooth = []
    for i, r in enumerate(reference):
        window = squares[max(0, i - 2) : i + 3]
        smooth.append(max(math.sqrt(sum(window) / len(window)), 2.0**-22 * abs(r), 1e-12))
    return smooth


def _sentence(check: dict[str, Any]) -> str:
    score = check.get("score", check["value"])
    return f"{check['name']} is {score:.1f} envelopes from the reference, where at most {check['limit']:.0f} are rounding"
