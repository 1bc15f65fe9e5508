"""Detection of rectangles: targets are lists of dicts of varying size, and a worker that keeps up."""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("PLANTED_SECONDS", "12"))


class Rectangles(Dataset):
    """Bright rectangles on noise."""

    def __len__(self):
        return 800

    def __getitem__(self, index):
        image, boxes = torch.rand(3, 96, 96) * 0.2, []
        for _ in range(int(torch.randint(1, 6, ()))):
            x, y = torch.randint(0, 72, (2,)).tolist()
            w, h = torch.randint(8, 24, (2,)).tolist()
            image[:, y : y + h, x : x + w] += torch.rand(3, 1, 1)
            boxes.append([x, y, w, h])
        return image, {"boxes": torch.tensor(boxes, dtype=torch.float32), "id": index}


def collate(batch):
    return [b[0] for b in batch], [b[1] for b in batch]


def c(i, o, s=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, s, 1), nn.GroupNorm(4, o), nn.SiLU())


class Detector(nn.Module):
    """A heat map of centres, and sizes."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(c(3, 32), c(32, 64, 2), c(64, 64), c(64, 128, 2), c(128, 128))
        self.heat, self.size = nn.Conv2d(128, 1, 1), nn.Conv2d(128, 2, 1)

    def forward(self, images, targets):
        features = self.body(torch.stack(images))
        heat, size = self.heat(features), self.size(features)
        goal, loss = torch.zeros_like(heat), 0.0
        for i, t in enumerate(targets):
            at = ((t["boxes"][:, :2] + t["boxes"][:, 2:] / 2) / 4).long()
            goal[i, 0, at[:, 1], at[:, 0]] = 1
            loss = loss + (size[i, :, at[:, 1], at[:, 0]].T - t["boxes"][:, 2:].log()).abs().mean() / len(
                targets
            )
        return {
            "heat": nn.functional.binary_cross_entropy_with_logits(heat, goal, pos_weight=torch.tensor(50.0)),
            "size": loss,
        }


if __name__ == "__main__":
    model = Detector()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    loader = DataLoader(
        Rectangles(), batch_size=8, shuffle=True, num_workers=1, collate_fn=collate, persistent_workers=True
    )
    begin = time.time()
    while time.time() - begin < SECONDS:
        for images, targets in loader:
            losses = model(images, targets)
            loss = sum(losses.values())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print({k: round(v.item(), 3) for k, v in losses.items()})
            if time.time() - begin > SECONDS:
                break
