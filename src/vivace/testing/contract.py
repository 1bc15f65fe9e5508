"""The contract that every technique keeps, as checks of a short run against the reference's."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import nn

from vivace.errors import Refused
from vivace.job import Batch, Job
from vivace.ledger import Observation, Profile
from vivace.observing.observe import observe
from vivace.operators import CLASSES
from vivace.plan import Plan
from vivace.session.opening import start, training_device
from vivace.session.session import Session
from vivace.technique import Numerics, Technique
from vivace.tensors.modules import DROPOUTS
from vivace.testing.fresh import STEPS, Bits, bits, difference, fresh_bits, this_machine
from vivace.testing.jobs import TINY_JOBS
from vivace.testing.leftovers import left_behind, process, random_streams
from vivace.testing.leftovers import process_flags as process_flags
from vivace.torch_internals import compiler
from vivace.verifying.states import repeatable

LOOSEST_FP32 = 1e-3
ROUNDOFFS = 32
OTHER_DROPOUT = 0.3
CAN_DROP = (*DROPOUTS, nn.MultiheadAttention)

_reported: list[str] = []  # what was left behind in this process; from then on it is compared with itself


@dataclasses.dataclass(frozen=True)
class Course:
    """What a few steps of a job did under a plan, and what was left afterwards."""

    losses: list[float]
    gradient_norms: list[float] | None  # None where a captured step cannot be looked into
    gradients_left: list[str]
    shared_with_copies: list[str]
    random_streams: dict[str, Any]  # once the plan is applied
    drawn_on_close: list[str]
    state: dict[str, torch.Tensor]
    numerics: Numerics
    unit_roundoff: float
    drops: bool


@dataclasses.dataclass(frozen=True)
class Reference:
    """What the reference did before a technique was opened, for comparison with it and with itself."""

    course: Course
    bits: Bits | None  # of a fresh process; None where two runs of the job differ even so


def follow(job: Job, plan: Plan) -> Course:
    """Train a job for `STEPS` steps under `plan`, from seed 0. Raises `Refused` where the plan declines."""
    norms: list[float] = []
    watched = job if _captures(plan) else _recording(job, norms)
    alike = compiler.equal_random_numbers() if plan.compiles else nullcontext()
    with start(watched, plan, this_machine()) as session, alike:
        streams = random_streams()
        losses, left = [], []
        for batch in islice(session.batches(job.data()), STEPS):
            losses.append(float(session.step(batch)))
            if not session.build.own_step:
                left += _with_gradients(session.build.model)
        shared = [] if session.build.own_step else _trained_by_a_copy(job, session, batch)
        before_close = random_streams()
        session.close()
        after_close = random_streams()
    models = session.build.models
    return Course(
        losses=losses,
        gradient_norms=norms if watched is not job else None,
        gradients_left=left,
        shared_with_copies=shared,
        random_streams=streams,
        drawn_on_close=[whose for whose, stream in before_close.items() if after_close[whose] != stream],
        state={f"{i}.{k}": v for i, model in enumerate(models) for k, v in model.state_dict().items()},
        numerics=session.build.numerics,
        unit_roundoff=session.build.unit_roundoff,
        drops=any(isinstance(m, CAN_DROP) for model in models for m in model.modules()),
    )


def randomness_is_untouched(course: Course, reference: Course) -> None:
    """Neither applying the plan nor closing the session drew from a random stream."""
    wanted = reference.random_streams
    drawn = [whose for whose, stream in course.random_streams.items() if stream != wanted[whose]]
    assert not drawn, f"apply() drew random numbers from {' and '.join(drawn)} stream"
    assert not course.drawn_on_close, (
        f"closing the session drew random numbers from {' and '.join(course.drawn_on_close)} stream"
    )


def state_is_the_persons(course: Course, reference: Course) -> None:
    """The state dict after closing has the person's own keys and dtypes."""
    shapes = [
        {key: (value.dtype, value.shape) for key, value in c.state.items()} for c in (course, reference)
    ]
    missing, added = shapes[1].keys() - shapes[0].keys(), shapes[0].keys() - shapes[1].keys()
    assert not missing, f"the state dict lacks {', '.join(sorted(missing))}"
    assert not added, f"the state dict has {', '.join(sorted(added))}, which the person's has not"
    for key, wanted in shapes[1].items():
        assert shapes[0][key] == wanted, f"'{key}' in the state dict is {shapes[0][key]}, not {wanted}"


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
    randomness_is_untouched,
    state_is_the_persons,
    gradients_are_cleared,
    copies_are_their_own,
    gradients_are_true,
    promise_is_kept,
)


