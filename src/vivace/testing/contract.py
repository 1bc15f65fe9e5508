"""The contract that every technique keeps, as checks of a short run against the reference's."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import nn

from vivace.errors import Refused
from vivace.inspection import inspect
from vivace.job import Job
from vivace.ledger import Observation, Profile
from vivace.observing.observe import observe
from vivace.operators import CLASSES
from vivace.plan import Plan
from vivace.session.opening import start, training_device
from vivace.session.session import Session
from vivace.technique import Numerics, Stage, Technique
from vivace.testing.jobs import TINY_JOBS
from vivace.verifying.states import repeatable
from vivace.verifying.tap import random_state

STEPS = 3
LOOSEST_FP32 = 1e-3
ROUNDOFFS = 32
OTHER_DROPOUT = 0.3
CAN_DROP = (nn.modules.dropout._DropoutNd, nn.MultiheadAttention)


@dataclasses.dataclass(frozen=True)
class Course:
    """What a few steps of a job did under a plan, and what was left afterwards."""

    losses: list[float]
    gradient_norms: list[float] | None  # None where a captured step cannot be looked into
    gradients_left: list[str]
    shared_with_copies: list[str]
    random_state: torch.Tensor
    state: dict[str, torch.Tensor]
    flags_before: dict[str, Any]
    flags_after: dict[str, Any]
    numerics: Numerics
    unit_roundoff: float
    drops: bool


def follow(job: Job, plan: Plan) -> Course:
    """Train a job for `STEPS` steps under `plan`, from seed 0. Raises `Refused` where the plan declines."""
    norms: list[float] = []
    flags = process_flags()
    try:
        watched = job if _captures(plan) else _recording(job, norms)
        with start(watched, plan, inspect()) as session, _same_dropout(plan):
            streams = random_state()
            losses, left = [], []
            for batch in islice(session.batches(job.data()), STEPS):
                losses.append(float(session.step(batch)))
                if not session.build.own_step:
                    left += _with_gradients(session.build.model)
            shared = [] if session.build.own_step else _trained_by_a_copy(job, session, batch)
    except Refused:
        assert process_flags() == flags, "a refusal left process flags behind"
        raise
    models = session.build.models
    return Course(
        losses=losses,
        gradient_norms=norms if watched is not job else None,
        gradients_left=left,
        shared_with_copies=shared,
        random_state=streams,
        state={f"{i}.{k}": v for i, model in enumerate(models) for k, v in model.state_dict().items()},
        flags_before=flags,
        flags_after=process_flags(),
        numerics=session.build.numerics,
        unit_roundoff=session.build.unit_roundoff,
        drops=any(isinstance(m, CAN_DROP) for model in models for m in model.modules()),
    )


def process_flags() -> dict[str, Any]:
    """The process-wide settings that a session must leave as it found them."""
    backends: Any = torch.backends
    precisions = {
        f"{name}.{kind}": getattr(getattr(owner, kind), "fp32_precision", None)
        for name, owner in (("cuda", backends.cuda), ("cudnn", backends.cudnn), ("mkldnn", backends.mkldnn))
        for kind in ("matmul", "conv", "rnn")
        if hasattr(owner, kind)
    }
    return {
        **precisions,
        "num_threads": torch.get_num_threads(),
        "default_dtype": torch.get_default_dtype(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn.benchmark": backends.cudnn.benchmark,
        "cudnn.deterministic": backends.cudnn.deterministic,
        "grad_enabled": torch.is_grad_enabled(),
        "autocast": [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")],
    }


def flags_are_restored(course: Course, reference: Course) -> None:
    """Every process-wide setting is back where it was."""
    assert course.flags_after == course.flags_before


def randomness_is_untouched(course: Course, reference: Course) -> None:
    """Applying the plan drew nothing from torch's random stream."""
    assert torch.equal(course.random_state, reference.random_state), "apply() drew random numbers"


def state_is_the_persons(course: Course, reference: Course) -> None:
    """The state dict after closing has the person's own keys and dtypes."""
    shapes = [
        {key: (value.dtype, value.shape) for key, value in c.state.items()} for c in (course, reference)
    ]
    assert shapes[0] == shapes[1]


