"""`scripts/bench verdicts`: gains are measured between runs that came to a result."""

import pytest
import verdicts


@pytest.mark.parametrize(
    ("mended", "again", "measured", "held"),
    [(200.0, 100.0, 2.0, True), (None, 100.0, 0.0, False), (200.0, None, 0.0, False)],
)
def test_a_run_that_failed_holds_no_gain(monkeypatch, mended, again, measured, held):
    speeds = [100.0, mended, again]

    def profile(name, seconds, *arguments, **environment):
        verdict = {"cause": "input", "evidence": "it waits", "gain": {"low": 1.5, "high": 400.0}}
        speed = speeds.pop(0)
        return {"verdicts": [verdict]} | ({} if speed is None else {"samples_per_second_in_all": speed})

    monkeypatch.setattr(verdicts, "profile", profile)
    row = verdicts.try_out("input_read", 4.0, True)
    assert row.measured == pytest.approx(measured)
    assert row.held is held
