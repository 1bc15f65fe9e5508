import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def interpreted():
    """The cases that a script beside this file runs in Triton's interpreter, as ``(script, count) -> cases``.

    In a process of its own: Triton asks for its interpreter when a kernel is defined.
    """
    pytest.importorskip("triton")

    def cases(script, count):
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name(script)), "0", str(count)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "TRITON_INTERPRET": "1"},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(done.stdout)
        assert len(found) == count
        return found

    return cases
