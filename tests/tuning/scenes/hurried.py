"""The command line on a forked rank, whose search and whose children time in short blocks."""

import runpy
from pathlib import Path

SCENES = Path(__file__).parents[2] / "scenes"
runpy.run_path(str(SCENES / "hurried.py"))["hurry"]()
runpy.run_path(str(SCENES / "rank.py"))
