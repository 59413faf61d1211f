"""Pairs over sequences: BERT-, GPT- and LLaMA-like models, torch's own encoder, a mixer, recurrent nets."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import Tensor, nn

from benchmarks.faults import twins
from benchmarks.faults.layers import MLP, Attend, Attention, Function, HandNorm, RMSNorm, activation, layer_norm
from benchmarks.faults.planting import Model, Plan, swap

WIDTH, HEADS, INNER, TOKENS, LONGEST = 24, 4, 40, 17, 12


def tokens(rng: np.random.Generator) -> np.ndarray:
    """Ids, `(3, 7)`."""
    return rng.integers(0, TOKENS, (3, 7)).astype(np.int32)


def tokens_and_mask(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Ids, and what may be seen of them, `(3, 1, 1, 7)`: padding of several lengths at the end."""
    seen = np.arange(7)[None, :] < np.array([7, 5, 4])[:, None]
    return tokens(rng), seen[:, None, None, :]


# ---------------------------------------------------------------- BERT: post-norm, mask, pooler


class TorchBertLayer(nn.Module):
    """Attention and MLP, post-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = twins.Attention(WIDTH, HEADS), twins.MLP(WIDTH, INNER, nn.GELU())
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Apply the layer."""
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.mlp(x))


class TorchBert(nn.Module):
    """Embeddings, two layers, a pooler."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList([TorchBertLayer() for _ in range(2)])
        self.pooler, self.tanh = nn.Linear(WIDTH, WIDTH), nn.Tanh()

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Every token's features, and the sentence's."""
        x = self.norm(self.words(ids) + self.positions(torch.arange(ids.shape[1])))
        for layer in self.layers:
            x = layer(x, mask)
        return x, self.tanh(self.pooler(x[:, 0]))


class BertLayer(nnx.Module):
    """The port of a layer."""

    def __init__(self, plan: Plan, rngs: nnx.Rngs):
        self.attention = Attention(plan.under("attention"), WIDTH, HEADS, rngs, masked=True)
        self.mlp = MLP(plan.under("mlp"), WIDTH, INNER, rngs)
        self.norm1, self.norm2 = (layer_norm(plan, name, WIDTH, rngs) for name in ("norm1", "norm2"))
        self.no_residual, self.twice = plan("", "residual missing"), plan("", "residual doubled")
        self.early = plan("", "pre-norm for post-norm")

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Apply the layer."""
        if self.early:
            x = x + self.attention(self.norm1(x), mask)
            return x + self.mlp(self.norm2(x))
        x = self.norm1(self.attention(x, mask) if self.no_residual else x + self.attention(x, mask))
        return self.norm2((2 if self.twice else 1) * x + self.mlp(x))


class Bert(nnx.Module):
    """The port."""

    def __init__(self, plan: Plan):
        rngs = nnx.Rngs(0)
        self.words, self.positions = nnx.Embed(TOKENS, WIDTH, rngs=rngs), nnx.Embed(LONGEST, WIDTH, rngs=rngs)
        self.norm = layer_norm(plan, "norm", WIDTH, rngs)
        # The faults stand in the second layer, so that the first has to be found innocent.
        self.layers = nnx.List([BertLayer(plan.under("layers.1") if i == 1 else Plan(), rngs) for i in range(2)])
        self.pooler, self.tanh = nnx.Linear(WIDTH, WIDTH, rngs=rngs), Function(activation(plan, "tanh", "tanh"))
        self.shift = int(plan("", "positions from one"))
        self.last = plan("", "last token for the first")
        self.scaled = plan("", "embedding scaled")

    def __call__(self, ids: jax.Array, mask: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Every token's features, and the sentence's."""
        words = self.words(ids) * (math.sqrt(WIDTH) if self.scaled else 1.0)
        x = self.norm(words + self.positions(jnp.arange(ids.shape[1]) + self.shift))
        for layer in self.layers:
            x = layer(x, mask)
        return x, self.tanh(self.pooler(x[:, -1 if self.last else 0]))


