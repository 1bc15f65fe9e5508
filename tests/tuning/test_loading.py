# ruff: noqa: RUF001 - the figures stand here as a reader sees them

import pytest

from vivace.ledger import Ratio, Trial
from vivace.tuning.loading import sentence

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
