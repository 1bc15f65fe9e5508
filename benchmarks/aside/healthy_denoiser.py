"""An autoencoder with a learning curve, a validation every epoch and a checkpoint."""

import io
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

END = time.monotonic() + float(os.environ.get("PLANTED_SECONDS", "12"))
images = torch.rand(640, 1, 32, 32)
train, valid = DataLoader(TensorDataset(images[:512]), 32, shuffle=True), images[512:]
model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU(),
    nn.ConvTranspose2d(32, 32, 2, stride=2), nn.ReLU(), nn.Conv2d(32, 1, 3, padding=1),
)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
while time.monotonic() < END:
    total = 0.0
    for (clean,) in train:
        loss = nn.functional.mse_loss(model(clean + 0.1 * torch.randn_like(clean)), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        if time.monotonic() > END:
            break
    model.eval()
    with torch.no_grad():
        print(total / len(train), nn.functional.mse_loss(model(valid), valid).item(), flush=True)
    model.train()
    torch.save(model.state_dict(), io.BytesIO())