def bert_weights(model: Any, plan: Plan) -> None:
    """What goes wrong with BERT's weights on their way."""
    attention = model.layers[1].attention
    if plan("layers.1.attention.key", "square kernel transposed"):
        attention.key.kernel[...] = attention.key.kernel[...].T
    if plan("layers.1.attention.out", "heads permuted"):
        rows = np.arange(WIDTH).reshape(HEADS, -1).T.reshape(-1)
        attention.out.kernel[...] = attention.out.kernel[...][rows]
    if plan("layers.1.attention.key and layers.1.attention.query", "query and key weights swapped"):
        swap(attention.query.kernel, attention.key.kernel)
    if plan("layers.1.mlp.fc1", "kernel reshaped, not transposed"):
        kernel = model.layers[1].mlp.fc1.kernel
        kernel[...] = kernel[...].T.reshape(kernel.shape)
    if plan("layers.1.mlp.fc2", "bias left at zero"):
        model.layers[1].mlp.fc2.bias[...] = jnp.zeros(WIDTH)
    if plan("words", "one row wrong"):
        model.words.embedding[...] = model.words.embedding[...].at[3].multiply(-1.0)
    if plan("norm", "scale left at one"):
        model.norm.scale[...] = jnp.ones(WIDTH)


# ---------------------------------------------------------------- GPT: pre-norm, causal, tied head


