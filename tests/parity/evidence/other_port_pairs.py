"""Faults of ports in code of the user's own: patches, grouped heads, distances, windows, norms by hand, NNX."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from evidence_pairs import normal
from fault_pairs import Planted, functions, held, layers
from flax import nnx
from torch import nn

X, SEQUENCE, IMAGE = normal(3, 5, 8), normal(2, 4, 11), normal(2, 4, 6, 9, name="image")

# ---------------------------------------------------------------- attention with grouped heads and rotary positions


def torch_turned(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(0, 2 * half, 2, dtype=x.dtype) / (2 * half))
    angle = torch.cat([torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * rates] * 2, -1)
    return x * angle.cos() + torch.cat([-x[..., half:], x[..., :half]], -1) * angle.sin()


def flax_turned(x: jax.Array, base: float = 10000.0) -> jax.Array:
    half = x.shape[-1] // 2
    rates = base ** (-jnp.arange(0, 2 * half, 2) / (2 * half))
    angle = jnp.concatenate([jnp.arange(x.shape[-2])[:, None] * rates] * 2, -1)
    return x * jnp.cos(angle) + jnp.concatenate([-x[..., half:], x[..., :half]], -1) * jnp.sin(angle)


class TorchGrouped(nn.Module):
    """Four heads of queries on two of keys, each of which sees what was before it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(12, 24), nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, 6)).transpose(1, 2) for one in (self.q, self.k, self.v))
        k, v = torch_turned(k).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = torch_turned(q) @ k.transpose(-2, -1) / math.sqrt(6)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return (scores.masked_fill(later, float("-inf")).softmax(-1) @ v).transpose(1, 2).flatten(2)


class FlaxGrouped(nnx.Module):
    def __init__(self, fault: str, rngs: nnx.Rngs):
        self.q, self.k, self.v = (nnx.Linear(12, size, rngs=rngs) for size in (24, 12, 12))
        self.fault = fault

    def __call__(self, x):
        n, length, _ = x.shape
        q, k, v = (one(x).reshape(n, length, -1, 6).swapaxes(1, 2) for one in (self.q, self.k, self.v))
        base = 500000.0 if self.fault == "base" else 10000.0
        k = k if self.fault == "keys not turned" else flax_turned(k, base)
        again = (lambda y: jnp.tile(y, (1, 2, 1, 1))) if self.fault == "tiled" else lambda y: jnp.repeat(y, 2, 1)
        scores = flax_turned(q, base) @ again(k).swapaxes(-2, -1) / math.sqrt(6)
        shown = jnp.tril(jnp.ones((length, length), bool))
        shown = jnp.triu(shown, -3) if self.fault == "window" else shown
        y = jax.nn.softmax(jnp.where(shown, scores, -jnp.inf), -1) @ again(v)
        return y.swapaxes(1, 2).reshape(n, length, 24)


def grouped(fault: str, cause: str, says: str) -> Planted:
    pair = lambda: held(TorchGrouped(), FlaxGrouped(fault, nnx.Rngs(0)), "grouped")  # noqa: E731
    return Planted(f"grouped heads {fault}", pair, (normal(2, 7, 12),), cause, says)


GROUPED = [
    grouped("tiled", "order of heads", "jnp.repeat(x, 2, axis=1)"),
    grouped("base", "positions", "set the base to 10000"),
    grouped("keys not turned", "positions", "the angles are zero in Flax (number 1 of 2)"),
    grouped("window", "mask", "a window of 4 keys"),
]

# ---------------------------------------------------------------- scores: distances, lengths, bounds, weak masks

SEQUENCES = normal(2, 4, 5, 6, name="q"), normal(2, 4, 7, 6, name="k")
PADDING = np.arange(7) >= np.array([4, 6])[:, None]
SLOPES = 2.0 ** -np.arange(1, 5)


def torch_distant(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    slopes = torch.from_numpy(SLOPES).to(q.dtype)[:, None, None]
    return (q @ k.transpose(-2, -1) + slopes * (torch.arange(7) - torch.arange(5)[:, None])).softmax(-1) @ k


def flax_distant(steeper: float) -> Callable[..., Any]:
    def function(q, k):
        bias = steeper * SLOPES[:, None, None] * (jnp.arange(7) - jnp.arange(5)[:, None])
        return jax.nn.softmax(q @ k.swapaxes(-2, -1) + bias, -1) @ k

    return function


def torch_hidden(q: torch.Tensor, k: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    added = torch.zeros_like(padding, dtype=q.dtype).masked_fill(padding, float("-inf"))
    return (q @ k.transpose(-2, -1) + added[:, None, None]).softmax(-1) @ k


def flax_hidden(fill: float | None) -> Callable[..., Any]:
    def function(q, k, padding):
        scores = q @ k.swapaxes(-2, -1)
        return jax.nn.softmax(scores if fill is None else jnp.where(padding[:, None, None], fill, scores), -1) @ k

    return function


def torch_safe(q: torch.Tensor, k: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, k, attn_mask=~padding[:, None, None], scale=1.0)


class TorchCosine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4, 1, 1))

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        return (scores * self.scale.clamp(max=-1.0).exp()).softmax(-1) @ k


