"""Spectrogram classification; features lie in .npy shards, one row per sample is picked."""

import argparse
import os
import pathlib
import tempfile
import time

import numpy as np
import torch
from torch import nn
from torch.utils import data

SECONDS = float(os.environ.get("PLANTED_SECONDS", "12"))
p = argparse.ArgumentParser()
p.add_argument("--batch-size", type=int, default=16)
p.add_argument("--mended", action="store_true")
args = p.parse_args()

folder = pathlib.Path(tempfile.mkdtemp())
rng = np.random.default_rng(0)
for shard in range(6):
    np.save(folder / f"shard{shard}.npy", rng.standard_normal((256, 64, 100), dtype=np.float32))
    np.save(folder / f"label{shard}.npy", rng.integers(0, 8, 256))


class Spectrograms(data.Dataset):
    """Rows of shards on disk; each opens its whole shard."""

    def __init__(self, folder, per_shard=256):
        self.folder, self.per_shard = folder, per_shard
        self.shards = len(list(folder.glob("shard*.npy")))

    def __len__(self):
        return self.shards * self.per_shard

    def __getitem__(self, index):
        shard, row = divmod(index, self.per_shard)
        mode = "r" if args.mended else None
        features = np.load(self.folder / f"shard{shard}.npy", mmap_mode=mode)
        labels = np.load(self.folder / f"label{shard}.npy")
        return torch.tensor(np.array(features[row])), int(labels[row])


class Conv1dNet(nn.Module):
    """Two convolutions over time."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(64, 128, 5, padding=2),
            nn.ReLU(),
            nn.Conv1d(128, 128, 5, padding=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(128, 8)

    def forward(self, x):
        return self.head(self.body(x))


model = Conv1dNet()
opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 1000)
train = data.DataLoader(Spectrograms(folder), batch_size=args.batch_size, shuffle=True)
begin, seen = time.perf_counter(), 0
step = 0
while time.perf_counter() - begin < SECONDS:
    for x, y in train:
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        step += 1
        seen += len(x)
        if step % 20 == 0:
            print(f"step {step}: {loss.item():.4f}")
        if time.perf_counter() - begin > SECONDS:
            break
print("samples/s", seen / (time.perf_counter() - begin))
