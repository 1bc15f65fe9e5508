"""The model asks for a value in the middle of its forward pass: the graph breaks at each of them."""

import torch
from common import MENDED, fast, mlp, nn, rows, train


class Blocks(nn.Module):
    """Small layers with a question between them."""

    def __init__(self):
        super().__init__()
        self.first = mlp(64, 2)
        self.second, self.third = nn.Linear(10, 10), nn.Linear(10, 10)

    def ask(self, values):
        if not MENDED and values.sum().item() > 1e9:
            print("large")
        return values

    def forward(self, inputs):
        values = self.ask(self.first(inputs))
        values = self.ask(self.second(values).relu())
        return self.ask(self.third(values).relu())


train(torch.compile(Blocks(), backend="aot_eager"), fast(rows()))
