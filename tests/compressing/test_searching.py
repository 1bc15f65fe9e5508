"""The search on forms whose speeds are given: budget, interruption, a busy machine."""

import math
import time

import pytest

from vivace.compressing import finding, searching
from vivace.compressing.answering import answer
from vivace.compressing.journal import Journal
from vivace.compressing.result import Compressed, Tried
from vivace.errors import ChildFailed, Unsteady
from vivace.ledger import Ratio
from vivace.serving.forms import BY_NAME, FORMS

NAMES = ("eager_fp32", "openvino_fp32", "onnx_fp32", "eager_bf16", "openvino_int8")
SUBJECT = {
    "metric_name": "accuracy",
    "metric": 0.9,
    "samples": 70,
    "threads": 2,
    "model": "M",
    "num_parameters": 9,
}

LATE = "the budget ended while it was made"


class Given:
    """Stands for the bench: every form has a known speed, or whatever else is to happen."""

    def __init__(self, speeds):
        self.speeds, self.deadline, self.attempted, self.renewed = dict(speeds), 0.0, [], False
        self.facts = {"trained": {"plan": {}}}

    def attempt(self, form, *, by_size, best=None, brief=False):
        self.attempted.append(form.name)
        found = self.speeds[form.name]
        if isinstance(found, list):
            found = found.pop(0)
        if found is KeyboardInterrupt:
            raise KeyboardInterrupt
        if isinstance(found, str):
            status = "untried" if found == LATE else "unmeasured"
            return self._tried(form, status, reason=found, foreign_share=0.52)
        ratio = Ratio(found, 0.98 * found, 1.02 * found)
        return self._tried(form, "kept" if ratio.low > 1 else "refused", ratio=ratio, p50=1 / found)

    def confirmed(self, form, first):
        if self.speeds.get("again") is Unsteady:
            raise Unsteady("could not be measured", foreign_share=0.6)
        return first

    def beside(self, forms, batch):
        if batch == 32:
            raise KeyboardInterrupt
        return [(batch, self.deadline, *(form.name for form in forms))]

    def reference(self):
        return self._tried(BY_NAME["eager_fp32"], "kept", ratio=Ratio(1.0, 1.0, 1.0), p50=1.0)

    def renew(self):
        self.renewed = True

    def _tried(self, form, status, **found):
        return Tried(form.name, form.does, form.runtime, form.numbers, status, **found)


@pytest.fixture
def search(tmp_path, monkeypatch):
    """A function from known speeds to the search's result, told in words too."""
    monkeypatch.setattr("vivace.serving.forms._is_installed", lambda name: True)

    def run(speeds, seconds=1e6, known=(), every=False):
        bench, heard = Given(speeds), []
        journal = Journal(tmp_path / "forms.jsonl", {"batch": 1})
        journal.begin()
        forms = tuple(form for form in FORMS[1:] if form.name in NAMES)
        one = searching.Search(
            bench, forms, journal, lambda kind, payload: heard.append((kind, payload)),
            by_size=False, every=every, deadline=time.monotonic() + seconds,
        )  # fmt: skip
        tried = one.run(list(known))
        chosen = searching.choose(tried, by_size=False)
        whole = Compressed(
            "job", "latency", 1, 0.005, chosen.name, tuple(tried), SUBJECT, {}, (), 1.0, "",
            interrupted=one.interrupted, page_path="x/compress.html",
        )  # fmt: skip
        return bench, one, whole, heard

    return run


USUAL = {"openvino_fp32": 3.0, "onnx_fp32": 2.0, "eager_bf16": 0.8, "openvino_int8": 6.0}


def test_the_fastest_is_chosen_and_time_left_is_told(search):
    _, one, found, heard = search(USUAL)
    assert found.chosen == "openvino_int8"
    assert found.outcome == "better"
    left = [payload["left_seconds"] for kind, payload in heard if kind == "form_begin"]
    assert left == sorted(left, reverse=True)
    assert left[0] > 30
    assert {one.name for one in found.tried} == set(NAMES)
    assert not one.num_left


def test_a_busy_machine_is_an_answer_of_its_own(search):
    busy = "could not be measured (others used up to 52 % of the processor)"
    bench, _, found, _ = search(dict.fromkeys(USUAL, busy))
    assert found.outcome == "could_not_measure"
    assert found.exit_code == 1
    told = answer(found)
    assert "Could not be measured (others used up to 52 % of the processor)" in told.title
    assert "as fast" not in told.title
    assert told.tone == "open"
    assert sorted(bench.attempted) == sorted(2 * list(USUAL))  # once more each


def test_a_busy_machine_does_not_make_the_search_longer_than_it_may_be(search, monkeypatch):
    class Clock:
        now = time.monotonic()

        def monotonic(self):
            return self.now

    clock = Clock()

    def attempt(self, form, **options):
        clock.now += 25.0
        return real(self, form, **options)

    real = Given.attempt
    monkeypatch.setattr(searching, "time", clock)
    monkeypatch.setattr(Given, "attempt", attempt)
    bench, one, found, _ = search(dict.fromkeys(USUAL, "could not be measured"), seconds=30.0)
    assert len(bench.attempted) == 2
    assert found.outcome == "could_not_measure"
    assert one.num_left


def test_what_was_busy_first_is_measured_once_more(search):
    _, _, found, _ = search({**USUAL, "openvino_int8": ["could not be measured", 6.0]})
    assert found.chosen == "openvino_int8"