class FlaxCosine(nnx.Module):
    def __init__(self, fault: str):
        self.scale, self.fault = nnx.Param(jnp.zeros((4, 1, 1))), fault

    def __call__(self, q, k):
        scale = jnp.exp(jnp.minimum(self.scale[...], -1.2 if self.fault == "bound" else -1.0))
        one, other = (y / jnp.maximum(jnp.linalg.norm(y, axis=-1, keepdims=True), 1e-12) for y in (q, k))
        return jax.nn.softmax(one @ (k if self.fault == "keys" else other).swapaxes(-2, -1) * scale, -1) @ k


def cosine(fault: str, cause: str, says: str) -> Planted:
    return layers(f"cosine {fault}", TorchCosine, lambda _: FlaxCosine(fault), SEQUENCES, cause, says)


SCORES = [
    functions("steeper slopes", torch_distant, flax_distant(2.0), SEQUENCES, "factor", "2 (sqrt(4)) times the term"),
    functions("weak fill", torch_hidden, flax_hidden(-5.0), (*SEQUENCES, PADDING), "mask", "hidden scores are -5 in Flax"),
    functions("no padding mask", torch_hidden, flax_hidden(None), (*SEQUENCES, PADDING), "mask", "the mask is not used"),
    functions(
        "NaN for zeros",
        torch_safe,
        flax_hidden(-jnp.inf),
        (*SEQUENCES, np.arange(7) >= np.array([4, 0])[:, None]),
        "fully hidden rows",
        "a query that sees no key gets NaN in Flax",
    ),
    cosine("bound", "guard", "Flax bounds by max=-1.2 where torch bounds by -1"),
    cosine("keys", "factor", "Flax does not divide by the array"),
]

# ---------------------------------------------------------------- patches, windows, pixels


