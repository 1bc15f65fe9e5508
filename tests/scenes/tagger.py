"""Jobs of a small tagger of sentences: `packed` ones, or `padded` to one length."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import vivace

OUTSIDE = -100  # no tag of a word


class Tagger(nn.Module):
    """A tag of each word, by an LSTM in both directions."""

    def __init__(self, packs=True, kind=nn.LSTM):
        super().__init__()
        self.packs, self.words = packs, nn.Embedding(20, 12, padding_idx=0)
        self.layer, self.head = kind(12, 16, batch_first=True, bidirectional=True), nn.Linear(32, 4)

    def forward(self, words, lengths):
        x = self.words(words)
        if self.packs:
            x = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        found = self.layer(x)[0]
        if self.packs:
            found = pad_packed_sequence(found, batch_first=True, total_length=words.shape[1])[0]
        return self.head(found)


def batches(seed=0):
    random = torch.Generator().manual_seed(seed)
    lengths = [torch.randint(4, 12, (8,), generator=random) for _ in range(6)]
    words = [[torch.randint(1, 20, (n,), generator=random) for n in some.tolist()] for some in lengths]
    padded = [pad_sequence(some, batch_first=True) for some in words]
    return [
        (some, some.remainder(4).masked_fill(some == 0, OUTSIDE), n)
        for some, n in zip(padded, lengths, strict=True)
    ]


def loss(model, batch):
    words, tags, lengths = batch
    return F.cross_entropy(model(words, lengths).flatten(0, 1).float(), tags.flatten(), ignore_index=OUTSIDE)


def job_of(packs, kind=nn.LSTM):
    return vivace.Job(
        model=lambda: Tagger(packs, kind),
        data=batches,
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )


packed, padded = job_of(packs=True), job_of(packs=False)
