"""Runs the command line in a forked child; the global SCENE holds arguments, folder, environment and
files for output and errors.
"""

import os
import runpy
import sys
from pathlib import Path

scene = globals()["SCENE"]
os.environ.update(scene["environment"])
os.chdir(scene["folder"])
for number, path in enumerate(scene["written"], 1):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
sys.argv = ["vivace", *scene["arguments"]]

import torch  # noqa: E402

from vivace.command.cli import main  # noqa: E402

runpy.run_path(str(Path(__file__).with_name("zygote.py")))
torch.set_num_threads(1)
main()
