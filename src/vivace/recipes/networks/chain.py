"""A linear-chain conditional random field (Lafferty et al., 2001) above a network's scores of tags."""

from __future__ import annotations

import torch
from torch import nn


class Chain(nn.Module):
    """Scores of tags that stand beside each other, learned with the network below.

    Scores of a batch are (batch, length, tags), tags (batch, length), and `there` (batch, length) is true
    where a sentence has a character; each has one at least, and all of them come before its padding.
    """

    def __init__(self, num_tags: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(num_tags))
        self.last = nn.Parameter(torch.zeros(num_tags))
        self.steps = nn.Parameter(torch.zeros(num_tags, num_tags))  # from a tag, to a tag

    def surprise(self, scores: torch.Tensor, tags: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        """Minus the logarithm of the probability of `tags`: (batch,), in nats for a whole sentence."""
        return self.total(scores, there) - self.score(scores, tags, there)

    def score(self, scores: torch.Tensor, tags: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        """The score of `tags`: (batch,)."""
        own = scores.gather(2, tags.unsqueeze(2)).squeeze(2) * there
        beside = self.steps[tags[:, :-1], tags[:, 1:]] * there[:, 1:]
        ends = tags.gather(1, there.sum(1, keepdim=True) - 1).squeeze(1)
        return own.sum(1) + beside.sum(1) + self.first[tags[:, 0]] + self.last[ends]

    def total(self, scores: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        """The logarithm of the summed exponentials of all sequences' scores: (batch,)."""
        reached = self.first + scores[:, 0]
        for place in range(1, scores.shape[1]):
            further = torch.logsumexp(reached.unsqueeze(2) + self.steps, dim=1) + scores[:, place]
            reached = torch.where(there[:, place, None], further, reached)
        return torch.logsumexp(reached + self.last, dim=1)

    @torch.no_grad()
    def best(self, scores: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        """The likeliest tags (Viterbi, 1967): (batch, length), of no meaning in the padding."""
        reached, came_from = self.first + scores[:, 0], []
        stay = torch.arange(scores.shape[2], device=scores.device).expand_as(reached)
        for place in range(1, scores.shape[1]):
            further, origin = (reached.unsqueeze(2) + self.steps).max(dim=1)
            inside = there[:, place, None]
            reached = torch.where(inside, further + scores[:, place], reached)
            came_from.append(torch.where(inside, origin, stay))
        tag = (reached + self.last).argmax(1, keepdim=True)
        found = [tag]
        for origin in reversed(came_from):
            tag = origin.gather(1, tag)
            found.append(tag)
        return torch.cat(found[::-1], dim=1)
