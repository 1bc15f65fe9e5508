"""An LSTM with clipped gradients."""

import torch
from common import TensorDataset, fast, functional, nn, train


class Tagger(nn.Module):
    """An LSTM and a classifier."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(32, 128, batch_first=True)
        self.out = nn.Linear(128, 10)

    def forward(self, inputs):
        return self.out(self.lstm(inputs)[0][:, -1])


def step(model, optimizer, inputs, labels):
    optimizer.zero_grad()
    functional.cross_entropy(model(inputs), labels).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


data = TensorDataset(torch.randn(1024, 40, 32), torch.randint(10, (1024,)))
train(Tagger(), fast(data), step=step)
