"""The training of sequences that some cases edit: a small transformer reads rows of digits."""

import dataclasses

import torch
from _pictures import job as pictures
from torch import nn
from torch.nn import functional

ROWS, WIDTH, HEADS = 8, 32, 4


class Reader(nn.Module):
    """Reads a picture row by row; `dropping` says when attention drops weights: as modules do by default."""

    def __init__(self, dropping=lambda module: module.training):
        super().__init__()
        self.embed = nn.Linear(ROWS, WIDTH)
        self.projections = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.mixes = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 10)
        self.dropping = dropping

    def forward(self, pictures):
        """Scores of the ten digits."""
        rows = self.embed(pictures[:, 0])
        for project, mix, norm in zip(self.projections, self.mixes, self.norms, strict=True):
            parts = project(norm(rows)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
            dropped = 0.1 if self.dropping(self) else 0.0
            seen = functional.scaled_dot_product_attention(*parts, dropout_p=dropped)
            rows = rows + mix(seen.transpose(1, 2).flatten(2))
        return self.head(rows.mean(1))


job = dataclasses.replace(
    pictures,
    model=Reader,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    on_gradients=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.5),
)
