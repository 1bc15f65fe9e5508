"""Text is split and looked up word by word, every epoch again."""

import os
import re
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

END = time.monotonic() + float(os.environ.get("PLANTED_SECONDS", "12"))
TEXT = ("the quick brown fox jumps over the lazy dog, and then it sleeps; " * 40)[:2000]


class Reviews(Dataset):
    """Sentences and their labels."""

    def __init__(self):
        self.words = {word: number for number, word in enumerate(sorted(set(re.findall(r"\w+", TEXT))))}
        self.ready = [self.encode(index) for index in range(64)] if "--mended" in sys.argv else None

    def __len__(self):
        return 1024

    def encode(self, index):
        found = re.findall(r"\w+", TEXT[index % 64 :].lower())
        return torch.tensor([self.words.get(word, 0) for word in found[:300]])

    def __getitem__(self, index):
        return (self.ready[index % 64] if self.ready else self.encode(index)), index % 2


model = nn.Sequential(nn.EmbeddingBag(100, 64), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 2))
optimizer = torch.optim.Adam(model.parameters())
while time.monotonic() < END:
    for words, labels in DataLoader(Reviews(), batch_size=32, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(words), labels).backward()
        optimizer.step()
        if time.monotonic() > END:
            break
