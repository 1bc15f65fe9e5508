"""What changed nothing keeps every promise: a plan is verified once each technique proved that it acts."""

import dataclasses
from pathlib import Path

import pytest

import vivace
from vivace import Card, Numerics, Refused, Stage, Technique
from vivace.measuring import paired
from vivace.plan import Plan
from vivace.testing import jobs
from vivace.verifying.acting import WARM_SECONDS, WORKER
from vivace.verifying.verifier import Verifier

IDLE = Path(__file__).parents[1] / "scenes" / "idle.py"
IDLE_PLAN = "format = 1\n[techniques.planted_idle]\n"
NOTHING = "planted_idle: it changed nothing: every step is as before"


@pytest.fixture
def planted(register):
    """``(name, confirm, numerics) -> technique``: one that leaves the session as it is."""

    def made(name, confirm, numerics=Numerics.EXACT, apply=lambda build: None):
        body = {
            "card": Card(Stage.MODEL, numerics, "x", "x"),
            "name": name,
            "apply": lambda self, build: apply(build),
            "confirm": lambda self, seen, reference: confirm(seen, reference),
            "__annotations__": {},
        }
        return register(dataclasses.dataclass(frozen=True)(type(name, (Technique,), body)))()

    return made


def idles(seen, reference):
    raise Refused("it changed nothing: every step is as before")


def acts(seen, reference):
    same = sum(seen.operators.values()) == sum(reference.operators.values())
    return f"{'as many' if same else 'other'} operators ran"


@pytest.mark.parametrize(
    ("make", "options"),
    [(jobs.mlp, {}), (jobs.gan, {}), (jobs.mlp, {"metric": True, "margin": 0.1})],
    ids=["mlp", "own step", "metric"],
)
def test_an_exact_technique_that_changes_nothing_is_refused_before_anything_is_compared(
    planted, make, options
):
    job, heard = make(), []
    if options:
        job = dataclasses.replace(job, metric=lambda model, batches: 1.0)
    with pytest.raises(Refused) as refused:
        vivace.verify(job, Plan([planted("planted_idle", idles)]), **options, on_event=heard.append)
    assert str(refused.value) == NOTHING
    assert refused.value.technique == "planted_idle"
    assert {event.kind for event in heard} <= {"notice", "phase"}


@pytest.mark.parametrize("numerics", [Numerics.EXACT, Numerics.SEMANTICS], ids=lambda one: one.name)
def test_of_two_the_idle_one_is_named_whatever_it_promises(planted, numerics):
    job = dataclasses.replace(jobs.mlp(), metric=lambda model, batches: 1.0)
    plan = Plan([planted("planted_acting", acts), planted("planted_idle", idles, numerics)])
    with pytest.raises(Refused, match=f"^{NOTHING}$"):
        vivace.verify(job, plan)


def test_how_a_technique_acts_stands_among_the_details_and_took_of_the_budget(planted, monkeypatch):
    judge, left, found = Verifier.judge, [], []

    def judged(self, plan, *, seconds):
        left.append(seconds)
        found.append(judge(self, plan, seconds=seconds))
        return found[0]

    monkeypatch.setattr(Verifier, "judge", judged)
    verdict = vivace.verify(jobs.mlp(), Plan([planted("planted_acting", acts)]), budget=20)
    assert verdict.kept, verdict.reason
    assert verdict.details[0] == "planted_acting acts: as many operators ran"
    assert 0.0 <= left[0] < 20 - 2 * WARM_SECONDS
    assert verdict.seconds >= found[0].seconds + 20 - left[0]


def test_what_declines_to_begin_is_named_as_before(planted):
    def declines(build):
        build.require(False, "it never acts")

    with pytest.raises(Refused, match=r"^planted_idle: it never acts$"):
        vivace.verify(jobs.mlp(), Plan([planted("planted_idle", acts, apply=declines)]))


def test_it_asks_the_process_that_tune_asks():
    assert WORKER == paired.WORKER


def test_on_ranks_it_is_refused_once(command_on_ranks, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(f"{IDLE_PLAN}[techniques.ddp]\n")
    codes, errors = command_on_ranks("verify", f"{IDLE}:job", "--plan", str(plan))
    assert codes[0] == 2
    assert errors.count(NOTHING) == 1
