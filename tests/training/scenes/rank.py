"""One rank of a torchrun launch: trains the long tiny job in the folder named by the first argument."""

import sys
from pathlib import Path

import torch

import vivace

torch.set_num_threads(1)
job = f"{Path(__file__).parent / 'tiny.py'}:long"
run = vivace.train(job, vivace.Plan.from_dict({"ddp": {}}), out=sys.argv[1])
sys.exit(run.exit_code)
