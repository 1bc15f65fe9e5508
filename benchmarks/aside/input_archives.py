"""Every sample is a compressed archive on disk."""

import os
import sys
import tempfile
import time

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

END = time.monotonic() + float(os.environ.get("PLANTED_SECONDS", "12"))
folder = tempfile.mkdtemp()
for number in range(64):
    values = numpy.random.default_rng(number).normal(size=(3, 64, 64)).astype("float32")
    numpy.savez_compressed(f"{folder}/{number}.npz", x=values)


class Archives(Dataset):
    """One file a sample."""

    def __init__(self):
        self.kept = {}

    def __len__(self):
        return 640

    def __getitem__(self, index):
        name = f"{folder}/{index % 64}.npz"
        if "--mended" in sys.argv:
            if name not in self.kept:
                self.kept[name] = torch.from_numpy(numpy.load(name)["x"])
            return self.kept[name], index % 10
        return torch.from_numpy(numpy.load(name)["x"]), index % 10


net = nn.Sequential(nn.Conv2d(3, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.Flatten())
net = nn.Sequential(net, nn.LazyLinear(10))
net(torch.zeros(1, 3, 64, 64))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
loader = DataLoader(Archives(), batch_size=16, shuffle=True)
criterion = nn.CrossEntropyLoss()
while time.monotonic() < END:
    for x, y in loader:
        loss = criterion(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if time.monotonic() > END:
            break
