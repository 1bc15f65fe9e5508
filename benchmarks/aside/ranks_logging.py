"""Two gloo ranks under DDP; rank 0 alone draws samples and writes statistics after each step."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SECONDS = float(os.environ.get("PLANTED_SECONDS", "12"))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 128))
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    data = TensorDataset(torch.randn(4096, 128))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64, sampler=sampler)
    t, seen, epoch, stop = time.time(), 0, 0, torch.zeros(1)
    while not stop.item():
        sampler.set_epoch(epoch)
        epoch += 1
        for (x,) in loader:
            loss = nn.functional.mse_loss(model(x), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += len(x) * world
            if rank == 0 and "--mended" not in sys.argv:
                with torch.no_grad():
                    for p in model.parameters():
                        torch.histc(p.flatten().double(), 200)
                        torch.linalg.svdvals(p if p.ndim == 2 else p[None])
            stop.fill_(float(time.time() - t > SECONDS))
            dist.broadcast(stop, 0)
            if stop.item():
                break
    if rank == 0:
        print("samples/s", seen / (time.time() - t))
    dist.destroy_process_group()


main()
