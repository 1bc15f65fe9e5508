"""Truncated backpropagation: the hidden state is carried from part to part, and detached."""

import os
import time

import torch
from torch import nn

END = time.monotonic() + float(os.environ.get("PLANTED_SECONDS", "12"))
text = torch.randint(60, (16, 3500))
embed, rnn, head = nn.Embedding(60, 64), nn.LSTM(64, 128, batch_first=True), nn.Linear(128, 60)
parameters = [*embed.parameters(), *rnn.parameters(), *head.parameters()]
optimizer = torch.optim.SGD(parameters, lr=1.0)
while time.monotonic() < END:
    state = None
    for start in range(0, 3400, 35):
        part = text[:, start : start + 36]
        output, state = rnn(embed(part[:, :-1]), state)
        state = tuple(s.detach() for s in state)
        loss = nn.functional.cross_entropy(head(output).flatten(0, 1), part[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.25)
        optimizer.step()
        if time.monotonic() > END:
            break
