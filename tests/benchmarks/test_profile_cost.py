"""`scripts/bench profile_cost`: what it leaves behind where a script fails."""

import profile_cost
import pytest


def test_a_script_that_fails_leaves_no_stopped_process(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\nif 'VIVACE_PROFILE' not in os.environ: os._exit(3)\ntime.sleep(600)\n"
    )
    begun, start = [], profile_cost.start

    def noted(*given):
        begun.append(start(*given))
        return begun[-1]

    monkeypatch.setattr(profile_cost, "SCRIPT", script)
    monkeypatch.setattr(profile_cost, "start", noted)
    with pytest.raises(AssertionError, match="alone ended with 3"):
        profile_cost.in_turns(1, ("recorded", "alone"))
    assert [process.returncode for process in begun] == [-9, 3]
