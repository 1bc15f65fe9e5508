"""Sentences of many lengths, padded to the longest of the batch; a scheduler, dropout and weight decay."""

import os
import random
import time

import torch
from torch import nn
from torch.utils.data import DataLoader

END = time.monotonic() + float(os.environ.get("PLANTED_SECONDS", "12"))
random.seed(0)
sentences = [(torch.randint(1, 500, (random.randrange(10, 60),)), random.randrange(4)) for _ in range(1024)]


def collate(items):
    tokens = nn.utils.rnn.pad_sequence([item[0] for item in items], batch_first=True)
    return {"tokens": tokens, "labels": torch.tensor([item[1] for item in items])}


class Words(nn.Module):
    """Embedding, convolutions over words, dropout."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(500, 128, padding_idx=0)
        self.near, self.far = nn.Conv1d(128, 256, 3, padding=1), nn.Conv1d(128, 256, 5, padding=2)
        self.drop, self.out = nn.Dropout(0.3), nn.Linear(512, 4)

    def forward(self, tokens):
        x = self.embed(tokens).transpose(1, 2)
        both = torch.cat([self.near(x).relu().amax(2), self.far(x).relu().amax(2)], dim=1)
        return self.out(self.drop(both))


model = Words()
optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
loader = DataLoader(sentences, batch_size=64, shuffle=True, collate_fn=collate)
while time.monotonic() < END:
    for batch in loader:
        loss = nn.functional.cross_entropy(model(batch["tokens"]), batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if time.monotonic() > END:
            break
