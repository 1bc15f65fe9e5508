"""Two ranks, of which one prepares its batches slowly: the other waits for it."""

import os
import sys
import time

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

END = time.monotonic() + float(os.environ.get("PLANTED_SECONDS", "12"))
torch.set_num_threads(1)
distributed.init_process_group("gloo")
rank = distributed.get_rank()
torch.manual_seed(rank)
model = DistributedDataParallel(nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
going = torch.ones(1)
while going.item():
    if rank == 1 and "--mended" not in sys.argv:
        time.sleep(0.01)
    x, y = torch.randn(64, 128), torch.randint(10, (64,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    going.fill_(float(time.monotonic() < END))
    distributed.all_reduce(going, distributed.ReduceOp.MIN)
distributed.destroy_process_group()
