"""Two ranks whose gradients are large and whose batches are small."""

import os

import torch
from common import MENDED, fast, mlp, rows, train
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
distributed.init_process_group("gloo")
torch.manual_seed(distributed.get_rank())
model = mlp(1024, 4)
if not MENDED:
    model = DistributedDataParallel(model)
train(model, fast(rows(), 4))
if os.environ["RANK"] == "0":
    print("done")
distributed.destroy_process_group()
