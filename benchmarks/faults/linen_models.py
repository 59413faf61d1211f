"""Pairs whose Flax side is Linen: a GPT-like model, a convolutional net with batch norm, an MLP, recurrent nets."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import linen
from torch import Tensor, nn

from benchmarks.faults.layers import activation
from benchmarks.faults.planting import LinenModel, Plan, without_second_biases

WIDTH, HEADS, INNER, TOKENS, LENGTH, BUCKETS = 24, 4, 40, 17, 7, 13


class Function(linen.Module):
    """A function without parameters as a module, so that it has the path of its twin in torch."""

    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """Apply it."""
        return self.function(*args)


def layer_norm(plan: Plan, name: str) -> linen.LayerNorm:
    """Flax's own layer, whose first argument is no width."""
    epsilon = 1e-6 if plan(name, "epsilon") else WIDTH if plan(name, "width given for epsilon") else 1e-5
    return linen.LayerNorm(epsilon, use_fast_variance=plan(name, "fast variance"), name=name)


# ---------------------------------------------------------------- GPT: a fused projection, a tied head


class TorchAttention(nn.Module):
    """Causal attention with one projection for all three, as in nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Attend among the tokens of `x`, `(n, l, width)`."""
        n, length, width = x.shape
        q, k, v = (y.view(n, length, HEADS, -1).transpose(1, 2) for y in self.qkv(x).split(width, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(n, length, width))


class TorchBlock(nn.Module):
    """Attention and MLP, pre-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), TorchAttention(), nn.LayerNorm(WIDTH)
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, INNER), nn.GELU("tanh"), nn.Linear(INNER, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        x = x + self.attn(self.norm1(x))
        return x + self.dropout(self.fc2(self.act(self.fc1(self.norm2(x)))))


class TorchWriter(nn.Module):
    """Embeddings, two blocks, a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks, self.norm = nn.ModuleList([TorchBlock() for _ in range(2)]), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of the next token."""
        x = self.words(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Attention(linen.Module):
    """The port of the attention."""

    plan: Plan

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Attend among the tokens of `x`."""
        n, length, width = x.shape
        on = self.plan
        y = linen.Dense(3 * width, name="qkv")(x)
        if on("", "projections cut per head"):
            q, k, v = jnp.moveaxis(y.reshape(n, length, HEADS, 3, -1), 3, 0)
        else:
            q, k, v = (part.reshape(n, length, HEADS, -1) for part in jnp.split(y, 3, -1))
        if on("", "query and key swapped"):
            q, k = k, q
        if on("", "query and value exchanged"):
            q, v = v, q
        if on("", "heads split in the other order"):
            q, k, v = (z.reshape(n, length, -1, HEADS).swapaxes(2, 3) for z in (q, k, v))
        scale = 1.0 if on("", "scale missing") else width if on("", "scale of the whole width") else width // HEADS
        scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) / math.sqrt(scale)
        seen = linen.make_causal_mask(x[..., 0])
        if on("", "causal mask turned over"):
            seen = seen.swapaxes(-1, -2)
        if on("", "causal mask shifted"):
            seen = jnp.tril(jnp.ones((length, length)), 1)
        hidden = -1.0 if on("", "mask too weak") else -jnp.inf
        scores = scores if on("", "causal mask missing") else jnp.where(seen > 0, scores, hidden)
        if on("", "float16 softmax"):
            weights = jax.nn.softmax(scores.astype(jnp.float16), -1).astype(x.dtype)
        else:
            weights = jax.nn.softmax(scores, -2 if on("", "softmax over queries") else -1)
        y = jnp.einsum("nhqk,nkhd->nhqd" if on("", "heads merged without a transpose") else "nhqk,nkhd->nqhd", weights, v)
        return linen.Dense(width, name="proj")(y.reshape(n, length, width))


