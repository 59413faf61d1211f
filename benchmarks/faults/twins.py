"""The torch side of the layers, as research code writes it."""

import math

import torch
from torch import Tensor, nn


class Attend(nn.Module):
    """Scores, mask, softmax, weighted sum: `(n, h, l, d)`; the mask says what may be seen."""

    def __init__(self, *, causal: bool = False):
        super().__init__()
        self.causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend."""
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if self.causal:
            seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
            scores = scores.masked_fill(~seen, -math.inf)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        return scores.softmax(-1) @ v


class Attention(nn.Module):
    """Self-attention with four projections, as in BERT and GPT."""

    def __init__(self, width: int, heads: int, *, causal: bool = False, bias: bool = True):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=bias) for _ in range(4))
        self.attend = Attend(causal=causal)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend among the tokens of `x`, `(n, l, width)`."""
        n, length, width = x.shape
        q, k, v = (layer(x).reshape(n, length, self.heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return self.out(self.attend(q, k, v, mask).transpose(1, 2).reshape(n, length, width))


class MLP(nn.Module):
    """Two projections and an activation."""

    def __init__(self, width: int, inner: int, act: nn.Module):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, inner), act, nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to each token."""
        return self.fc2(self.act(self.fc1(x)))
