"""Masks in the convention of the third document: True hides."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def padding_mask(tokens: Int[Tensor, "n l"], pad: int) -> Bool[Tensor, "n 1 1 l"]:
    """Hide the padding from every query.

    Args:
        tokens: ids, `(n, l)`.
        pad: the id that fills up short sequences.

    Returns:
        `(n, 1, 1, l)`, True where the key is padding. A sequence of padding alone hides every key,
        and attention to it gives NaN.
    """
    return (tokens == pad)[:, None, None, :]


def causal_mask(lq: int, lk: int, like: Tensor, offset: int | Int[Tensor, ""] = 0) -> Bool[Tensor, "1 1 lq lk"]:
    """Hide from every query the keys that come after it.

    Args:
        lq: number of queries.
        lk: number of keys.
        like: an array on the device of the scores.
        offset: position of the first query among the keys.

    Returns:
        `(1, 1, lq, lk)`, True where the key's position is greater than the query's.
    """
    queries = torch.arange(lq, device=like.device)[:, None] + offset
    return (torch.arange(lk, device=like.device)[None, :] > queries)[None, None]
