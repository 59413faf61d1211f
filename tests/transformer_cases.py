"""What the tests of the Transformer share in both wings: configurations, ids and masks."""

from typing import Any

import numpy as np
from helpers import random

SIZES: dict[str, Any] = dict(d_model=12, n_heads=3, n_layers=2, d_ff=20, max_len=16)
# Post-norm and pre-norm, with and without a norm at the end, every activation, norm and position.
OPTIONS: dict[str, dict[str, Any]] = {
    "paper": {},
    "post-norm, final norm, bias": dict(final_norm=True, bias=True),
    "pre-norm, gelu, bias": dict(norm_first=True, activation="gelu", bias=True),
    "pre-norm, no final norm": dict(norm_first=True, final_norm=False, eps=1e-2),
    "rms, tanh gelu": dict(norm_first=True, norm="rms", activation="gelu_tanh"),
    "rotary, one key head": dict(positions="rotary", n_kv_heads=1, bias=True),
}
N_SOURCE, N_TARGET = 11, 13
N, LS, LT = 3, 7, 5


def ids(dtype: str = "int64") -> tuple[np.ndarray, np.ndarray]:
    """Source and target with padding at the end of some rows; the longest of each has none."""
    rng = random("ids")
    source, target = rng.integers(1, N_SOURCE, (N, LS)), rng.integers(1, N_TARGET, (N, LT))
    source[1, 4:], source[2, 6:], target[0, 3:], target[2, 2:] = 0, 0, 0, 0
    return source.astype(dtype), target.astype(dtype)


def states(dtype: str = "float64") -> tuple[np.ndarray, np.ndarray]:
    """What a decoder layer takes: `(n, lt, e)` and the encoder's output `(n, ls, e)`."""
    rng = random("states")
    x, memory = (rng.standard_normal((N, length, SIZES["d_model"])) for length in (LT, LS))
    return x.astype(dtype), memory.astype(dtype)


def mask_of(pattern: str, keys: np.ndarray, queries: int) -> np.ndarray | None:
    """True hides: the padding among the keys, what comes after a query, both, or nothing.

    Args:
        pattern: "none", "padding", "causal" or "both".
        keys: ids `(n, lk)`, 0 for padding.
        queries: their number.
    """
    padding, causal = (keys == 0)[:, None, None, :], np.triu(np.ones((queries, keys.shape[1]), bool), 1)[None, None]
    return {"none": None, "padding": padding, "causal": causal, "both": padding | causal}[pattern]


PATTERNS = ("none", "padding", "causal", "both")
