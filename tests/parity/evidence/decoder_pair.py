"""A small GPT-like pair that takes a padding mask: torch.nn.MultiheadAttention against nnx.MultiHeadAttention."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import torch
from evidence_pairs import draw, random
from flax import nnx
from torch import nn

import parity

WIDTH, HEADS, INNER, WORDS, LENGTH = 16, 4, 24, 11, 6


class TorchBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.ln2, self.fc1, self.act, self.fc2 = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, INNER),
            nn.GELU(),
            nn.Linear(INNER, WIDTH),
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x, padding, causal):
        y = self.ln1(x)
        x = x + self.drop(self.attn(y, y, y, key_padding_mask=padding, attn_mask=causal, need_weights=False)[0])
        return x + self.drop(self.fc2(self.act(self.fc1(self.ln2(x)))))


class TorchDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList([TorchBlock() for _ in range(2)])
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids, padding):
        x = self.tokens(ids) * math.sqrt(WIDTH) + self.positions(torch.arange(ids.shape[1]))
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        for layer in self.layers:
            x = layer(x, padding, causal)
        return self.head(self.ln(x))


class FlaxGELU(nnx.Module):
    def __init__(self, approximate):
        self.approximate = approximate

    def __call__(self, x):
        return jax.nn.gelu(x, approximate=self.approximate)


class FlaxBlock(nnx.Module):
    def __init__(self, fault, rngs):
        self.fault = fault
        epsilon = 1e-6 if fault == "epsilon" else 1e-5
        self.ln1 = nnx.LayerNorm(WIDTH, epsilon=epsilon, use_fast_variance=False, rngs=rngs)
        self.ln2 = nnx.LayerNorm(WIDTH, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.fc1, self.fc2 = nnx.Linear(WIDTH, INNER, rngs=rngs), nnx.Linear(INNER, WIDTH, rngs=rngs)
        self.act, self.drop = FlaxGELU(fault == "tanh gelu"), nnx.Dropout(0.1, broadcast_dims=(), rngs=rngs)

    def mask(self, padding, causal):
        shown = ~(padding[:, None, None, :] | causal[None, None])
        wrong = {"mask inverted": ~shown, "padding shown": ~causal[None, None], "future shown": ~padding[:, None, None, :]}
        return wrong.get(self.fault, shown)

    def __call__(self, x, padding, causal):
        y = self.ln1(x)
        given = x if self.fault == "norm behind" else y
        mixed = self.attn(given, given, x if self.fault == "other values" else given, mask=self.mask(padding, causal))
        left = {"residual forgotten": 0, "residual of the norm": y}.get(self.fault, x)
        x = left + self.drop(mixed)
        z = self.fc1(self.ln2(x))
        z = self.fc2(jax.nn.silu(z) if self.fault == "silu" else self.act(z))
        z = z.astype(jnp.bfloat16).astype(x.dtype) if self.fault == "bfloat16" else z
        return x + self.drop(z)


class FlaxDecoder(nnx.Module):
    """The fault is in the last layer, or in the model's own code."""

    def __init__(self, fault="", *, rngs):
        self.fault = fault
        self.tokens, self.positions = nnx.Embed(WORDS, WIDTH, rngs=rngs), nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.layers = nnx.List([FlaxBlock("", rngs), FlaxBlock(fault, rngs)])
        self.ln = nnx.LayerNorm(WIDTH, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
        self.head = nnx.Linear(WIDTH, WORDS, rngs=rngs)

    def __call__(self, ids, padding):
        x = self.tokens(ids) * (1 if self.fault == "embedding scale" else math.sqrt(WIDTH))
        x = x + self.positions(jnp.arange(ids.shape[1]) + (self.fault == "positions from one"))
        causal = jnp.triu(jnp.ones((ids.shape[1], ids.shape[1]), bool), 0 if self.fault == "diagonal hidden" else 1)
        for layer in self.layers:
            x = layer(x, padding, causal)
        return self.head(x if self.fault == "last norm" else self.ln(x))


def decoder(fault: str = "") -> tuple[nn.Module, nnx.Module]:
    torch_model, flax_model = draw(TorchDecoder(), "decoder"), FlaxDecoder(fault, rngs=nnx.Rngs(0))
    flax_model.eval()
    parity.transfer(torch_model, flax_model)
    return torch_model, flax_model


def sentences() -> tuple[np.ndarray, np.ndarray]:
    """Token ids (3, 5), and where they are padding."""
    return random("ids").integers(0, WORDS, (3, 5)), np.arange(5) >= np.array([[5], [4], [2]])


# Fault, the module that must be named, and no other, and the cause that must come first.
FAULTS = {
    "epsilon": ("layers.1.ln1", "epsilon", "set epsilon=1e-05"),
    "tanh gelu": ("layers.1.act", "activation", "computes tanh gelu"),
    "silu": ("layers.1", "activation", "computes silu"),
    "mask inverted": ("layers.1", "mask that is passed on", "is inverted"),
    "padding shown": ("layers.1", "mask that is passed on", "comes from its own args[2] alone"),
    "future shown": ("layers.1", "mask that is passed on", "comes from its own args[1] alone"),
    "norm behind": ("layers.1", "norm placement", "args[0] (and 2 more) is taken before layers.1.ln1"),
    "other values": ("layers.1", "norm placement", "args[2] is taken before layers.1.ln1"),
    "residual forgotten": ("layers.1", "residual", "lacks its own args[0]: a residual is not added"),
    "residual of the norm": ("layers.1", "residual", "has what layers.1.ln1 returns added where torch adds its own args[0]"),
    "bfloat16": ("layers.1", "size of rounding", "bfloat16"),
    "embedding scale": ("", "factor", "multiply by 4 (sqrt(16)), once"),
    "positions from one": ("", "ids", "is torch's plus 1"),
    "diagonal hidden": ("", "mask that is passed on", "the diagonal of the causal mask"),
    "last norm": ("", "norm placement", "what it gives head: args[0] is taken before ln"),
}
