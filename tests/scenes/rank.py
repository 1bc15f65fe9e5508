"""The command line on a forked rank of torchrun, which leaves its process id in `process_RANK`."""

import os
import runpy
from pathlib import Path

import torch

from vivace.command.cli import main

runpy.run_path(str(Path(__file__).with_name("zygote.py")))
Path(f"process_{os.environ['RANK']}").write_text(f"{os.getpid()}\n")
torch.set_num_threads(1)
main()
