"""Attention over nothing but padding: softmax of a row of minus infinities."""

import math
import os
import sys
import time

import torch
from torch import nn

END = time.monotonic() + float(os.environ.get("PLANTED_SECONDS", "12"))


class Attention(nn.Module):
    """One head with a padding mask."""

    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(50, 64), nn.Linear(64, 192), nn.Linear(64, 5)

    def forward(self, tokens):
        query, key, value = self.qkv(self.embed(tokens)).chunk(3, dim=-1)
        scores = query @ key.transpose(1, 2) / math.sqrt(64)
        scores = scores.masked_fill((tokens == 0)[:, None], -1e4 if "--mended" in sys.argv else -math.inf)
        return self.out((scores.softmax(dim=-1) @ value).mean(dim=1))


tokens, labels = torch.randint(1, 50, (1024, 24)), torch.randint(5, (1024,))
tokens[::7] = 0
model = Attention()
optimizer = torch.optim.Adam(model.parameters())
while time.monotonic() < END:
    for rows in torch.arange(1024).split(32):
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(tokens[rows]), labels[rows]).backward()
        optimizer.step()
