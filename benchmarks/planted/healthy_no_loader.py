"""Batches drawn by hand, without a DataLoader, and a validation now and then."""

import time

import torch
from common import SECONDS, functional, mlp

data, labels = torch.randn(8192, 256), torch.randint(10, (8192,))
model = mlp(1024, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
end, steps = time.monotonic() + SECONDS, 0
while time.monotonic() < end:
    chosen = torch.randint(8192, (128,))
    loss = functional.cross_entropy(model(data[chosen]), labels[chosen])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
    if steps % 200 == 0:
        model.eval()
        with torch.no_grad():
            print("accuracy", (model(data[:1024]).argmax(dim=1) == labels[:1024]).float().mean().item())
        model.train()