def gradients_are_cleared(course: Course, reference: Course) -> None:
    """All gradients are None after a step."""
    assert not course.gradients_left, f"gradients after the step: {course.gradients_left}"


def copies_are_their_own(course: Course, reference: Course) -> None:
    """A deep copy of the model, as for averaged weights, computes with its own parameters."""
    shared = course.shared_with_copies
    assert not shared, f"a copy of the model computes with the person's {', '.join(shared)}"


def gradients_are_true(course: Course, reference: Course) -> None:
    """`on_gradients` saw the unscaled gradients of the mean loss, within the promise."""
    if course.gradient_norms is not None and reference.gradient_norms is not None:
        _compare("gradient norms", course, course.gradient_norms, reference.gradient_norms)


def promise_is_kept(course: Course, reference: Course) -> None:
    """The losses are the reference's within the promise; under EXACT the weights too, bit for bit."""
    _compare("losses", course, course.losses, reference.losses)
    if course.numerics == Numerics.EXACT:
        for key, value in reference.state.items():
            assert torch.equal(course.state[key], value), f"EXACT, but '{key}' differs"


CHECKS = (
    flags_are_restored,
    randomness_is_untouched,
    state_is_the_persons,
    gradients_are_cleared,
    copies_are_their_own,
    gradients_are_true,
    promise_is_kept,
)


def check(plan: Plan, name: str) -> str:
    """Hold `plan` against the contract on one of the tiny jobs; returns the reason of a refusal, else ''."""
    return _hold(plan, TINY_JOBS[name], CHECKS)


def variants(technique: type[Technique]) -> list[Technique]:
    """The default settings, and those that the technique proposes for an ordinary job on this machine."""
    proposed = [technique(), *technique.candidates(plain_profile(), inspect())]
    return list(dict.fromkeys(proposed))


def plain_profile() -> Profile:
    """The profile of a job in which everything takes some time."""
    return Profile(
        device=training_device(inspect()).type,
        step_seconds=0.01,
        shares={"data": 0.2, "place": 0.1, "forward": 0.2, "backward": 0.4, "update": 0.1},
        operator_shares=dict.fromkeys(CLASSES, 1 / len(CLASSES)),
        num_operators=500,
        page_faults=1000.0,
        parameter_bytes=10_000,
        peak_bytes=1_000_000,
        features={
            **dict.fromkeys(("batch_norm", "convolution_2d", "recurrent", "dropout"), True),
            "batch_size": 16,
            "dtype": "float32",
            "optimizer": "Adam",
            "num_parameters": 2_500,
            "num_threads": torch.get_num_threads(),
            "own_step": False,
            "loader": {"is_dataloader": True, "num_workers": 0, "batch_size": 16, "dataset_length": 64},
        },
    )


class TechniqueContract:
    """What every technique keeps: set `technique`, and `jobs` where the tiny ones do not suit it."""

    technique: ClassVar[type[Technique]]
    jobs: ClassVar[dict[str, Callable[[], Job]]] = TINY_JOBS

    def test_card_is_complete(self) -> None:
        """The card says what the technique does, where it comes from, and how coarse it is."""
        card = self.technique.card
        assert card.summary
        assert card.source.startswith("https://")
        assert card.devices
        assert set(card.measured_on) <= set(card.devices)
        assert (card.unit_roundoff > 0) == (card.numerics >= Numerics.ROUNDING)
        assert dataclasses.is_dataclass(self.technique)

    def test_settings_survive_the_plan_file(self) -> None:
        """Every proposed setting is read back as it was written."""
        for variant in variants(self.technique):
            plan = Plan([variant])
            (again,) = Plan.loads(plan.dumps()).techniques
            assert again == variant

    def test_gain_is_an_interval(self) -> None:
        """The bounds are finite, positive, and in order."""
        low, high = self.technique.gain(plain_profile(), inspect())
        assert 0 < low <= high < math.inf

    def test_acts_within_its_promise_or_refuses(self) -> None:
        """On every job and with every proposed setting, the whole contract or a reason."""
        for variant in variants(self.technique):
            for build_job in self.jobs.values():
                _hold(Plan([variant]), build_job, CHECKS)

    def test_confirms_with_evidence_or_refuses(self) -> None:
        """`confirm` returns a sentence, or refuses with one."""
        import pytest

        evidence: list[str] = []
        reasons: list[str] = []
        for variant in variants(self.technique):
            for build_job in self.jobs.values():
                try:
                    seen = _observed(build_job, Plan([variant]))
                    evidence.append(variant.confirm(seen, _reference_observed(build_job)))
                except Refused as refused:
                    reasons.append(str(refused))
        assert all(text.strip() for text in [*evidence, *reasons])
        if not evidence:
            pytest.skip(f"{self.technique.name} refused every job here")


