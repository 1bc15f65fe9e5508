# ruff: noqa: RUF001 - the figures stand here as a reader sees them

import dataclasses
import time
import types

import pytest

import vivace
from vivace.ledger import Profile, Ratio, Trial
from vivace.plan import Plan
from vivace.technique import Numerics
from vivace.tuning.loading import sentence
from vivace.tuning.search import Search

LIMIT = "2 cores can load 410 samples a second, the step consumes 1,900: no number of workers can feed it"


def trial(techniques, estimate):
    ratio = Ratio(estimate, estimate - 0.05, estimate + 0.05) if estimate else None
    names = {"plan_id": "p", "machine": "m", "job": "j", "promise": "exact"}
    pairs = ((0.1, 0.1 / estimate),) * 3 if estimate else ()
    status, reason = ("measured", "") if estimate else ("refused", "no")
    return Trial(techniques=techniques, status=status, ratio=ratio, pairs=pairs, reason=reason, **names)


@pytest.mark.parametrize(
    ("tried", "told"),
    [
        ([], "nothing against it was measured by itself"),
        ([({"bf16_autocast": {}}, 3.0)], "nothing against it was measured by itself"),
        (
            [({"loader_workers": {}}, 0.9), ({"decoded_cache": {}}, None)],
            "none of what was measured against it",
        ),
        (
            [
                ({"jpeg_decoder": {}}, 1.2),
                ({"decoded_cache": {}}, 1.3),
                ({"decoded_cache": {}, "bf16_autocast": {}}, 4.0),
                ({"loader_workers": {"num_workers": 1}}, 1.02),
                ({"decoded_cache": {}}, 1.4),
            ],
            "measured to help: decoded_cache 1.40×, jpeg_decoder 1.20×",
        ),
        (
            [
                ({"bf16_autocast": {}}, 2.0),
                ({"loader_workers": {"num_workers": 1}, "bf16_autocast": {}}, 3.0),
                ({"loader_workers": {}, "bf16_autocast": {}}, 2.02),
            ],
            "measured to help: loader_workers (num_workers=1) 1.50×",
        ),
    ],
)
def test_what_helps_stands_in_the_order_of_gain(tried, told):
    text = sentence(LIMIT, [trial(*one) for one in tried])
    assert text.startswith(LIMIT + "; " + told)
    assert sentence("", [trial(*one) for one in tried]) == ""


class Played:
    """A bench on which every plan has the ratio that a table says; it notes the order of plans."""

    base, allow, memory, trials, only_here = Plan(), Numerics.ROUNDING, None, (), ()
    reference = types.SimpleNamespace(step_seconds=0.1)

    def __init__(self, ratios):
        self.ratios, self.asked, self.observed, self.known = ratios, [], {"peak_bytes": 1}, {}

    def fits(self, peak_bytes):
        return True

    def refuse(self, plan, reason, code, predicted):
        return None

    def measure(self, plan, **options):
        self.asked.append(set(plan.names))
        estimate = max((self.ratios.get(name, 1.0) for name in plan.names), default=1.0)
        depth = plan.to_dict().get("loader_workers", {}).get("prefetch_factor", 2)
        estimate *= self.ratios.get(depth, 1.0)
        found = trial(plan.to_dict(), None if "uint8_transfer" in plan.names else estimate)
        names = {"plan_id": plan.id, "peak_bytes": 1, "warmup_seconds": 0.0}
        return dataclasses.replace(found, reason="uint8_transfer: no" if not found.ratio else "", **names)


@pytest.mark.parametrize(
    ("waiting", "ratios", "first"),
    [
        (0.6, {"decoded_cache": 1.5}, [{"uint8_transfer"}, {"decoded_cache"}]),
        (0.6, {"loader_workers": 1.5}, [{"uint8_transfer"}, {"decoded_cache"}, {"loader_workers"}]),
        (0.3, {"decoded_cache": 1.5}, []),
    ],
)
def test_a_step_that_waits_for_data_is_fed_first(waiting, ratios, first):
    shares = {"data": waiting, "place": 0.01, "forward": 0.0, "backward": 0.99 - waiting, "update": 0.0}
    facts = {"loader": {"is_dataloader": True, "num_workers": 0}, "epochs": 9, "num_threads": 1}
    profile = Profile("cpu", 0.1, shares, {"convolution": 0.9}, 9, 0, 10, 10, facts)
    bench = Played(ratios)
    Search(bench, profile, vivace.inspect(), end=time.monotonic() + 60, reserve=0.0).run()
    assert bench.asked[: len(first)] == first
    together = bench.asked[len(first)]
    assert {"decoded_cache", "loader_workers", "channels_last"} <= together
    assert ("uint8_transfer" in together) is not bool(first)


@pytest.mark.parametrize(
    ("ratios", "chosen", "asked"),
    [
        ({"loader_workers": 1.5, 4: 1.2}, 4, {2, 4, 8}),
        ({"loader_workers": 1.5, 4: 1.2, 8: 1.4}, 8, {2, 4, 8, 16}),
        ({"loader_workers": 1.5, 4: 1.03}, 2, {2, 4}),  # so much two processes of one plan differ
        ({"decoded_cache": 1.5, 4: 1.2}, None, {2}),
    ],
)
def test_the_depth_is_searched_once_workers_have_helped(ratios, chosen, asked):
    shares = {"data": 0.6, "place": 0.01, "forward": 0.0, "backward": 0.39, "update": 0.0}
    facts = {"loader": {"is_dataloader": True, "num_workers": 0}, "epochs": 9, "num_threads": 1}
    bench = Played(ratios)
    profile = Profile("cuda", 0.1, shares, {}, 9, 0, 10, 10, facts)
    search = Search(bench, profile, vivace.inspect(), end=time.monotonic() + 60, reserve=0.0)
    search.run()
    plans = [Plan.from_dict(trial.techniques).to_dict() for trial in search.measured.values()]
    depths = [plan["loader_workers"].get("prefetch_factor", 2) for plan in plans if "loader_workers" in plan]
    assert set(depths) == asked
    found = search.best.to_dict().get("loader_workers")
    assert (found if found is None else found.get("prefetch_factor", 2)) == chosen
