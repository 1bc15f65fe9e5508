"""A pre-norm transformer (Vaswani et al., 2017, arXiv:1706.03762; Xiong et al., 2020, arXiv:2002.04745)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from vivace.errors import InputError

HEAD_WIDTH = 32


def check_width(width: int) -> None:
    """Raises InputError where a width cannot be cut into heads."""
    if width < HEAD_WIDTH or width % HEAD_WIDTH:
        raise InputError(f"width must be a multiple of {HEAD_WIDTH}, not {width}")


class Block(nn.Module):
    """Self-attention and a four times wider layer: (batch, length, width) -> the same shape.

    `mask` is (batch, 1, 1, length), true where there is a token; None lets all be seen.
    """

    def __init__(self, width: int, *, causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = width // HEAD_WIDTH
        self.causal, self.dropout = causal, dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.wide_norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """The hidden states behind attention and the two layers, in the input's shape."""
        parts = self.query_key_value(self.attention_norm(hidden)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=self.causal
        )
        seen = self.attention_output(seen.transpose(1, 2).flatten(2))
        hidden = hidden + functional.dropout(seen, self.dropout, self.training)
        wide = self.narrow(functional.gelu(self.wide(self.wide_norm(hidden))))
        return hidden + functional.dropout(wide, self.dropout, self.training)


class Transformer(nn.Module):
    """Tokens (batch, length) -> hidden states (batch, length, width). Token 0 is padding where not causal."""

    def __init__(
        self, num_tokens: int, length: int, width: int, depth: int, *, causal: bool, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.causal = causal
        self.tokens = nn.Embedding(num_tokens, width)
        self.positions = nn.Embedding(length, width)
        blocks = [Block(width, causal=causal, dropout=dropout) for _ in range(depth)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        for block in blocks:  # GPT-2's: what flows along the residual path stays of one size
            for last in (block.attention_output, block.narrow):
                nn.init.normal_(last.weight, std=0.02 / (2 * depth) ** 0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The hidden states after the last norm."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.tokens(tokens) + self.positions(places)
        mask = None if self.causal else (tokens != 0)[:, None, None, :]
        for block in self.blocks:
            hidden = block(hidden, mask)
        normal: torch.Tensor = self.norm(hidden)
        return normal