def _hold(plan: Plan, build_job: Callable[[], Job], checks: tuple[Callable[..., None], ...]) -> str:
    exact = plan.promise == Numerics.EXACT and training_device(inspect()).type == "cuda"
    try:
        with repeatable(exact):
            course = follow(build_job(), plan)
    except Refused as refused:
        reason = str(refused)
        assert any(reason.removeprefix(f"{name}: ") not in ("", reason) for name in plan.names), (
            f"a refusal must carry the technique's name and its reason: '{reason}'"
        )
        return reason
    for one in checks:
        one(course, _reference(build_job, exact))
    return ""


@cache
def _reference(build_job: Callable[[], Job], exact: bool) -> Course:
    with repeatable(exact):
        return follow(build_job(), Plan())


@cache
def _reference_observed(build_job: Callable[[], Job]) -> Observation:
    return _observed(build_job, Plan())


def _observed(build_job: Callable[[], Job], plan: Plan) -> Observation:
    job = build_job()
    with start(job, plan, inspect()) as session:
        return observe(session, list(islice(session.batches(job.data()), STEPS)))


def _with_gradients(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.grad is not None]


def _trained_by_a_copy(job: Job, session: Session, batch: Any) -> list[str]:
    """The person's parameters that the gradients of a deep copy reach."""
    model = session.build.model
    left = _with_gradients(model)
    assert job.loss is not None
    job.loss(copy.deepcopy(model), session.place(batch)).backward()
    return [name for name in _with_gradients(model) if name not in left]


def _captures(plan: Plan) -> bool:
    """Is the step replayed from a graph, in which nobody can read a number?"""
    return any(technique.card.stage == Stage.CAPTURE for technique in plan.techniques)


def _recording(job: Job, norms: list[float]) -> Job:
    """The job, with an `on_gradients` that notes the gradient's norm before the person's own runs."""
    if job.step is not None:
        return job

    def on_gradients(model: nn.Module) -> None:
        squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
        norms.append(float(torch.stack(squares).sum().sqrt()))
        if job.on_gradients is not None:
            job.on_gradients(model)

    return dataclasses.replace(job, on_gradients=on_gradients)


def _compare(what: str, course: Course, seen: list[float], wanted: list[float]) -> None:
    other_steps = course.numerics == Numerics.SEMANTICS and seen
    assert len(seen) == len(wanted) or other_steps, f"{what}: {len(seen)} instead of {len(wanted)}"
    assert all(map(math.isfinite, seen)), f"{what} not finite: {seen}"
    if course.numerics == Numerics.EXACT:
        assert seen == wanted, f"EXACT, but {what} differ: {seen}, reference {wanted}"
    elif course.numerics == Numerics.ROUNDING:
        # Another order or another generator of random numbers is another sample of the same dropout.
        allowed = OTHER_DROPOUT if course.drops else max(LOOSEST_FP32, ROUNDOFFS * course.unit_roundoff)
        for one, other in zip(seen, wanted, strict=True):
            assert abs(one - other) <= allowed * max(abs(other), 0.01), (
                f"{what} beyond {allowed:.2g}: {seen}, reference {wanted}"
            )


@contextmanager
def _same_dropout(plan: Plan) -> Iterator[None]:
    """Compiled code draws the random numbers that eager code draws, so that the two can be compared."""
    if not any(technique.card.stage == Stage.COMPILE for technique in plan.techniques):
        yield
        return
    import torch._inductor.config as inductor

    with inductor.patch(fallback_random=True):
        yield
