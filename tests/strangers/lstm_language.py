"""A character LSTM; the vocabulary is computed once, when the file is imported."""

import this as poem

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import vivace

text = "".join(poem.d.get(c, c) for c in poem.s)
vocabulary = sorted(set(text))
index = {c: i for i, c in enumerate(vocabulary)}
WINDOW = 32


class Windows(Dataset):
    def __init__(self):
        self.codes = torch.tensor([index[c] for c in text])

    def __len__(self):
        return len(self.codes) - WINDOW - 1

    def __getitem__(self, i):
        return self.codes[i : i + WINDOW], self.codes[i + 1 : i + WINDOW + 1]


class CharLSTM(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.embedding = nn.Embedding(size, 32)
        self.lstm = nn.LSTM(32, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, size)

    def forward(self, codes):
        hidden, _ = self.lstm(self.embedding(codes))
        return self.head(hidden)


def loss(model, batch):
    codes, following = batch
    return nn.functional.cross_entropy(model(codes).transpose(1, 2), following)


job = vivace.Job(
    model=lambda: CharLSTM(len(vocabulary)),
    data=lambda: DataLoader(Windows(), batch_size=16, shuffle=True, drop_last=True),
    loss=loss,
    optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=2e-3),
    epochs=2,
)
