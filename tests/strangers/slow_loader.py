"""The loader is the bottleneck: every sample is decoded and filtered slowly, in the main process."""

import io

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import nn

import vivace


class Jpegs(torch.utils.data.Dataset):
    def __init__(self, count=96):
        rng = np.random.default_rng(0)
        self.files = []
        for i in range(count):
            pixels = (rng.random((96, 96, 3)) * 128 + (i % 4) * 30).astype(np.uint8)
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "JPEG")
            self.files.append(file.getvalue())

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        image = Image.open(io.BytesIO(self.files[i])).convert("RGB").filter(ImageFilter.GaussianBlur(2))
        image = image.resize((16, 16), Image.Resampling.LANCZOS)
        return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255, i % 4


job = vivace.Job(
    model=lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    ),
    data=lambda: torch.utils.data.DataLoader(Jpegs(), batch_size=8, shuffle=True, drop_last=True),
    loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    epochs=3,
)
