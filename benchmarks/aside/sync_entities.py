"""Tagger; each step counts its true positives token by token in Python."""

import os
import sys
import time
from collections import Counter

import torch
from torch import nn

SECONDS = float(os.environ.get("PLANTED_SECONDS", "12"))


class Tagger(nn.Module):
    """A bidirectional LSTM over words."""

    def __init__(self, words=3000, tags=9, width=64):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.rnn = nn.LSTM(width, width, bidirectional=True, batch_first=True)
        self.out = nn.Linear(2 * width, tags)

    def forward(self, x):
        return self.out(self.rnn(self.embed(x))[0])


class Score:
    """Counts hits by tag."""

    def __init__(self):
        self.counts = Counter()

    def update(self, predicted, gold):
        if "--mended" in sys.argv:
            hit = predicted[predicted == gold]
            for tag, n in enumerate(torch.bincount(hit.flatten(), minlength=9).tolist()):
                self.counts["tp", tag] += n
            return
        for row_p, row_g in zip(predicted, gold, strict=True):
            for p, g in zip(row_p, row_g, strict=True):
                if p.item() == g.item():
                    self.counts["tp", p.item()] += 1
                else:
                    self.counts["fp", p.item()] += 1


model, score = Tagger(), Score()
optimizer = torch.optim.Adam(model.parameters())
criterion = nn.CrossEntropyLoss(ignore_index=-100)
words = torch.randint(3000, (1024, 24))
tags = words % 9
t, seen = time.time(), 0
while time.time() - t < SECONDS:
    order = torch.randperm(1024)
    for index in order.split(32):
        x, gold = words[index], tags[index]
        logits = model(x)
        loss = criterion(logits.flatten(0, 1), gold.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        score.update(logits.argmax(-1), gold)
        seen += len(x)
        if time.time() - t > SECONDS:
            break
print("samples/s", seen / (time.time() - t))