def check(plan: Plan, name: str) -> str:
    """Hold `plan` against the contract on one of the tiny jobs; returns the reason of a refusal, else ''."""
    with _named(plan, name):
        return _hold(plan, TINY_JOBS[name])


def variants(technique: type[Technique]) -> list[Technique]:
    """The default settings, and those that the technique proposes for an ordinary job on this machine."""
    proposed = [technique(), *technique.candidates(plain_profile(), this_machine())]
    return list(dict.fromkeys(proposed))


def plain_profile() -> Profile:
    """The profile of a job in which everything takes some time."""
    return Profile(
        device=training_device(this_machine()).type,
        step_seconds=0.01,
        shares={"data": 0.2, "place": 0.1, "forward": 0.2, "backward": 0.4, "update": 0.1},
        operator_shares=dict.fromkeys(CLASSES, 1 / len(CLASSES)),
        num_operators=500,
        page_faults=1000.0,
        parameter_bytes=10_000,
        peak_bytes=1_000_000,
        features={
            **dict.fromkeys(
                ("batch_norm", "convolution_2d", "recurrent", "stepwise_recurrent", "dropout"), True
            ),
            "small_convolutions": 0.5,
            "winograd_convolutions": 0.5,
            "slow_depthwise": True,
            "mask_numbers": 100_000,
            "one_by_one": 1_000_000,
            "attention_scores": 1_000_000,
            "slow_attention": True,
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
        card, name = self.technique.card, self.technique.name
        assert card.summary, f"the card of {name} has no summary"
        assert card.source.startswith("https://"), f"the card of {name} names no https:// source"
        assert card.devices, f"the card of {name} names no device"
        strange = set(card.measured_on) - set(card.devices)
        assert not strange, f"the card of {name} is measured on {strange}, which are not among its devices"
        assert (card.unit_roundoff > 0) == (card.numerics >= Numerics.ROUNDING), (
            f"the card of {name} promises {card.numerics.name} with the unit roundoff {card.unit_roundoff}"
        )
        assert dataclasses.is_dataclass(self.technique), f"{name} is not a dataclass"

    def test_settings_survive_the_plan_file(self) -> None:
        """Every proposed setting is read back as it was written."""
        for variant in variants(self.technique):
            plan = Plan([variant])
            (again,) = Plan.loads(plan.dumps()).techniques
            assert again == variant, f"{variant} is read back from the plan file as {again}"

    def test_company_is_of_other_techniques(self) -> None:
        """What a setting is tried beside are plans that the setting can join."""
        for variant in variants(self.technique):
            for beside in variant.company(plain_profile(), this_machine()):
                assert self.technique.name not in beside, f"{variant} is to be tried beside itself"
                Plan([variant, *Plan.from_dict(beside).techniques])

    def test_gain_is_an_interval(self) -> None:
        """The bounds are finite, positive, and in order."""
        low, high = self.technique.gain(plain_profile(), this_machine())
        assert 0 < low <= high < math.inf, f"gain() of {self.technique.name} is from {low} to {high}"

    def test_acts_within_its_promise_or_refuses(self) -> None:
        """On every job and with every proposed setting, the whole contract or a reason.

        Afterwards the reference of every job gives the bits that it gives in a fresh process: what acts on
        one job may leave behind what only another one meets.
        """
        tried = variants(self.technique)
        before = {}
        for name, build_job in self.jobs.items():
            with _named(Plan([tried[0]]), name):
                before[name] = _bits_before(build_job, repr(process_flags()))
        for variant in tried:
            for name, build_job in self.jobs.items():
                with _named(Plan([variant]), name):
                    _hold(Plan([variant]), build_job)
        for name, build_job in self.jobs.items():
            with _named(Plan([tried[-1]]), name):
                _still(before[name], build_job, "a session on another job")

    def test_confirms_with_evidence_or_refuses(self) -> None:
        """`confirm` returns a sentence, or refuses with one. It is called while the session is open."""
        import pytest

        acted = False
        for variant in variants(self.technique):
            for name, build_job in self.jobs.items():
                with _named(Plan([variant]), name):
                    acted |= _confirmed(variant, build_job)
        if not acted:
            pytest.skip(f"{self.technique.name} refused every job here")


@contextmanager
def _named(plan: Plan, job_name: str) -> Iterator[None]:
    """Whatever fails inside names the techniques with their settings, and the job."""
    what = f"{' + '.join(map(_described, plan.techniques))} on the job '{job_name}'"
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error
    except Exception as error:
        error.add_note(what)
        raise


def _described(technique: Technique) -> str:
    settings = ", ".join(f"{key}={value!r}" for key, value in technique.settings().items())
    return f"{technique.name}({settings})"


def _hold(plan: Plan, build_job: Callable[[], Job]) -> str:
    exact = plan.promise == Numerics.EXACT and training_device(this_machine()).type == "cuda"
    if plan.compiles:
        _compile_once()
    reference = _reference(build_job, exact, repr(process_flags()))
    before, reason, refusing = process(), "", ""
    try:
        with repeatable(exact):
            course = follow(build_job(), plan)
    except Refused as refused:
        reason, refusing = str(refused), refused.technique
    _nothing_is_left(left_behind(before, process()), reference, build_job, reason)
    if reason:
        assert refusing in plan.names, f"a refusal must carry the technique's name: '{reason}'"
        assert len(reason) > len(f"{refusing}: "), f"a refusal must have a reason: '{reason}'"
        return reason
    for one in CHECKS:
        one(course, reference.course)
    return ""


def _nothing_is_left(
    left: list[str], reference: Reference, build_job: Callable[[], Job], reason: str
) -> None:
    """The process is as it was, and the reference run in it again gives the same bits."""
    who = f"the refusal ({reason})" if reason else "the closed session"
    if left:
        raise _left(f"{who} left behind: {'; '.join(left)}")
    _still(reference.bits, build_job, who)


def _still(wanted: Bits | None, build_job: Callable[[], Job], who: str) -> None:
    """The reference, run again in this process, gives the bits that it gave."""
    other = "" if wanted is None else difference(bits(build_job()), wanted)
    if other:
        raise _left(f"{who} left something behind: the reference, run again in this process, gives {other}")


def _left(text: str) -> AssertionError:
    """Something was left behind. It may still be there: what comes later is not blamed for it."""
    _reported.append(text)
    for kept in (_reference, _bits_before):
        kept.cache_clear()  # they no longer are what this process would compute
    return AssertionError(text)


@cache
def _compile_once() -> None:
    """torch's compiler patches torch when it is first used, and leaves it so: no technique does that."""
    # Where there is no compiler for it, the technique says so.
    with suppress(Exception):
        torch.compile(torch.neg)(torch.ones(2))


@cache
def _reference(build_job: Callable[[], Job], exact: bool, flags: str) -> Reference:
    """The reference's run, made before a technique is opened; once for the settings of the process."""
    with repeatable(exact):
        course = follow(build_job(), Plan())
    return Reference(course, _bits_before(build_job, flags))


@cache
def _bits_before(build_job: Callable[[], Job], flags: str) -> Bits | None:
    """The reference's bits before a technique is opened, which are those of a fresh process."""
    here, again = bits(build_job()), bits(build_job())
    if difference(again, here):
        return None
    wanted = None if _reported else fresh_bits(build_job)
    other = "" if wanted is None else difference(here, wanted)
    if other and training_device(this_machine()).type != "cuda":  # whose libraries choose by what is free
        raise _left(
            "before the session is opened, the reference gives in this process what it does not give in a "
            f"fresh one, {other}. Importing the technique, its candidates() or an earlier session left "
            "something behind"
        )
    return here


def _confirmed(technique: Technique, build_job: Callable[[], Job]) -> bool:
    """Did the technique act, by its own evidence? It is asked as the search asks: in the open session."""
    reference, job, acted = _reference_observed(build_job), build_job(), True
    try:
        with start(job, Plan([technique]), this_machine()) as session:
            text = technique.confirm(_observed(session, job), reference)
    except Refused as refused:
        text, acted = str(refused), False
    assert text.strip(), "confirm() returned no evidence" if acted else "it refused without a reason"
    return acted


@cache
def _reference_observed(build_job: Callable[[], Job]) -> Observation:
    job = build_job()
    with start(job, Plan(), this_machine()) as session:
        return _observed(session, job)


def _observed(session: Session, job: Job) -> Observation:
    return observe(session, list(islice(session.batches(job.data()), STEPS)))


def _with_gradients(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.grad is not None]


def _trained_by_a_copy(job: Job, session: Session, batch: Batch) -> list[str]:
    """The person's parameters that the gradients of a deep copy reach."""
    model = session.build.model
    left = _with_gradients(model)
    assert job.loss is not None
    job.loss(copy.deepcopy(model), session.place(batch)).backward()
    return [name for name in _with_gradients(model) if name not in left]


def _captures(plan: Plan) -> bool:
    """Is the step replayed from a graph, in which nobody can read a number?"""
    return any(technique.card.captures for technique in plan.techniques)


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
