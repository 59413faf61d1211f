"""Checkpoints written and read without the help of parity."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flax import nnx
from torch import nn
from transfer_helpers import any_bits, rngs, to_tensor

ENDS = (".safetensors", ".pt", ".msgpack", ".orbax", "")
DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int64",
    "int32",
    "int8",
    "uint8",
    "bool",
)


def tensors(*name: Any) -> dict[str, torch.Tensor]:
    """One tensor of each dtype with every special value, and the shapes that files get wrong."""
    rng = np.random.default_rng([len(str(name))])
    found = {f"{d}.bias": to_tensor(any_bits(rng, (3, 5), d), d) for d in DTYPES}
    found["zero"] = torch.tensor(-0.0)
    found["one"] = torch.full((1,), float("nan"))
    found["cube"] = torch.randn(2, 3, 4)
    return found


def parts(content: bytes) -> tuple[dict[str, Any], bytes]:
    """A safetensors file's header and data."""
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def whole(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file of a header, which may be text."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def listing(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, with its content."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


class TorchPair(nn.Module):
    """A Linear, square so that no shape shows a missing transposition, and a norm."""

    def __init__(self):
        super().__init__()
        self.dense, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)


class FlaxPair(nnx.Module):
    def __init__(self, rngs: nnx.Rngs = rngs()):  # noqa: B008
        self.dense = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.LayerNorm(4, epsilon=1e-5, use_fast_variance=False, rngs=rngs)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
