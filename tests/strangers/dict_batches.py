"""Two towers; every batch is a dict that also carries strings and nested lists."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import vivace


class Pairs(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(3)
        self.users = torch.randn(256, 24, generator=g)
        self.items = torch.randn(256, 24, generator=g)

    def __len__(self):
        return 256

    def __getitem__(self, i):
        return {
            "id": f"row-{i}",
            "user": {"dense": self.users[i], "age": float(i % 7)},
            "items": [self.items[i], self.items[(i + 1) % 256]],
            "clicked": (self.users[i] @ self.items[i] > 0).float(),
        }


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Sequential(nn.Linear(25, 128), nn.GELU(), nn.Linear(128, 64))
        self.item = nn.Sequential(nn.Linear(24, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, batch):
        age = batch["user"]["age"].float().unsqueeze(1)
        user = self.user(torch.cat([batch["user"]["dense"], age], 1))
        return sum((user * self.item(item)).sum(1) for item in batch["items"])


job = vivace.Job(
    model=Towers,
    data=lambda: DataLoader(Pairs(), batch_size=32, shuffle=True),
    loss=lambda model, batch: nn.functional.binary_cross_entropy_with_logits(model(batch), batch["clicked"]),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    epochs=3,
)
