"""One sequence in sixty-four is sixteen times as long as the others."""

import torch
from common import MENDED, DataLoader, nn, train


class Reader(nn.Module):
    """Embedding, one layer of attention, a classifier."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(500, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.out = nn.Linear(64, 10)

    def forward(self, tokens):
        return self.out(self.layer(self.embed(tokens)).mean(1))


lengths = [1024 if number % 1024 == 700 and not MENDED else 64 for number in range(4096)]
samples = [(torch.randint(500, (length,)), number % 10) for number, length in enumerate(lengths)]


def collate(items):
    tokens = nn.utils.rnn.pad_sequence([tokens for tokens, _ in items], batch_first=True)
    return tokens, torch.tensor([label for _, label in items])


train(Reader(), DataLoader(samples, batch_size=16, collate_fn=collate))
