"""The tiny job, whose checkpoint of the fifth step hangs on its way to rank 0's disk."""

import os
import runpy
import time
from pathlib import Path

job = runpy.run_path(str(Path(__file__).with_name("tiny.py")))["make"]()
flush = os.fsync


def hangs(descriptor):
    if "step_5" in os.readlink(f"/proc/self/fd/{descriptor}"):
        time.sleep(1000)
    flush(descriptor)


if os.environ.get("RANK") == "0":
    os.fsync = hangs