class TorchGptBlock(nn.Module):
    """Attention and MLP, pre-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), twins.Attention(WIDTH, HEADS, causal=True)
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), twins.MLP(WIDTH, INNER, nn.GELU("tanh"))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TorchGpt(nn.Module):
    """Embeddings, two blocks, a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList([TorchGptBlock() for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of the next token."""
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.words.weight.T


class GptBlock(nnx.Module):
    """The port of a block."""

    def __init__(self, plan: Plan, rngs: nnx.Rngs):
        self.norm1 = layer_norm(plan, "norm1", WIDTH, rngs)
        self.attention = Attention(plan.under("attention"), WIDTH, HEADS, rngs, causal=True)
        self.norm2 = layer_norm(plan, "norm2", WIDTH, rngs)
        self.mlp = MLP(plan.under("mlp"), WIDTH, INNER, rngs, "tanh gelu")
        self.from_normed, self.parallel = plan("", "residual taken behind the norm"), plan("", "parallel sublayers")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the block."""
        normed = self.norm1(x)
        if self.parallel:
            return x + self.attention(normed) + self.mlp(self.norm2(x))
        x = (normed if self.from_normed else x) + self.attention(normed)
        return x + self.mlp(self.norm2(x))


class Gpt(nnx.Module):
    """The port."""

    def __init__(self, plan: Plan):
        rngs = nnx.Rngs(0)
        self.words, self.positions = nnx.Embed(TOKENS, WIDTH, rngs=rngs), nnx.Embed(LONGEST, WIDTH, rngs=rngs)
        self.blocks = nnx.List([GptBlock(plan.under("blocks.1") if i == 1 else Plan(), rngs) for i in range(2)])
        self.norm = layer_norm(plan, "norm", WIDTH, rngs)
        self.no_norm = plan("", "final norm left out")
        self.scaled = plan("", "scores divided by the root of the width")

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Scores of the next token."""
        x = self.words(ids) + self.positions(jnp.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        scores = (x if self.no_norm else self.norm(x)) @ self.words.embedding[...].T
        return scores / math.sqrt(WIDTH) if self.scaled else scores


# ---------------------------------------------------------------- LLaMA: RMS norm, rotary, grouped queries, gate


def torch_turned(x: Tensor) -> Tensor:
    """Rotary positions, halves, base 10000."""
    d = x.shape[-1]
    # In float64, as the port computes them: rounded to float32 they would be another function.
    places, pairs = torch.arange(x.shape[2], dtype=torch.float64), torch.arange(0, d, 2, dtype=torch.float64)
    angle = places[:, None] * 10000.0 ** (-pairs / d)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class TorchRotary(nn.Module):
    """Rotary positions as a module."""

    def forward(self, x: Tensor) -> Tensor:
        """Turn."""
        return torch_turned(x.double()).to(x.dtype)


class TorchRMSNorm(nn.Module):
    """As in LLaMA, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-3) * self.weight


class TorchLlamaAttention(nn.Module):
    """Four query heads over two key heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = nn.Linear(WIDTH, WIDTH // 2, bias=False), nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.rotary, self.attend = TorchRotary(), twins.Attend(causal=True)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        n, length, _ = x.shape
        q = self.rotary(self.q(x).reshape(n, length, HEADS, -1).transpose(1, 2))
        k = self.rotary(self.k(x).reshape(n, length, HEADS // 2, -1).transpose(1, 2))
        v = self.v(x).reshape(n, length, HEADS // 2, -1).transpose(1, 2)
        y = self.attend(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
        return self.o(y.transpose(1, 2).reshape(n, length, WIDTH))


class TorchGated(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down, self.act = nn.Linear(INNER, WIDTH, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return self.down(self.act(self.gate(x)) * self.up(x))


class TorchLlama(nn.Module):
    """One block and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(TOKENS, WIDTH)
        self.norm1, self.attention = TorchRMSNorm(), TorchLlamaAttention()
        self.norm2, self.mlp = TorchRMSNorm(), TorchGated()
        self.norm, self.head = TorchRMSNorm(), nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of the next token."""
        x = self.words(ids)
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.head(self.norm(x))


class Rotary(nnx.Module):
    """The port of rotary positions."""

    def __init__(self, plan: Plan):
        self.base = 500000.0 if plan("", "base") else 10000.0
        self.neighbours, self.back = plan("", "neighbours for halves"), plan("", "turned backwards")
        self.first = int(plan("", "positions from one"))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Turn."""
        d = x.shape[-1]
        # Of queries alone: moved together with keys they score the same, and the model is the same function.
        first = 3 * self.first if x.shape[1] == HEADS else 0
        angle = (np.arange(x.shape[2])[:, None] + first) * self.base ** (-np.arange(0, d, 2) / d)
        angle = -angle if self.back else angle
        cos, sin = jnp.asarray(np.cos(angle), x.dtype), jnp.asarray(np.sin(angle), x.dtype)
        if self.neighbours:
            a, b = x[..., ::2], x[..., 1::2]
            return jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)
        a, b = x[..., : d // 2], x[..., d // 2 :]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class LlamaAttention(nnx.Module):
    """The port of grouped attention."""

    def __init__(self, plan: Plan, rngs: nnx.Rngs):
        self.q, self.o = (nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs) for _ in range(2))
        self.k, self.v = (nnx.Linear(WIDTH, WIDTH // 2, use_bias=False, rngs=rngs) for _ in range(2))
        self.rotary, self.attend = Rotary(plan.under("rotary")), Attend(plan, "attend", causal=True)
        self.tiled, self.v_turned = plan("", "key heads tiled, not repeated"), plan("", "values turned too")
        self.k_plain = plan("", "keys not turned")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Attend."""
        n, length, _ = x.shape
        q = self.rotary(self.q(x).reshape(n, length, HEADS, -1).swapaxes(1, 2))
        k = self.k(x).reshape(n, length, HEADS // 2, -1).swapaxes(1, 2)
        k = k if self.k_plain else self.rotary(k)
        v = self.v(x).reshape(n, length, HEADS // 2, -1).swapaxes(1, 2)
        v = self.rotary(v) if self.v_turned else v
        k, v = (jnp.tile(y, (1, 2, 1, 1)) if self.tiled else jnp.repeat(y, 2, axis=1) for y in (k, v))
        return self.o(self.attend(q, k, v).swapaxes(1, 2).reshape(n, length, WIDTH))


class Gated(nnx.Module):
    """The port of SwiGLU."""

    def __init__(self, plan: Plan, rngs: nnx.Rngs):
        self.gate, self.up = (nnx.Linear(WIDTH, INNER, use_bias=False, rngs=rngs) for _ in range(2))
        self.down, self.act = nnx.Linear(INNER, WIDTH, use_bias=False, rngs=rngs), Function(activation(plan, "act", "silu"))
        self.swapped = plan("", "gate and up swapped")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply it."""
        gate, up = self.gate(x), self.up(x)
        return self.down(self.act(up) * gate if self.swapped else self.act(gate) * up)


class Llama(nnx.Module):
    """The port."""

    def __init__(self, plan: Plan):
        rngs = nnx.Rngs(0)
        self.words = nnx.Embed(TOKENS, WIDTH, rngs=rngs)
        self.norm1, self.attention = RMSNorm(plan, "norm1", WIDTH), LlamaAttention(plan.under("attention"), rngs)
        self.norm2, self.mlp = RMSNorm(plan, "norm2", WIDTH), Gated(plan.under("mlp"), rngs)
        self.norm, self.head = RMSNorm(plan, "norm", WIDTH), nnx.Linear(WIDTH, TOKENS, use_bias=False, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Scores of the next token."""
        x = self.words(ids)
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.head(self.norm(x))


# ---------------------------------------------------------------- a hand-written encoder, and a mixer


class TorchHandNorm(nn.Module):
    """A layer norm written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
        return (x - mean) / torch.sqrt(variance + 1e-5) * self.weight + self.bias


class TorchMixer(nn.Module):
    """An MLP over the tokens, an MLP over the features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.over_tokens = TorchHandNorm(), twins.MLP(7, 11, nn.GELU())
        self.norm2, self.over_features = TorchHandNorm(), twins.MLP(WIDTH, INNER, nn.LeakyReLU(0.2))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of five classes."""
        x = x + self.over_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.over_features(self.norm2(x))
        return self.head(x.mean(1))


class Mixer(nnx.Module):
    """The port."""

    def __init__(self, plan: Plan):
        rngs = nnx.Rngs(0)
        self.norm1, self.over_tokens = HandNorm(plan, "norm1", WIDTH), MLP(plan.under("over_tokens"), 7, 11, rngs)
        self.norm2 = HandNorm(plan, "norm2", WIDTH)
        self.over_features = MLP(plan.under("over_features"), WIDTH, INNER, rngs, "leaky relu 0.2")
        self.head = nnx.Linear(WIDTH, 5, rngs=rngs)
        self.summed, self.largest = plan("", "sum for mean"), plan("", "maximum for mean")
        self.exchanged = plan("", "sublayers exchanged")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Scores of five classes."""
        if self.exchanged:
            x = x + self.over_features(self.norm2(x))
        x = x + self.over_tokens(self.norm1(x).swapaxes(1, 2)).swapaxes(1, 2)
        if not self.exchanged:
            x = x + self.over_features(self.norm2(x))
        pooled = x.sum(1) if self.summed else x.max(1) if self.largest else x.mean(1)
        return self.head(pooled)


def features(rng: np.random.Generator) -> tuple[np.ndarray]:
    """`(3, 7, WIDTH)`, shifted and of several scales."""
    scale = rng.uniform(0.2, 3.0, (3, 7, 1))
    return ((rng.normal(size=(3, 7, WIDTH)) * scale + rng.normal(size=(3, 7, 1))).astype(np.float32),)


# ---------------------------------------------------------------- torch.nn.TransformerEncoder


class EncoderAttention(nnx.Module):
    """The port of nn.MultiheadAttention in self-attention: one projection for all three."""

    def __init__(self, plan: Plan, rngs: nnx.Rngs):
        self.in_proj_weight = nnx.Param(jnp.zeros((3 * WIDTH, WIDTH)))
        self.in_proj_bias = nnx.Param(jnp.zeros(3 * WIDTH))
        self.out_proj = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.interleaved, self.order = plan("", "projections cut per head"), plan("", "query and value exchanged")
        self.keep, self.unscaled = plan("", "padding mask inverted"), plan("", "scale missing")

    def __call__(self, x: jax.Array, hidden: jax.Array | None) -> jax.Array:
        """Attend; `hidden` is `(n, l)`, True for padding."""
        n, length, _ = x.shape
        y = x @ self.in_proj_weight[...].T + self.in_proj_bias[...]
        if self.interleaved:
            q, k, v = jnp.moveaxis(y.reshape(n, length, HEADS, 3, -1), 3, 0).swapaxes(2, 3)
        else:
            q, k, v = (part.reshape(n, length, HEADS, -1).swapaxes(1, 2) for part in jnp.split(y, 3, -1))
        q, v = (v, q) if self.order else (q, v)
        scores = q @ k.swapaxes(-2, -1) / (1.0 if self.unscaled else math.sqrt(WIDTH // HEADS))
        if hidden is not None:
            scores = jnp.where((~hidden if self.keep else hidden)[:, None, None, :], -jnp.inf, scores)
        y = jax.nn.softmax(scores, -1) @ v
        return self.out_proj(y.swapaxes(1, 2).reshape(n, length, WIDTH))


class EncoderLayer(nnx.Module):
    """The port of nn.TransformerEncoderLayer, post-norm."""

    def __init__(self, plan: Plan, rngs: nnx.Rngs):
        self.self_attn = EncoderAttention(plan.under("self_attn"), rngs)
        self.linear1, self.linear2 = nnx.Linear(WIDTH, INNER, rngs=rngs), nnx.Linear(INNER, WIDTH, rngs=rngs)
        self.norm1, self.norm2 = (layer_norm(plan, name, WIDTH, rngs) for name in ("norm1", "norm2"))
        self.function = activation(plan, "", "relu")
        self.skipped = plan("", "second residual missing")

    def __call__(self, x: jax.Array, hidden: jax.Array | None) -> jax.Array:
        """Apply the layer."""
        x = self.norm1(x + self.self_attn(x, hidden))
        y = self.linear2(self.function(self.linear1(x)))
        return self.norm2(y if self.skipped else x + y)


class Encoder(nnx.Module):
    """The port of nn.TransformerEncoder with padding."""

    def __init__(self, plan: Plan):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([EncoderLayer(plan.under("encoder.layers.1") if i else Plan(), rngs) for i in range(2)])

    def __call__(self, x: jax.Array, hidden: jax.Array) -> jax.Array:
        """Features of the tokens; of padding, zeros."""
        for layer in self.layers:
            x = layer(x, hidden)
        return jnp.where(hidden[..., None], 0.0, x)


class TorchEncoder(nn.Module):
    """torch's own encoder, with what it gives for padding set to zero: it depends on its fast path."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Features of the tokens."""
        return self.encoder(x, src_key_padding_mask=hidden).masked_fill(hidden[..., None], 0.0)


def features_and_padding(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Features, and where there is padding."""
    return features(rng)[0], np.arange(7)[None, :] >= np.array([7, 5, 4])[:, None]


# ---------------------------------------------------------------- recurrent nets


class TorchLstm(nn.Module):
    """An LSTM over a sequence, classified by its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(WIDTH, 16, batch_first=True), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of five classes."""
        return self.head(self.lstm(x)[0][:, -1])


class LstmCell(nnx.Module):
    """The port of an LSTM by hand, with torch's names and its gates i, f, g, o."""

    def __init__(self, plan: Plan):
        self.weight_ih_l0, self.weight_hh_l0 = nnx.Param(jnp.zeros((64, WIDTH))), nnx.Param(jnp.zeros((64, 16)))
        self.bias_ih_l0, self.bias_hh_l0 = nnx.Param(jnp.zeros(64)), nnx.Param(jnp.zeros(64))
        self.order = plan("", "gates in the order i, f, o, g")
        self.one_bias, self.forget = plan("", "second bias left out"), plan("", "one added to the forget gate")
        self.back, self.no_tanh = plan("", "run backwards"), plan("", "state given out without tanh")
        self.ones = plan("", "state begun with ones")

    def __call__(self, x: jax.Array) -> jax.Array:
        """All states, `(n, l, 16)`."""

        def step(carry: tuple[jax.Array, jax.Array], token: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            h, c = carry
            bias = self.bias_ih_l0[...] + (0.0 if self.one_bias else self.bias_hh_l0[...])
            y = token @ self.weight_ih_l0[...].T + h @ self.weight_hh_l0[...].T + bias
            i, f, g, o = jnp.split(y, 4, -1)
            g, o = (o, g) if self.order else (g, o)
            c = jax.nn.sigmoid(f + (1.0 if self.forget else 0.0)) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * (c if self.no_tanh else jnp.tanh(c))
            return (h, c), h

        begin = (jnp.ones if self.ones else jnp.zeros)((x.shape[0], 16), x.dtype)
        steps = x.swapaxes(0, 1)[::-1] if self.back else x.swapaxes(0, 1)
        return jax.lax.scan(step, (begin, begin), steps)[1].swapaxes(0, 1)


class Lstm(nnx.Module):
    """The port."""

    def __init__(self, plan: Plan):
        self.lstm, self.head = LstmCell(plan.under("lstm")), nnx.Linear(16, 5, rngs=nnx.Rngs(0))
        self.mean = plan("", "mean of the states for the last")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Scores of five classes."""
        states = self.lstm(x)
        return self.head(states.mean(1) if self.mean else states[:, -1])


MODELS = (
    Model("bert", TorchBert, Bert, tokens_and_mask, bert_weights),
    Model("gpt", TorchGpt, Gpt, lambda rng: (tokens(rng),)),
    Model("llama", TorchLlama, Llama, lambda rng: (tokens(rng),)),
    Model("mixer", TorchMixer, Mixer, features),
    Model("torch encoder", TorchEncoder, Encoder, features_and_padding, rename={"encoder.layers": "layers"}),
    Model("lstm", TorchLstm, Lstm, features),
)
