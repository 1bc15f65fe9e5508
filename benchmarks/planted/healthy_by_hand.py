"""A language model whose weights are updated by hand, without an optimizer and without a loader."""

import time

import torch
from common import SECONDS, functional, nn


class Words(nn.Module):
    """Embedding, two layers of LSTM, a decoder."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(1000, 128), nn.Linear(128, 1000)
        self.recur = nn.LSTM(128, 128, 2)

    def forward(self, words, hidden):
        output, hidden = self.recur(self.embed(words), hidden)
        return self.out(output), hidden


text, model, rate = torch.randint(1000, (3500, 16)), Words(), 0.1
hidden = (torch.zeros(2, 16, 128), torch.zeros(2, 16, 128))
end, first = time.monotonic() + SECONDS, 0
while time.monotonic() < end:
    first = (first + 35) % 3465
    words, following = text[first : first + 35], text[first + 1 : first + 36]
    model.zero_grad()
    hidden = tuple(part.detach() for part in hidden)
    output, hidden = model(words, hidden)
    loss = functional.cross_entropy(output.view(-1, 1000), following.reshape(-1))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    for weight in model.parameters():
        weight.data.add_(weight.grad, alpha=-rate)
