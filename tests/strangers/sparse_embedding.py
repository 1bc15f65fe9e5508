"""An embedding bag with sparse gradients and the optimizer that understands them."""

import torch
from torch import nn

import vivace

job = vivace.Job(
    model=lambda: nn.EmbeddingBag(500, 4, sparse=True, mode="mean"),
    data=lambda: [
        (torch.randint(500, (16, 6), generator=torch.Generator().manual_seed(i)), torch.arange(16) % 4)
        for i in range(6)
    ],
    loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda model: torch.optim.SparseAdam(list(model.parameters()), lr=1e-2),
)
