"""A language model whose output layer is its embedding."""

import torch
from torch import nn

import vivace


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.mix = nn.GRU(32, 32, batch_first=True)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.mix(self.embedding(tokens))[0])


job = vivace.Job(
    model=Tied,
    data=lambda: torch.utils.data.DataLoader(torch.arange(320).reshape(64, 5) % 50, batch_size=16),
    loss=lambda model, batch: nn.functional.cross_entropy(
        model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
    ),
    optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-2),
)
