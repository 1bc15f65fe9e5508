"""A job whose weights and optimizer state are most of its memory: several ranks may divide them."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import vivace

WIDTH, BLOCKS = 384, 4
torch.set_num_threads(1)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.outer(torch.relu(self.inner(x)))


def model():
    return torch.nn.Sequential(
        torch.nn.Linear(8, WIDTH), *(Block() for _ in range(BLOCKS)), torch.nn.Linear(WIDTH, 4)
    )


def data():
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(1)), batch_size=8)


job = vivace.Job(
    model=model,
    data=data,
    loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
    epochs=20,
)