class TorchPatches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(36, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        return self.rows(x.reshape(n, c, h // 3, 3, w // 3, 3).permute(0, 2, 4, 1, 3, 5).reshape(n, -1, 9 * c))


class FlaxPatches(nnx.Module):
    def __init__(self, order: tuple[int, ...], rngs: nnx.Rngs):
        self.rows, self.order = nnx.Linear(36, 5, rngs=rngs), order

    def __call__(self, x):
        n, c, h, w = x.shape
        return self.rows(x.reshape(n, c, h // 3, 3, w // 3, 3).transpose(self.order).reshape(n, -1, 9 * c))


def patches(name: str, order: tuple[int, ...]) -> Planted:
    says = f"in the order {order}, torch in the order (0, 2, 4, 1, 3, 5)"
    return layers(f"patches {name}", TorchPatches, lambda rngs: FlaxPatches(order, rngs), (IMAGE,), "order of axes", says)


def flax_unfolded(x: jax.Array) -> jax.Array:
    windows = jax.lax.conv_general_dilated_patches(x, (3, 3), (1, 1), [(1, 1), (1, 1)])
    return jnp.cumsum(windows.reshape(2, 4, 9, 54).swapaxes(1, 2).reshape(2, 36, 54), 1)


def flax_unshuffled(x: jax.Array) -> jax.Array:
    return jnp.sin(x.reshape(2, 4, 2, 3, 3, 3).transpose(0, 3, 5, 1, 2, 4).reshape(2, 36, 2, 3))


class FlaxFilters(nnx.Module):
    """A convolution of groups, its filters in another order."""

    def __init__(self) -> None:
        self.weight, self.bias = nnx.Param(jnp.zeros((12, 1, 3))), nnx.Param(jnp.zeros(12))

    def __call__(self, x):
        kernel = self.weight[...].reshape(4, 3, 1, 3).swapaxes(0, 1).reshape(12, 1, 3)
        names = ("NCH", "OIH", "NCH")
        y = jax.lax.conv_general_dilated(x, kernel, (1,), [(1, 1)], feature_group_count=4, dimension_numbers=names)
        return y + self.bias[...][:, None]


SPACE = [
    patches("channels last", (0, 2, 4, 3, 5, 1)),
    patches("column by column", (0, 4, 2, 1, 3, 5)),
    functions(
        "unfolded", lambda x: F.unfold(x, 3, padding=1).cumsum(1), flax_unfolded, (IMAGE,), "pixel shuffle", "(row, column"
    ),
    functions("unshuffled", lambda x: F.pixel_unshuffle(x, 3).sin(), flax_unshuffled, (IMAGE,), "pixel shuffle", "unshuffle"),
    functions(
        "rolled back",
        lambda x: x.roll((-2, -1), (2, 3)).cumsum(2),
        lambda x: jnp.cumsum(jnp.roll(x, (2, 1), (2, 3)), 2),
        (IMAGE,),
        "positions",
        "jnp.roll(x, (-2, -1), axis=(2, 3))",
    ),
    functions(
        "tiled pixels",
        lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
        lambda x: jnp.tile(x, (1, 1, 2)),
        (SEQUENCE,),
        "resizing",
        "jnp.repeat(x, factor, axis)",
    ),
    functions(
        "cubic between corners",
        lambda x: F.interpolate(x, size=(10, 13), mode="bicubic", align_corners=True),
        lambda x: jax.image.resize(x, (2, 4, 10, 13), "cubic", antialias=False),
        (IMAGE,),
        "resizing",
        "Flax lines up centres, torch corners",
    ),
    functions(
        "equal windows",
        lambda x: F.adaptive_avg_pool1d(x, 4),
        lambda x: x[..., :8].reshape(2, 4, 4, 2).mean(-1),
        (SEQUENCE,),
        "pooling",
        "windows of (1, 2) in steps of (1, 2)",
    ),
    layers(
        "filters dealt out",
        lambda: nn.Conv1d(4, 12, 3, padding=1, groups=4),
        lambda _: FlaxFilters(),
        (SEQUENCE,),
        "convolution",
        "the 12 filters of 4 groups",
    ),
]

# ---------------------------------------------------------------- norms and gates by hand


class TorchAround(nn.Module):
    """A root mean square whose scale is stored around zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


class FlaxAround(nnx.Module):
    def __init__(self, fault: str):
        self.weight, self.fault = nnx.Param(jnp.zeros(8)), fault

    def __call__(self, x):
        square = (x * x).mean(-1, keepdims=True) + 1e-6
        rate = 1 / square if self.fault == "no root" else jax.lax.rsqrt(square)
        return x * rate * (self.weight[...] if self.fault == "no one" else 1 + self.weight[...])


def around(fault: str, cause: str, says: str) -> Planted:
    return layers(f"root mean square, {fault}", TorchAround, lambda _: FlaxAround(fault), (X,), cause, says)


class FlaxByHand(nnx.Module):
    def __init__(self) -> None:
        self.weight, self.bias = nnx.Param(jnp.zeros(8)), nnx.Param(jnp.zeros(8))
        self.running_mean, self.running_var = nnx.BatchStat(jnp.zeros(8)), nnx.BatchStat(jnp.ones(8))

    def __call__(self, x):
        y = (x - self.running_mean[...]) / (self.running_var[...] + 1e-5)
        return y * self.weight[...] + self.bias[...]


def instance(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-2)


HAND = [
    around("no root", "variance", "the root is left out where torch takes rsqrt"),
    around("no one", "terms", "Flax does not add 1 where torch does"),
    layers(
        "batch norm by the variance",
        lambda: nn.BatchNorm1d(8),
        lambda _: FlaxByHand(),
        (normal(7, 8),),
        "variance",
        "divides by the variance",
        ignore=["core.num_batches_tracked"],
    ),
    functions("beside the root", lambda x: F.instance_norm(x, eps=1e-2), instance, (SEQUENCE,), "epsilon", "added to the root"),
    functions("celu", lambda x: F.celu(x, 1.5), jax.nn.celu, (X,), "activation", "alpha=1 where torch has 1.5"),
    functions(
        "gate in turn",
        lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
        lambda x: jax.nn.silu(x[..., ::2]) * x[..., 1::2],
        (X,),
        "order of pieces",
        "Flax pairs neighbouring channels where torch pairs the two halves",
    ),
]

# ---------------------------------------------------------------- losses, whole numbers, tables, norms over other axes

SHOWN = np.arange(5) < np.array([3, 5, 2])[:, None]
WORDS = np.array([[1, 5, 0, 3, 2], [4, 0, 6, 0, 7], [8, 2, 2, 9, 0]], np.int32)
LOGITS, HALVES = normal(3, 5, 10, name="logits"), np.round(4 * normal(3, 5, 8)) / 4


def torch_next(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x[:, :-1].flatten(0, 1), ids[:, 1:].flatten().long(), ignore_index=0)


def flax_next(fault: str) -> Callable[..., Any]:
    def function(x, ids):
        x, ids = (x[:, 1:], ids[:, :-1]) if fault == "before" else (x[:, :-1], ids[:, 1:])
        loss, shown = -jnp.take_along_axis(jax.nn.log_softmax(x), ids[..., None], -1)[..., 0], ids != 0
        ways = {"all": loss.mean(), "count": (loss * shown).mean(), "sum": (loss * shown).sum()}
        return ways.get(fault, (loss * shown).sum() / shown.sum())

    return function


def next_word(fault: str, cause: str, says: str) -> Planted:
    return functions(f"loss {fault}", torch_next, flax_next(fault), (LOGITS, WORDS), cause, says)


def torch_steps(t: torch.Tensor) -> torch.Tensor:
    angle = 50 * t[:, None] * torch.exp(-math.log(10000) * torch.arange(4) / 4)
    return torch.cat([angle.cos(), angle.sin()], -1)


def flax_steps(t: jax.Array) -> jax.Array:
    angle = 50 * t[:, None] * jnp.exp(-math.log(10000) * jnp.arange(4) / 3)
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], -1)


def torch_normed(x: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    return F.conv1d(x, kernel / kernel.norm(dim=(1, 2), keepdim=True))


def flax_normed(x: jax.Array, kernel: jax.Array) -> jax.Array:
    kernel = kernel / jnp.linalg.norm(kernel, axis=0, keepdims=True)
    return jax.lax.conv_general_dilated(x, kernel, (1,), "VALID", dimension_numbers=("NCH", "OIH", "NCH"))


def torch_average(x: torch.Tensor, shown: torch.Tensor) -> torch.Tensor:
    return (x * shown[..., None]).sum(1) / shown.sum(1, keepdim=True)


class TorchTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(10, 8), nn.Embedding(6, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.words(ids) + self.places(torch.arange(ids.shape[1])))


class FlaxTable(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.words, self.places = nnx.Embed(10, 8, rngs=rngs), nnx.Embed(6, 8, rngs=rngs)

    def __call__(self, ids):
        return jnp.sin(self.words(ids) + self.places(jnp.arange(ids.shape[1]))[::-1])


REST = [
    next_word("before", "order of pieces", "each is cut at the other end"),
    next_word("all", "reduction", "ids that torch ignores are counted"),
    next_word("count", "reduction", "the number of all ids"),
    next_word("sum", "reduction", "the sum is taken"),
    functions(
        "last frequency", torch_steps, flax_steps, (normal(3),), "positions", "divided by 3 in Flax where torch divides by 4"
    ),
    functions("kernel normed by inputs", torch_normed, flax_normed, (SEQUENCE, normal(6, 4, 3)), "axis", "over the axes (0,)"),
    functions(
        "mean over the length",
        torch_average,
        lambda x, shown: (x * shown[..., None]).mean(1),
        (X, SHOWN),
        "factor",
        "Flax divides everything by 5",
    ),
    functions(
        "halves",
        lambda x: (x * 2).round() / 2,
        lambda x: jnp.floor(x * 2 + 0.5) / 2,
        (HALVES,),
        "whole numbers",
        "halves to even",
    ),
    functions("rest", lambda x: x.remainder(0.7), lambda x: jnp.fmod(x, 0.7), (X,), "whole numbers", "towards zero"),
    layers("table read backwards", TorchTable, FlaxTable, (WORDS,), "another value", "from the end along axis 0"),
]

OTHERS = [*GROUPED, *SCORES, *SPACE, *HAND, *REST]

# What is tried in every run; the rest stands in the slow one.
QUICK_OTHERS = ("weak fill", "NaN for zeros", "cosine bound", "patches channels last", "equal windows")
QUICK_OTHERS += ("filters dealt out", "root mean square, no one", "beside the root", "gate in turn", "rolled back")
QUICK_OTHERS += ("loss before", "loss count", "halves", "mean over the length", "table read backwards")
# The names that a fault must not get beside its own, by the name of the pair.
NEVER_OTHERS = {
    "grouped heads tiled": ("arguments exchanged", "flatten order"),
    "grouped heads keys not turned": ("rotary pairs", "factor"),
    "weak fill": ("terms", "guard"),
    "no padding mask": ("terms", "guard"),
    "NaN for zeros": ("mask",),
    "cosine bound": ("terms", "softmax scale"),
    "patches channels last": ("order of heads", "flatten order"),
    "filters dealt out": ("kernel layout",),
    "root mean square, no one": ("factor", "variance"),
    "gate in turn": ("rotary pairs", "activation"),
    "loss before": ("reduction",),
    "loss count": ("order of pieces",),
    "kernel normed by inputs": ("axes of arguments", "reduction"),
    "mean over the length": ("reduction", "terms"),
    "table read backwards": ("axes of arguments", "positions"),
    "rolled back": ("order of axes", "padding"),
}