def test_the_best_that_cannot_be_confirmed_is_not_announced(search):
    _, _, found, _ = search({**USUAL, "again": Unsteady})
    assert found.chosen == "eager_fp32"
    assert found.outcome == "could_not_measure"


def test_a_short_budget_tries_one_form_and_says_so(search):
    bench, one, found, _ = search(USUAL, seconds=0.0)
    assert len(bench.attempted) == 1
    assert one.num_left
    untried = [each for each in found.tried if each.status == "untried"]
    assert len(untried) == 3
    assert {each.reason for each in untried} == {"the budget ended first"}
    (note,) = finding._ended(found.tried, one, 20.0)
    promising = len(one.order.worth_it())
    assert note.startswith(f"the budget of 20 s ended before {promising} of the untried forms")


def test_what_was_begun_as_the_budget_ended_is_among_what_is_left(search):
    _, one, found, _ = search({**USUAL, "openvino_int8": LATE})
    (note,) = finding._ended(found.tried, one, 20.0)
    assert note.startswith(f"the budget of 20 s ended before {len(one.order.worth_it()) + 1} of")


def test_ctrl_c_keeps_the_best_and_the_next_search_goes_on(search, tmp_path):
    bench, one, found, _ = search({**USUAL, "openvino_int8": KeyboardInterrupt})
    assert one.interrupted
    assert bench.renewed
    assert found.exit_code == 130
    kept = Journal(tmp_path / "forms.jsonl", {"batch": 1}).recall()
    assert found.chosen in {each.name for each in kept}
    bench, _, found, _ = search(USUAL, known=kept)
    assert not set(bench.attempted) & {each.name for each in kept}
    assert found.chosen == "openvino_int8"


def test_ctrl_c_before_anything_was_measured_is_just_that(search):
    with pytest.raises(KeyboardInterrupt):
        search(dict.fromkeys(USUAL, KeyboardInterrupt))


def test_what_the_others_make_unlikely_is_passed_over_unless_all_are_asked_for(search):
    speeds = {**USUAL, "openvino_fp32": 30.0}
    _, _, found, _ = search(speeds)
    (passed,) = (one for one in found.tried if one.name == "eager_bf16")
    assert passed.status == "untried"
    assert "by what the others gave" in passed.reason
    assert set(search(speeds, every=True)[0].attempted) == set(USUAL)


def test_what_is_announced_was_measured_in_fresh_processes(search, monkeypatch):
    """The best falls behind the second there, and so the second has its turn."""
    turns = []

    def confirmed(self, form, first):
        turns.append(form.name)
        return Ratio(2.5, 2.4, 2.6) if form.name == "openvino_int8" else first

    monkeypatch.setattr(Given, "confirmed", confirmed)
    _, _, found, _ = search(USUAL, every=True)
    assert turns == ["openvino_int8", "openvino_fp32"]
    assert found.chosen == "openvino_fp32"


def test_others_work_while_the_best_is_measured_again_does_not_make_it_give_way(search, monkeypatch):
    turns = []

    def confirmed(self, form, first):
        turns.append(form.name)
        if len(turns) < searching.ATTEMPTS:
            raise Unsteady("could not be measured", foreign_share=0.6)
        return first

    monkeypatch.setattr(Given, "confirmed", confirmed)
    assert search(USUAL)[2].chosen == "openvino_int8"
    assert turns == ["openvino_int8"] * searching.ATTEMPTS


def test_a_form_whose_fresh_process_dies_gives_way_to_the_next(search, monkeypatch):
    """And what was not worth its time beside it is tried then."""
    assert "openvino_fp32" not in search(USUAL)[0].attempted

    def confirmed(self, form, first):
        if form.name == "openvino_int8":
            raise ChildFailed("the process died from SIGSEGV")
        return first

    monkeypatch.setattr(Given, "confirmed", confirmed)
    bench, _, found, _ = search(USUAL)
    assert found.chosen == bench.attempted[-1] == "openvino_fp32"
    assert next(one for one in found.tried if one.name == "openvino_int8").status == "failed"


def test_the_best_is_timed_beside_torch_compile_and_the_plan_that_there_is(search):
    bench, one, found, heard = search(USUAL)
    (row,) = one.beside(list(found.tried), (8,))
    assert row[0] == 8
    assert row[2:] == ("compiled_default", "openvino_int8")
    assert row[1] < float("inf")  # so that what does not end is stopped
    assert heard[-1] == ("phase", {"name": "compiled_default, openvino_int8: 8 samples a call"})
    bench.facts["trained"]["plan"] = {"bf16_autocast": {}}
    rows = one.beside(list(found.tried), (1, 32, 64))
    assert [row[2:] for row in rows] == [("compiled_default", "trained_plan", "openvino_int8")]
    assert one.interrupted
    assert one.is_settled(list(found.tried))
    assert one.beside(list(found.tried), (8,)) == []


def test_what_trains_further_has_a_time_of_its_own(search):
    """And not what is left of the budget for trying forms."""
    bench, one, found, _ = search(USUAL, seconds=600.0)
    seen = []

    class Way:
        def tried(self, tried, best):
            seen.append((bench.deadline, best.name))

    one.train_further(list(found.tried), Way())
    assert seen == [(math.inf, "openvino_int8")]