class Block(linen.Module):
    """The port of a block; the layers of its MLP have the names that Linen gives them."""

    plan: Plan

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the block."""
        on = self.plan
        norm1, norm2 = layer_norm(on, "norm1"), layer_norm(on, "norm2")
        attn = Attention(on.under("attn"), name="attn")
        y = norm1(x)
        x = x + attn(norm2(x) if on("", "second norm for the first") else y)
        y = norm2(x)
        wide = linen.Dense(INNER)(x if on("", "norm left out") else y)
        wide = Function(activation(on, "act", "tanh gelu"), name="act")(wide)
        half = jnp.bfloat16 if on("fc2", "bfloat16 layer") else None
        y = linen.Dense(x.shape[-1], use_bias=not on("fc2", "bias missing"), dtype=half)(wide)
        y = linen.Dropout(0.1, name="dropout")(y, deterministic=not on("dropout", "dropout left on"))
        return y if on("", "residual missing") else x + y


class Writer(linen.Module):
    """The port; the head is the embedding turned round."""

    plan: Plan

    @linen.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        """Scores of the next token."""
        on = self.plan
        words = linen.Embed(TOKENS, WIDTH, name="words")
        positions = self.param("positions", linen.initializers.normal(), (LENGTH, WIDTH))
        x = words(ids) * (math.sqrt(WIDTH) if on("", "embedding scaled") else 1.0)
        x = x + (jnp.roll(positions, -1, 0) if on("", "positions from one") else positions)
        # The faults stand in the second block, so that the first has to be found innocent.
        blocks = [Block(on.under("blocks.1") if i else Plan(), name=f"blocks_{i}") for i in range(2)]
        for block in blocks[::-1] if on("", "blocks called in the other order") else blocks:
            x = block(x)
        if on("", "last block called twice"):
            x = blocks[1](x)
        x = layer_norm(on, "norm")(x)
        return words.attend(x)


def ids(rng: np.random.Generator) -> tuple[np.ndarray]:
    """Ids, `(3, 7)`."""
    return (rng.integers(0, TOKENS, (3, LENGTH)).astype(np.int32),)


def writer_weights(variables: Any, plan: Plan) -> None:
    """What goes wrong with the weights of the GPT-like model on their way."""
    block = variables["params"]["blocks_1"]
    if plan("blocks.1.attn.proj", "square kernel transposed"):
        block["attn"]["proj"]["kernel"] = block["attn"]["proj"]["kernel"].T
    if plan("blocks.1.attn.qkv", "projections in the order k, q, v"):
        kernel, bias = block["attn"]["qkv"]["kernel"], block["attn"]["qkv"]["bias"]
        order = np.concatenate([np.arange(WIDTH) + start * WIDTH for start in (1, 0, 2)])
        block["attn"]["qkv"] = {"kernel": kernel[:, order], "bias": bias[order]}
    if plan("blocks.1.fc1", "layer of another block"):
        block["Dense_0"] = dict(variables["params"]["blocks_0"]["Dense_0"])
    if plan("blocks.1.fc2", "weights rounded to bfloat16"):
        block["Dense_1"]["kernel"] = block["Dense_1"]["kernel"].astype(jnp.bfloat16).astype(np.float32)


# ---------------------------------------------------------------- a convolutional net with batch norm


class TorchNet(nn.Module):
    """A strided stem, a depthwise and a pointwise convolution, up again, pooling, a flat head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn1 = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8)
        self.depthwise, self.pointwise = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 1)
        self.bn2, self.act = nn.BatchNorm2d(8), nn.ReLU6()
        self.up = nn.ConvTranspose2d(8, 8, 3, stride=2, padding=1, output_padding=1)
        self.pool, self.head = nn.AvgPool2d(3, stride=2, padding=1), nn.Linear(8 * 4 * 5, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        x = self.act(self.bn1(self.stem(x)))
        x = x + self.bn2(self.pointwise(self.depthwise(x)))
        return self.head(self.pool(self.up(x)).flatten(1))


class Net(linen.Module):
    """The port; every layer has the name that Linen gives it."""

    plan: Plan

    def norm(self, place: str) -> linen.BatchNorm:
        """Flax's own layer; its momentum is one minus torch's."""
        epsilon = 1e-3 if self.plan(place, "epsilon") else 1e-5
        momentum = 0.1 if self.plan(place, "momentum not turned round") else 0.9
        return linen.BatchNorm(True, epsilon=epsilon, momentum=momentum, use_fast_variance=False)

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Scores of the classes."""
        on = self.plan
        padding = "SAME" if on("stem", "SAME padding at stride 2") else 1
        x = linen.Conv(8, (3, 3), strides=2, padding=padding, use_bias=False)(x.transpose(0, 2, 3, 1))
        x = Function(relu6(on), name="act")(self.norm("bn1")(x))
        y = linen.Conv(8, (3, 3), padding=1, feature_group_count=8)(x)
        y = linen.Conv(8, (1, 1))(y)
        z = self.norm("bn2")(y)
        x = x + y if on("", "norm left out") else z if on("", "residual missing") else x + z
        pads = "SAME" if on("up", "SAME padding") else ((1, 2), (1, 2))
        x = linen.ConvTranspose(8, (3, 3), strides=(2, 2), padding=pads)(x)
        count = not on("pool", "padding not counted")
        low = (0, 2) if on("pool", "padding behind") else (1, 1)
        pool = Function(lambda x: linen.avg_pool(x, (3, 3), (2, 2), (low, low), count_include_pad=count), name="pool")
        x = pool(x)
        x = x if on("", "flattened channels last") else x.transpose(0, 3, 1, 2)
        return linen.Dense(5)(x.reshape(x.shape[0], -1))


def relu6(plan: Plan) -> Callable[[jax.Array], jax.Array]:
    """relu6, or what is taken for it."""
    return jax.nn.relu if plan("act", "activation relu") else jax.nn.relu6


def pictures(rng: np.random.Generator) -> tuple[np.ndarray]:
    """`(2, 3, 8, 10)`, channels first."""
    return (rng.normal(0.3, 12.0, (2, 3, 8, 10)).astype(np.float32),)


NET_NAMES = {"stem": "Conv_0", "bn1": "BatchNorm_0", "depthwise": "Conv_1", "pointwise": "Conv_2"}
NET_NAMES |= {"bn2": "BatchNorm_1", "up": "ConvTranspose_0", "head": "Dense_0"}


def net_weights(variables: Any, plan: Plan) -> None:
    """What goes wrong with convolutions and the collection batch_stats on their way."""
    weights, statistics = variables["params"], variables["batch_stats"]
    if plan("bn1", "running statistics left at their initial values"):
        statistics["BatchNorm_0"] = {"mean": np.zeros(8, np.float32), "var": np.ones(8, np.float32)}
    if plan("bn2", "standard deviation for variance"):
        statistics["BatchNorm_1"]["var"] = np.sqrt(statistics["BatchNorm_1"]["var"])
    if plan("bn2", "running statistics of another norm"):
        statistics["BatchNorm_1"] = dict(statistics["BatchNorm_0"])
    if plan("depthwise", "kernel with height and width exchanged"):
        weights["Conv_1"]["kernel"] = weights["Conv_1"]["kernel"].swapaxes(0, 1)
    if plan("pointwise", "kernel with inputs and outputs exchanged"):
        weights["Conv_2"]["kernel"] = weights["Conv_2"]["kernel"].swapaxes(2, 3)
    if plan("up", "kernel flipped on its way"):
        weights["ConvTranspose_0"]["kernel"] = weights["ConvTranspose_0"]["kernel"][::-1, ::-1]
    if plan("head", "rows for channels last"):
        kernel = weights["Dense_0"]["kernel"]
        weights["Dense_0"]["kernel"] = kernel.reshape(8, 4, 5, -1).transpose(1, 2, 0, 3).reshape(kernel.shape)


# ---------------------------------------------------------------- an MLP over hashed words


class TorchHashed(nn.Module):
    """Pairs of words in buckets, an average, an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.buckets = nn.Embedding(BUCKETS, WIDTH)
        self.fc1, self.fc2, self.head = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """Scores of five classes, from words and numbers that belong to them."""
        pairs = (ids[:, :-1].long() * 1_000_003 + ids[:, 1:].long() * 10_007) % BUCKETS
        loud = numbers.relu().clamp(min=1e-6).log()
        scale = loud.std(1, keepdim=True) + 1e-3
        x = self.buckets(pairs).mean(1) * ((loud - loud.mean(1, keepdim=True)) / scale)[:, :1]
        x = x + self.fc2(nn.functional.silu(self.fc1(x)))
        return self.head(nn.functional.normalize(x, dim=-1)).log_softmax(-1)


class Hashed(linen.Module):
    """The port; every layer has the name that Linen gives it."""

    plan: Plan

    @linen.compact
    def __call__(self, ids: jax.Array, numbers: jax.Array) -> jax.Array:
        """Scores of five classes."""
        on = self.plan
        first, second = ids[:, :-1], ids[:, 1:]
        if on("", "int64 wrapped"):
            pairs = (first * 1_000_003 + second * 10_007) % BUCKETS
        else:
            pairs = ((first % BUCKETS) * (1_000_003 % BUCKETS) + (second % BUCKETS) * (10_007 % BUCKETS)) % BUCKETS
        numbers = numbers.astype(jnp.float16).astype(numbers.dtype) if on("", "argument cut to float16") else numbers
        loud = jnp.log(jnp.maximum(jax.nn.relu(numbers), 0.0 if on("", "guard against zero left out") else 1e-6))
        scale = loud.std(1, keepdims=True, ddof=0 if on("", "deviation over n") else 1)
        scale = scale + (0.0 if on("", "epsilon left out") else 1e-3)
        words = linen.Embed(BUCKETS, WIDTH)(pairs)
        x = words.max(1) if on("", "maximum for mean") else words.mean(1)
        x = x * ((loud - loud.mean(1, keepdims=True)) / scale)[:, :1]
        y = linen.Dense(INNER)(x)
        y = jax.nn.gelu(y) if on("", "activation gelu") else jax.nn.silu(y)
        y = x + linen.Dense(WIDTH)(y)
        length = (jnp.abs(y) if on("", "absolute values for squares") else jnp.square(y)).sum(-1, keepdims=True)
        length = length if on("", "absolute values for squares") or on("", "root left out") else jnp.sqrt(length)
        y = linen.Dense(5)(y / length)
        return jax.nn.softmax(y) if on("", "softmax for log softmax") else jax.nn.log_softmax(y)


def words_and_numbers(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Ids large enough to wrap, `(3, 7)`, and numbers, some of which are below zero."""
    numbers = rng.normal(0.5, 1.0, (3, 6)).astype(np.float32)
    return rng.integers(10_000, 50_000, (3, LENGTH)).astype(np.int32), numbers


HASHED_NAMES = {"buckets": "Embed_0", "fc1": "Dense_0", "fc2": "Dense_1", "head": "Dense_2"}


def hashed_weights(variables: Any, plan: Plan) -> None:
    """What goes wrong with the weights of the MLP on their way."""
    weights = variables["params"]
    if plan("fc1", "kernel reshaped, not transposed"):
        kernel = weights["Dense_0"]["kernel"]
        weights["Dense_0"]["kernel"] = kernel.T.reshape(kernel.shape)
    if plan("head", "bias left at zero"):
        weights["Dense_2"]["bias"] = np.zeros(5, np.float32)
    if plan("buckets", "rows moved by one"):
        weights["Embed_0"]["embedding"] = np.roll(weights["Embed_0"]["embedding"], 1, 0)


# ---------------------------------------------------------------- recurrent nets


class TorchReader(nn.Module):
    """An LSTM in both directions, and a GRU over what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.gru = nn.LSTM(6, 5, batch_first=True, bidirectional=True), nn.GRU(10, 8, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of five classes."""
        states = self.gru(self.both(x)[0])[0]
        return self.head(states[:, -1])


def directions(one: jax.Array, other: jax.Array) -> jax.Array:
    """Both directions, the backward one first."""
    return jnp.concatenate([other, one], -1)


class Reader(linen.Module):
    """The port, with Flax's own cells."""

    plan: Plan

    def setup(self) -> None:
        """The layers, under torch's names."""
        on = self.plan
        merge = {"merge_fn": directions} if on("both", "order of the directions") else {}
        self.both = linen.Bidirectional(*(linen.RNN(linen.OptimizedLSTMCell(5)) for _ in range(2)), **merge)
        self.gru = linen.RNN(linen.GRUCell(8), reverse=on("gru", "run backwards"))
        self.head = linen.Dense(5)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Scores of five classes."""
        on = self.plan
        states = self.gru(self.both(x))
        last = states[:, 0] if on("", "first state for the last") else states[:, -1]
        return self.head(states.mean(1) if on("", "mean of the states for the last") else last)


def signals(rng: np.random.Generator) -> tuple[np.ndarray]:
    """`(3, 7, 6)`."""
    return (rng.normal(size=(3, 7, 6)).astype(np.float32),)


MODELS = (
    LinenModel(
        "linen gpt",
        TorchWriter,
        Writer,
        ids,
        writer_weights,
        {f"blocks.{block}.fc{layer + 1}": f"blocks_{block}.Dense_{layer}" for block in (0, 1) for layer in (0, 1)},
        streams=("dropout",),
        without={"bias missing": ("blocks.1.fc2.bias",)},
    ),
    LinenModel("linen net", TorchNet, Net, pictures, net_weights, NET_NAMES),
    LinenModel("linen mlp", TorchHashed, Hashed, words_and_numbers, hashed_weights, HASHED_NAMES),
    LinenModel("linen reader", TorchReader, Reader, signals, ready=without_second_biases),
)
