"""The model asks for a value in the middle of its forward pass: the graph breaks in each block."""

import torch
from common import MENDED, fast, mlp, nn, rows, train


class Blocks(nn.Module):
    """Small layers with a question between them."""

    def __init__(self):
        super().__init__()
        self.first = mlp(64, 2)
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(6))

    def forward(self, inputs):
        values = self.first(inputs)
        for layer in self.layers:
            values = layer(values).relu()
            if not MENDED and values.sum().item() > 1e9:
                print("large")
        return values


train(torch.compile(Blocks(), backend="aot_eager"), fast(rows()))
