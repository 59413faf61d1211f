"""Faults that ports from torch to Flax are known to have: the right port passes, the faulty one is refused where it is wrong.

Each test carries the id of a row of the project's catalogue of faults.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from flax import linen, nnx
from helpers import random
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import jax_impl
import parity
import torch_impl

# Every row of the catalogue.
NUMBERS = {
    "A": "01 02 04 05 06 08 09 10 11 12 13 15 16 18 20 21",
    "B": "01 02 03 04 06 07 08 10",
    "C": "01 04 05 06 08",
    "D": "01 03 04 05 06 07 10 11 12 13 15 16",
    "E": "01 02 03 04 06",
    "F": "02 03 04 06",
    "G": "01 04 05 06",
}
CATALOGUE = [group + number for group, numbers in NUMBERS.items() for number in numbers.split()]


def test_every_row_of_the_catalogue_is_tested():
    assert sorted({match[1] for name in globals() if (match := re.match(r"test_([A-G]\d\d)_", name))}) == CATALOGUE


# ------------------------------------------------------------------------------ pairs of models


class TorchStage(nn.Module):
    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


class FlaxStage(nnx.Module):
    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)


class TorchHolder(nn.Module):
    """One function under the path `core`, so that a trace can name it."""

    def __init__(self, core: Any):
        super().__init__()
        self.core = core if isinstance(core, nn.Module) else TorchStage(core)
        self.eval()

    def forward(self, *args, **kwargs):
        return self.core(*args, **kwargs)


class FlaxHolder(nnx.Module):
    def __init__(self, core: Any):
        self.core = core if isinstance(core, nnx.Module) else FlaxStage(core)

    def __call__(self, *args, **kwargs):
        return self.core(*args, **kwargs)


N, LENGTH, HEADS, WIDTH = 2, 3, 2, 4
STEPS = ("structure", "wiring", "identical")


class TorchAttention(nn.Module):
    """Attention without parameters, each step under its own path."""

    def __init__(self, **stages: Callable[..., Any]):
        super().__init__()
        torch_stages = dict(
            split=lambda x: x.reshape(*x.shape[:2], HEADS, -1).transpose(1, 2),
            scores=lambda q, k: q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5,
            hide=lambda scores, mask: scores.masked_fill(mask, float("-inf")),
            softmax=lambda scores: torch.softmax(scores, -1),
            mix=lambda weights, v: weights @ v,
            merge=lambda x: x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1),
        )
        for name, function in (torch_stages | stages).items():
            setattr(self, name, TorchStage(function))
        self.eval()

    def forward(self, q, k, v, mask):
        q, k, v = self.split(q), self.split(k), self.split(v)
        return self.merge(self.mix(self.softmax(self.hide(self.scores(q, k), mask)), v))


class FlaxAttention(nnx.Module):
    def __init__(self, **stages: Callable[..., Any]):
        flax_stages = dict(
            split=lambda x: x.reshape(*x.shape[:2], HEADS, -1).swapaxes(1, 2),
            scores=lambda q, k: q @ k.swapaxes(-2, -1) / q.shape[-1] ** 0.5,
            hide=lambda scores, mask: jnp.where(mask, -jnp.inf, scores),
            softmax=lambda scores: jax.nn.softmax(scores, -1),
            mix=lambda weights, v: weights @ v,
            merge=lambda x: x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1),
        )
        for name, function in (flax_stages | stages).items():
            setattr(self, name, FlaxStage(function))

    def __call__(self, q, k, v, mask):
        q, k, v = self.split(q), self.split(k), self.split(v)
        return self.merge(self.mix(self.softmax(self.hide(self.scores(q, k), mask)), v))


def normal(*shape: int, name: Any = 0) -> np.ndarray:
    return random("port faults", shape, name).standard_normal(shape).astype(np.float32)


def sequences() -> list[np.ndarray]:
    return [normal(N, LENGTH, HEADS * WIDTH, name=name) for name in "qkv"]


def causal(queries: int = LENGTH, keys: int = LENGTH) -> np.ndarray:
    """True hides; the last query sees all keys."""
    return np.triu(np.ones((queries, keys), bool), 1 + keys - queries)[None, None]


def filled(torch_model: nn.Module, flax_model: nnx.Module, **options: Any) -> tuple[nn.Module, nnx.Module]:
    """The pair with random numbers in every parameter, biases too, and the transfer's own doubts ignored."""
    with torch.no_grad():
        for name, p in torch_model.named_parameters():
            p.copy_(torch.from_numpy(normal(*p.shape, name=name)))
    flax_model.eval()
    parity.transfer(torch_model.eval(), flax_model, **options)
    return torch_model, flax_model


def accepted(
    torch_model: Any, flax_model: Any, *inputs: Any, levels: Any = ("structure", "wiring", "identical"), **options: Any
):
    report = parity.compare(torch_model, flax_model, *inputs, levels=levels, modes=("compiled",), **options)
    assert report.passed, str(report)
    return report


def refused(
    torch_model: Any,
    flax_model: Any,
    *inputs: Any,
    by: str,
    at: str | None,
    says: str = "",
    levels: Any = STEPS,
    **options: Any,
):
    """The report on a faulty pair: each level in `by` must fail, the trace must part at `at`.

    None stands for a fault that the trace, which runs in float64 and forwards, cannot see.
    """
    report = parity.compare(torch_model, flax_model, *inputs, levels=levels, modes=("compiled",), **options)
    failed = [result.level for result in report.levels if result.status == "failed"]
    assert set(by.split()) <= set(failed), str(report)
    assert not report.passed
    assert says in str(report)
    divergence = report.trace.first_divergence()
    assert (None if divergence is None else divergence.path) == at
    return report


def both(
    right: Callable[..., Any], wrong: Callable[..., Any], torch_function: Callable[..., Any], *inputs: Any, **options: Any
):
    """A pair of functions: the right port passes, the wrong one is refused at `core`."""
    levels = options.pop("levels", ("structure", "identical"))
    by, kwargs = options.pop("by", "identical"), options.pop("kwargs", None)
    accepted(TorchHolder(torch_function), FlaxHolder(right), *inputs, levels=levels, kwargs=kwargs)
    at = options.pop("at", "core")
    return refused(
        TorchHolder(torch_function), FlaxHolder(wrong), *inputs, by=by, at=at, levels=levels, kwargs=kwargs, **options
    )


def transfer_refused(source: Any, target: Any, *says: str, **options: Any) -> None:
    """Every sentence is told, and nothing is written."""
    before = leaves(target)
    with pytest.raises(parity.TransferError) as error:
        parity.transfer(source, target, **options)
    for sentence in says:
        assert sentence in str(error.value)
    assert all(np.array_equal(old, new) for old, new in zip(before, leaves(target), strict=True))


def leaves(model: Any) -> list[np.ndarray]:
    if isinstance(model, nn.Module):
        return [tensor.detach().numpy().copy() for tensor in model.state_dict().values()]
    return [np.array(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Not(nnx.RngState)))]


# ------------------------------------------------------------------------------ A. attention and masks


def attention_refused(at: str, by: str = "wiring identical", inputs: Any = None, mask: Any = None, **stages: Any):
    inputs, mask = inputs or sequences(), causal() if mask is None else mask
    return refused(TorchAttention(), FlaxAttention(**stages), *inputs, mask, by=by, at=at)


def test_A01_heads_merged_without_moving_their_axis_back():
    accepted(TorchAttention(), FlaxAttention(), *sequences(), causal())
    attention_refused("merge", merge=lambda x: x.reshape(x.shape[0], x.shape[2], -1))
    # The other wrong order: the features of a head before the heads.
    attention_refused("merge", merge=lambda x: x.transpose(0, 2, 3, 1).reshape(x.shape[0], x.shape[2], -1))


class LinenStage(linen.Module):
    function: Callable[..., Any]

    def __call__(self, *args):
        return self.function(*args)


class LinenAttention(linen.Module):
    """The steps of a `FlaxAttention`."""

    steps: dict[str, Callable[..., Any]]

    @linen.compact
    def __call__(self, q, k, v, mask):
        step = {name: LinenStage(function, name=name) for name, function in self.steps.items()}
        q, k, v = step["split"](q), step["split"](k), step["split"](v)
        return step["merge"](step["mix"](step["softmax"](step["hide"](step["scores"](q, k), mask)), v))


def in_linen(**stages: Callable[..., Any]) -> parity.Linen:
    steps = {name: stage.function for name, stage in vars(FlaxAttention(**stages)).items() if isinstance(stage, FlaxStage)}
    return parity.Linen(LinenAttention(steps), {})


@pytest.mark.parametrize(
    ("at", "by", "wrong"),
    [
        ("merge", "wiring identical", lambda x: x.reshape(x.shape[0], x.shape[2], -1)),  # A01
        ("split", "wiring identical", lambda x: x.reshape(x.shape[0], HEADS, x.shape[1], -1)),  # A02
        ("scores", "identical", lambda q, k: q @ k.swapaxes(-2, -1) / (HEADS * WIDTH) ** 0.5),  # A04
        ("hide", "wiring identical", lambda scores, mask: jnp.where(mask, scores, -jnp.inf)),  # A09
        ("hide", "wiring identical", lambda scores, mask: scores - 10 * mask.astype(scores.dtype)),  # A13
        ("softmax", "identical", lambda s: jax.nn.softmax(s.astype(jnp.bfloat16), -1).astype(s.dtype)),  # A20
    ],
)
def test_A01_and_others_of_its_kind_in_linen(at, by, wrong):
    accepted(TorchAttention(), in_linen(), *sequences(), causal())
    refused(TorchAttention(), in_linen(**{at: wrong}), *sequences(), causal(), by=by, at=at)


def test_A02_heads_split_by_a_bare_view():
    attention_refused("split", split=lambda x: x.reshape(x.shape[0], HEADS, x.shape[1], -1))
    # Right axes, but each head takes every second feature.
    attention_refused("split", split=lambda x: x.reshape(*x.shape[:2], -1, HEADS).transpose(0, 3, 1, 2))


@pytest.mark.parametrize("factor", [2**-0.5, 2**0.5, 1 + 1e-6])
def test_A04_scores_divided_by_another_root(factor):
    attention_refused("scores", "identical", scores=lambda q, k: q @ k.swapaxes(-2, -1) / q.shape[-1] ** 0.5 * factor)


def test_A05_a_fused_projection_travels_and_its_parts_are_told_apart():
    fused, module = nn.MultiheadAttention(8, 2), nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    with torch.no_grad():
        for name, p in fused.named_parameters():
            p.copy_(torch.from_numpy(normal(*p.shape, name=name)))
    done = parity.transfer(fused, module)
    assert {entry.source: entry.target for entry in done.plan}["in_proj_weight[k]"] == "key.kernel"
    w_q, b_k = fused.in_proj_weight.detach()[:8], fused.in_proj_bias.detach()[8:16]
    assert np.array_equal(np.asarray(module.query.kernel[...]), w_q.numpy().T.reshape(8, 2, 4))
    assert np.array_equal(np.asarray(module.key.bias[...]), b_k.numpy().reshape(2, 4))
    back = nn.MultiheadAttention(8, 2)
    parity.transfer(module, back)
    assert all(torch.equal(a, b) for a, b in zip(back.state_dict().values(), fused.state_dict().values()))
    # Split by hand into the mirror's own names the same weights travel, and every wrong split is seen.
    weights, biases = fused.in_proj_weight.detach().chunk(3), fused.in_proj_bias.detach().chunk(3)
    names = ("W_q", "W_k", "W_v")
    parts = {f"{n}.weight": w for n, w in zip(names, weights)} | {f"{n}.bias": b for n, b in zip(names, biases)}
    parts |= {"W_o.weight": fused.out_proj.weight.detach(), "W_o.bias": fused.out_proj.bias.detach()}
    torch_model, flax_model = mirrored(bias=True)
    torch_model.load_state_dict(parts)
    parity.transfer(parts, flax_model)
    x = torch.from_numpy(sequences()[0])
    expected = fused.eval()(*[x.swapaxes(0, 1)] * 3)[0].swapaxes(0, 1)
    assert parity.diff(torch_model(x, x, x)[0].detach(), expected.detach(), tolerance=1e-6).passed
    heads = weights[0].reshape(2, 4, 8)
    interleaved = fused.in_proj_weight.detach().reshape(2, 3, 4, 8)[:, 0].reshape(8, 8)
    wrong = {
        "not transposed": ("W_q.weight", weights[0].T),
        "head axis minor": ("W_q.weight", heads.swapaxes(0, 1).reshape(8, 8)),
        "one head's query, key, value together": ("W_q.weight", interleaved),
        "out kernel not transposed": ("W_o.weight", fused.out_proj.weight.detach().T),
        "key bias dropped": ("W_k.bias", torch.zeros(8)),
    }
    inputs = sequences()
    for fault, (leaf, array) in wrong.items():
        parity.transfer(parts | {leaf: array.contiguous()}, flax_model)
        by = "weights" if fault == "key bias dropped" else "weights identical"
        levels = ("weights", "identical")
        report = refused(torch_model, flax_model, *inputs, by=by, at=leaf.split(".")[0], levels=levels)
        assert report.level("weights").findings[0].where == leaf
        # A key bias moves all scores of a query alike: only the level `weights` can know.
        assert report.level("identical").passed == (fault == "key bias dropped")


def mirrored(**options: Any) -> tuple[nn.Module, nnx.Module]:
    return filled(
        torch_impl.MultiHeadAttention(8, 2, 4, 4, 4, **options),
        jax_impl.MultiHeadAttention(8, 2, 4, 4, 4, rngs=nnx.Rngs(0), **options),
    )


@pytest.mark.parametrize(
    ("options", "leaf"),
    [
        (dict(kdim=6, vdim=4), "v_proj_weight has shape (8, 4), so value.kernel must have"),
        (dict(add_bias_kv=True), "bias_k has no counterpart: nnx.MultiHeadAttention adds no learned key and value"),
        (dict(bias=False), "query.bias (2, 4) of the target gets nothing from the source"),
    ],
)
def test_A06_a_layout_of_torchs_attention_that_does_not_fit_is_refused_by_name(options, leaf):
    module = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    transfer_refused(nn.MultiheadAttention(8, 2, **options), module, leaf)


def test_A06_batch_and_length_taken_for_each_other():
    def torch_function(x):
        return torch.softmax(x @ x.transpose(-2, -1), -1) @ x

    def right(x):
        return jax.nn.softmax(x @ x.swapaxes(-2, -1), -1) @ x

    both(right, lambda x: right(x.swapaxes(0, 1)).swapaxes(0, 1), torch_function, normal(N, LENGTH, WIDTH), by="identical")


def rotated(x: Any, positions: Any, cat: Callable[..., Any], cos: Any, sin: Any) -> Any:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return cat([first * cos - second * sin, second * cos + first * sin], -1)


def test_A08_rotation_of_halves_and_of_neighbours():
    angles = np.arange(5)[:, None] * 10.0 ** -np.arange(4)

    def turn(x, xp, cat):
        cos, sin = (xp.asarray(f(angles)) for f in (np.cos, np.sin))
        return rotated(x, None, cat, cos if x.dtype == cos.dtype else cos.astype(x.dtype), sin.astype(x.dtype))

    def torch_function(q, k):
        cos, sin = (torch.from_numpy(f(angles)).to(q.dtype) for f in (np.cos, np.sin))
        q, k = (rotated(x, None, torch.cat, cos, sin) for x in (q, k))
        return q @ k.transpose(-2, -1)

    def neighbours(x):
        swapped = turn(jnp.concatenate([x[..., ::2], x[..., 1::2]], -1), jnp, jnp.concatenate)
        return jnp.stack([swapped[..., :4], swapped[..., 4:]], -1).reshape(x.shape)

    def right(q, k):
        return turn(q, jnp, jnp.concatenate) @ turn(k, jnp, jnp.concatenate).swapaxes(-2, -1)

    q, k = normal(N, 5, 8, name="q"), normal(N, 5, 8, name="k")
    report = both(right, lambda q, k: neighbours(q) @ neighbours(k).swapaxes(-2, -1), torch_function, q, k)
    # At the same position both turn query and key alike, so those scores are right in both.
    finding = report.level("identical").findings[0]
    assert finding.figures["differing"] == N * 20
    # Converted on one side only.
    both(right, lambda q, k: neighbours(q) @ turn(k, jnp, jnp.concatenate).swapaxes(-2, -1), torch_function, q, k)


def test_A09_a_mask_with_the_other_polarity():
    mask = np.array([[0, 0, 1], [0, 1, 1]], bool)[:, None, None]
    accepted(TorchAttention(), FlaxAttention(), *sequences(), mask)
    attention_refused("hide", mask=mask, hide=lambda scores, mask: jnp.where(mask, scores, -jnp.inf))


def test_A10_a_float_mask_is_added_here_and_a_switch_there():
    mask = np.array([[0, 0, 1], [0, 1, 1]], np.float32)[:, None, None]
    q, k, v = (normal(N, HEADS, LENGTH, WIDTH, name=name) for name in "qkv")

    def torch_function(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def flax_function(hide):
        def attend(q, k, v, mask):
            return jax.nn.softmax(hide(q @ k.swapaxes(-2, -1) / WIDTH**0.5, mask), -1) @ v

        return attend

    added = flax_function(lambda scores, mask: scores + mask.astype(scores.dtype))
    for wrong in (
        lambda scores, mask: jnp.where(mask != 0, scores, -jnp.inf),
        lambda scores, mask: jnp.where(mask != 0, -jnp.inf, scores),
    ):
        report = both(added, flax_function(wrong), torch_function, q, k, v, kwargs={"mask": mask})
        assert any("kwargs['mask'] is a floating point mask of 0 and 1" in str(note) for note in report.notes)


def test_A11_a_mask_over_batch_and_keys_is_no_mask_over_queries_and_keys():
    (q, k, v), mask = (normal(N, 4, 8, name=name) for name in "qkv"), np.zeros((N, 4), bool)
    torch_model, flax_model = mirrored()
    with pytest.raises(torch_impl.InputError, match=re.escape("needs mask[:, None, None, :]")):
        torch_model(*map(torch.from_numpy, (q, k, v)), torch.from_numpy(mask))
    with pytest.raises(jax_impl.InputError, match=re.escape("needs mask[:, None, None, :]")):
        flax_model(*map(jnp.asarray, (q, k, v)), jnp.asarray(mask))
    # As many sequences as queries: nothing raises, and the values are wrong.
    inputs, square = [normal(LENGTH, LENGTH, 8, name=name) for name in "qkv"], np.tril(np.ones((3, 3), bool), -1)

    def over_keys(scores, mask):
        return scores.masked_fill(mask[:, None, None], float("-inf"))

    right = FlaxAttention(hide=lambda scores, mask: jnp.where(mask[:, None, None], -jnp.inf, scores))
    accepted(TorchAttention(hide=over_keys), right, *inputs, square)
    refused(TorchAttention(hide=over_keys), FlaxAttention(), *inputs, square, by="wiring identical", at="hide")


POLICIES: dict[str, tuple[Any, Any]] = {
    "nan": (
        lambda scores, mask: torch.softmax(scores.masked_fill(mask, float("-inf")), -1),
        lambda scores, mask: jax.nn.softmax(jnp.where(mask, -jnp.inf, scores), -1),
    ),
    "zero": (
        lambda scores, mask: torch.softmax(scores.masked_fill(mask, -1e30), -1) * (~mask),
        lambda scores, mask: jax.nn.softmax(scores, -1, where=~mask),
    ),
    "average": (
        lambda scores, mask: torch.softmax(scores.masked_fill(mask, -1e30), -1),
        lambda scores, mask: jax.nn.softmax(jnp.where(mask, -1e30, scores), -1),
    ),
}


@pytest.mark.parametrize("expected", POLICIES)
def test_A12_a_query_that_sees_no_key(expected):
    mask = np.repeat(causal(), N, 0)
    mask[1, 0, 1] = True
    scores, kwargs = normal(N, HEADS, LENGTH, LENGTH), {"mask": mask}
    for name, (_, flax_function) in POLICIES.items():
        pair = TorchHolder(POLICIES[expected][0]), FlaxHolder(flax_function)
        if name == expected:
            accepted(*pair, scores, kwargs=kwargs, levels=("structure", "identical"))
            continue
        by = "structure" if "nan" in (name, expected) else "identical"
        says = "NaN or infinity at 6 places on one side only, first at (1, 0, 1, 0)" if by == "structure" else ""
        refused(*pair, scores, kwargs=kwargs, levels=("structure", "identical"), by=by, at="core", says=says)


def test_A13_a_constant_that_half_precision_cannot_hold():
    module = jax_impl.SelfAttention(8, 2, rngs=nnx.Rngs(0))
    nnx.update(module, jax.tree.map(lambda a: a.astype(jnp.float16), nnx.state(module)))
    x = jnp.asarray(sequences()[0], jnp.float16)
    with pytest.raises(jax_impl.InputError, match="-1e\\+20, which float16 cannot hold"):
        module(x, x, x, jnp.ones((LENGTH, LENGTH), bool))
    # Torch refuses; a mask that becomes minus infinity in silence does not.
    half, mask = normal(N, HEADS, LENGTH, LENGTH).astype(np.float16), {"mask": causal()}

    def torch_function(scores, mask):
        return torch.softmax(scores.masked_fill(mask, -1e20), -1)

    def silent(scores, mask):
        # What -1e20 becomes in float16.
        return jax.nn.softmax(jnp.where(mask, -jnp.inf, scores), -1)

    report = parity.compare(TorchHolder(torch_function), FlaxHolder(silent), half, kwargs=mask, levels="structure")
    assert "expected (torch) raises RuntimeError: value cannot be converted" in str(report)
    assert "actual (flax) returns" in str(report)
    assert not report.passed


def test_A13_a_constant_too_weak_to_hide():
    scores, mask = normal(N, HEADS, LENGTH, LENGTH), {"mask": causal()}
    scores[..., 2] += 12_000

    def hidden_by(value):
        return lambda scores, mask: jax.nn.softmax(jnp.where(mask, value + scores, scores), -1)

    def torch_function(scores, mask):
        return torch.softmax(scores.masked_fill(mask, -1e9), -1)

    both(hidden_by(-1e9), hidden_by(-1e4), torch_function, scores, kwargs=mask, levels=("structure", "identical"))


def test_A15_a_causal_mask_aligned_with_the_first_key():
    def attend(offset):
        def flax_function(q, k, v):
            weights = jnp.where(jnp.tril(jnp.ones((2, 4), bool), offset), q @ k.swapaxes(-2, -1), -jnp.inf)
            return jax.nn.softmax(weights, -1) @ v

        return flax_function

    def torch_function(q, k, v):
        seen = torch.ones(2, 4, dtype=torch.bool).tril(2)
        return torch.softmax((q @ k.transpose(-2, -1)).masked_fill(~seen, float("-inf")), -1) @ v

    inputs = normal(N, 2, WIDTH, name="q"), normal(N, 4, WIDTH, name="k"), normal(N, 4, WIDTH, name="v")
    levels = ("structure", "wiring", "identical")
    for offset in (0, 1, 3):
        both(attend(2), attend(offset), torch_function, *inputs, levels=levels, by="wiring identical")


class Stepwise(nnx.Module):
    """Attention over tokens that arrive one by one."""

    def __init__(self, **options: bool):
        self.core, self.options = nnx.MultiHeadAttention(HEADS, WIDTH, rngs=nnx.Rngs(0)), options
        self.core.init_cache((N, LENGTH, WIDTH))

    def __call__(self, x):
        self.core.init_cache(x.shape, x.dtype)
        return jnp.concatenate([self.core(x[:, t : t + 1], decode=True, **self.options) for t in range(LENGTH)], 1)


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        self.core = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x):
        return self.core(x, x, x, attn_mask=torch.from_numpy(causal()[0, 0]), need_weights=False)[0]


def test_A16_a_causal_mask_over_a_cache_of_keys():
    x, ignore = normal(N, LENGTH, WIDTH), ("core.cache*",)
    options = dict(levels=("weights", "identical"), ignore=ignore)
    accepted(*filled(Causal(), Stepwise(), ignore=ignore), x, **options)
    torch_model, flax_model = filled(Causal(), Stepwise(is_causal=True), ignore=ignore)
    report = parity.compare(torch_model, flax_model, x, **options)
    assert [result.status for result in report.levels] == ["passed", "failed"]
    # The first token sees one key either way.
    assert "worst at (" in str(report)


class TorchEncoder(nn.Module):
    def __init__(self, valid_only: bool, nested: bool = True):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 6, dropout=0.0, batch_first=True)
        self.core, self.valid_only = nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested), valid_only

    def forward(self, x, hidden):
        y = self.core(x, src_key_padding_mask=hidden)
        return y.masked_fill(hidden[..., None], 0) if self.valid_only else y


class FlaxEncoderLayer(nnx.Module):
    def __init__(self):
        rngs, norm = nnx.Rngs(0), dict(epsilon=1e-5, use_fast_variance=False)
        self.self_attn = nnx.MultiHeadAttention(HEADS, WIDTH, rngs=rngs)
        self.linear1, self.linear2 = nnx.Linear(WIDTH, 6, rngs=rngs), nnx.Linear(6, WIDTH, rngs=rngs)
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs, **norm), nnx.LayerNorm(WIDTH, rngs=rngs, **norm)

    def __call__(self, x, seen):
        x = self.norm1(x + self.self_attn(x, x, x, mask=seen[:, None, None], decode=False))
        return self.norm2(x + self.linear2(nnx.relu(self.linear1(x))))


class FlaxEncoder(nnx.Module):
    def __init__(self, valid_only: bool):
        self.core, self.valid_only = nnx.Dict(layers=nnx.List([FlaxEncoderLayer()])), valid_only

    def __call__(self, x, hidden):
        y = self.core.layers[0](x, ~hidden)
        return jnp.where(hidden[..., None], 0, y) if self.valid_only else y


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_A18_a_fused_encoder_that_writes_zeros_where_the_padding_is():
    x, hidden = normal(N, LENGTH, WIDTH), np.array([[False, False, True], [False, True, True]])
    levels = ("weights", "identical")
    accepted(*filled(TorchEncoder(True), FlaxEncoder(True)), x, hidden, levels=levels)
    # With the padding in its outputs it is not proved: torch's noise cannot be measured inside a nested tensor.
    torch_model, flax_model = filled(TorchEncoder(False), FlaxEncoder(False))
    report = parity.compare(torch_model, flax_model, x, hidden, levels=levels)
    assert [result.status for result in report.levels] == ["passed", "not run"]
    assert "NestedTensorImpl" in str(report)
    assert not report.passed
    with torch.no_grad():
        assert not torch_model(torch.from_numpy(x), torch.from_numpy(hidden))[hidden].any()
    # Without nested tensors the padding is computed like all else.
    accepted(*filled(TorchEncoder(False, nested=False), FlaxEncoder(False)), x, hidden, levels=levels)


def test_A20_softmax_in_another_precision():
    # Deployed in float32 a bfloat16 softmax is another function.
    attention_refused("softmax", "identical", softmax=lambda s: jax.nn.softmax(s.astype(jnp.bfloat16), -1).astype(s.dtype))
    # Deployed in bfloat16 torch rounds once. A softmax in bfloat16 throughout is within its noise; a sum
    # kept there for long rows is not: it stops growing when the next term is less than half its ulp.
    scores = np.zeros((N, HEADS, 1, 1024), jnp.bfloat16)
    scores[..., 1::2] = -1

    def narrow(s):
        e = jnp.exp(s - s.max(-1, keepdims=True))
        total = jax.lax.fori_loop(0, 1024, lambda i, t: t + e[..., i], jnp.zeros(e.shape[:-1], e.dtype))
        return e / total[..., None]

    def right(s):
        return jax.nn.softmax(s.astype(jnp.promote_types(s.dtype, jnp.float32)), -1).astype(s.dtype)

    both(right, narrow, lambda s: torch.softmax(s, -1), scores, levels=("structure", "native"), by="native", at=None)


def test_A21_a_mask_in_the_place_of_the_values(unchecked_shapes):
    torch_model, flax_model = mirrored()
    x, mask = sequences()[0], np.zeros((N, LENGTH, 8), bool)
    with pytest.raises(torch_impl.InputError, match="value must be floating point, got bool"):
        torch_model(torch.from_numpy(x), torch.from_numpy(x), torch.from_numpy(mask))
    with pytest.raises(jax_impl.InputError, match="value must be floating point, got bool"):
        flax_model(jnp.asarray(x), jnp.asarray(x), jnp.asarray(mask))


def test_A21_query_key_and_value_in_another_order():
    class Swapped(nnx.Module):
        def __init__(self, inner, order):
            self.inner, self.order = inner, order

        def __call__(self, *inputs):
            return self.inner(*(inputs[i] for i in self.order), jnp.asarray(causal()))

    torch_model = TorchHolder(lambda q, k, v: inner(q, k, v, torch.from_numpy(causal())))
    inner = TorchAttention()
    accepted(torch_model, Swapped(FlaxAttention(), (0, 1, 2)), *sequences(), levels="wiring")
    for order in ((1, 0, 2), (0, 2, 1)):
        report = parity.compare(torch_model, Swapped(FlaxAttention(), order), *sequences(), levels="wiring")
        assert report.level("wiring").status == "failed"


# ------------------------------------------------------------------------------ B. normalisation and activations


class TorchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, 8), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.up(x))


class FlaxNorm(nnx.Module):
    def __init__(self, **options: Any):
        options = dict(epsilon=1e-5, use_fast_variance=False) | options
        self.up, self.norm = nnx.Linear(WIDTH, 8, rngs=nnx.Rngs(0)), nnx.LayerNorm(8, rngs=nnx.Rngs(0), **options)

    def __call__(self, x):
        return self.norm(self.up(x))


def norms(offset: float = 0.0, **options: Any) -> tuple[nn.Module, nnx.Module]:
    torch_model, flax_model = filled(TorchNorm(), FlaxNorm(**options))
    with torch.no_grad():
        torch_model.up.bias += offset
    parity.transfer(torch_model, flax_model)
    return torch_model, flax_model


def wrong_epsilon(epsilon: float) -> None:
    x, levels = normal(N, LENGTH, WIDTH), ("weights", "structure", "identical")
    accepted(*norms(), x, levels=levels)
    torch_model, flax_model = norms(epsilon=epsilon)
    says = f"norm: eps=1e-05 in torch, epsilon={epsilon!r} in Flax; set epsilon=1e-05"
    assert parity.transfer(torch_model, flax_model).settings == (says,)
    refused(torch_model, flax_model, x, by="weights identical", at="norm", says=says, levels=levels)


def test_B01_the_epsilon_that_Flax_assumes():
    # Seen on rows of ordinary variance too, where it is a matter of a few ulp.
    wrong_epsilon(1e-6)


def test_B02_a_size_taken_for_an_epsilon():
    wrong_epsilon(8)


@pytest.mark.parametrize(
    ("torch_layer", "linen_layer", "says"),
    [
        (nn.LayerNorm(4), lambda: linen.LayerNorm(name="core"), "eps=1e-05 in torch, epsilon=1e-06 in Flax"),
        (nn.LayerNorm(4), lambda: linen.LayerNorm(4, name="core"), "eps=1e-05 in torch, epsilon=4 in Flax"),
        (nn.GroupNorm(2, 4), lambda: linen.GroupNorm(2, name="core"), "eps=1e-05 in torch, epsilon=1e-06 in Flax"),
        (
            nn.GroupNorm(2, 4),
            lambda: linen.GroupNorm(4, epsilon=1e-5, name="core"),
            "num_groups=2 in torch, num_groups=4 in Flax",
        ),
        (nn.RMSNorm(4), lambda: linen.RMSNorm(name="core"), "eps=None (the machine epsilon) in torch, epsilon=1e-06 in Flax"),
        (nn.Conv1d(4, 4, 3, 2, 1), lambda: linen.Conv(4, (3,), 2, name="core"), "padding='SAME' (at a stride above 1"),
        (nn.Conv1d(4, 4, 4), lambda: linen.Conv(4, (4,), name="core"), "padding='SAME', that is ((1, 2),) in Flax"),
        (nn.Embedding(4, 4, padding_idx=1), lambda: linen.Embed(4, 4, name="core"), "padding_idx=1 in torch"),
    ],
)
def test_B01_and_other_settings_that_linen_assumes(torch_layer, linen_layer, says):
    class Holder(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen_layer()(x)

    x = jnp.ones((2, 5), int) if isinstance(torch_layer, nn.Embedding) else jnp.ones((2, 5, 4))
    told = parity.transfer(TorchHolder(torch_layer), parity.Linen(Holder(), None, x))
    assert any(says in sentence for sentence in told.settings)


def test_B03_variance_as_a_difference_of_squares():
    x, levels = normal(N, LENGTH, WIDTH), ("weights", "native")
    accepted(*norms(1000.0), x, levels=levels)
    says = "use_fast_variance=True in Flax, wanted False"
    report = refused(*norms(1000.0, use_fast_variance=True), x, by="weights native", at="norm", says=says, levels=levels)
    assert report.level("native").figures["ratio"] > 10
    # Around zero the same setting loses nothing that could be measured: only `weights` knows.
    report = parity.compare(*norms(use_fast_variance=True), x, levels=levels, modes="compiled")
    assert [result.status for result in report.levels] == ["failed", "passed"]


def batch_norms() -> tuple[nn.Module, nnx.Module]:
    flax = nnx.BatchNorm(WIDTH, momentum=0.9, epsilon=1e-5, use_fast_variance=False, rngs=nnx.Rngs(0))
    return TorchHolder(nn.BatchNorm1d(WIDTH)), FlaxHolder(flax)


def after_a_step(torch_model: nn.Module, flax_model: nnx.Module, x: np.ndarray) -> None:
    """Both models, their statistics moved by the same batch."""
    torch_model.train()(torch.from_numpy(x))
    flax_model.train()
    flax_model(jnp.asarray(x))
    torch_model.eval()
    flax_model.eval()


def test_B04_a_variance_over_n_is_kept_for_evaluation():
    x = normal(4, WIDTH)
    torch_model, flax_model = batch_norms()
    told = parity.transfer(torch_model, flax_model).alone
    assert "in training nnx.BatchNorm stores the biased variance, torch n / (n - 1) times it" in str(told)
    after_a_step(torch_model, flax_model, x)
    report = refused(torch_model, flax_model, x, by="weights identical", at="core", levels=("weights", "identical"))
    assert {finding.where for finding in report.level("weights").findings} >= {"core.running_var"}
    # The corrected update: what was added by the batch, times n / (n - 1).
    variance = flax_model.core.var
    variance.set_value(0.9 + (variance[...] - 0.9) * 4 / 3)
    after = torch_model.core.running_var.numpy()
    np.testing.assert_allclose(variance[...], after, rtol=1e-6)


def test_B06_statistics_left_as_they_were_made():
    x = normal(4, WIDTH)
    torch_model, flax_model = batch_norms()
    after_a_step(torch_model, batch_norms()[1], x)
    flax_model.eval()
    parity.transfer(torch_model, flax_model)
    accepted(torch_model, flax_model, x, levels=("weights", "identical"))
    back = batch_norms()[0]
    parity.transfer(flax_model, back)
    assert torch.equal(back.core.running_var, torch_model.core.running_var)
    flax_model.core.mean.set_value(jnp.zeros(WIDTH))
    flax_model.core.var.set_value(jnp.ones(WIDTH))
    report = refused(torch_model, flax_model, x, by="weights identical", at="core", levels=("weights", "identical"))
    assert {finding.where for finding in report.level("weights").findings} == {"core.running_mean", "core.running_var"}


@pytest.mark.parametrize(
    ("right", "wrong", "torch_function"),
    [
        (lambda x: jax.nn.gelu(x, approximate=False), jax.nn.gelu, F.gelu),
        (jax.nn.gelu, lambda x: jax.nn.gelu(x, approximate=False), lambda x: F.gelu(x, approximate="tanh")),
        (lambda x: jax.nn.gelu(x, approximate=False), lambda x: x * jax.nn.sigmoid(1.702 * x), F.gelu),
        (lambda x: jax.nn.leaky_relu(x, 0.01), lambda x: jax.nn.leaky_relu(x, 0.02), F.leaky_relu),
        (jax.nn.silu, jax.nn.mish, F.silu),
    ],
)
def test_B07_an_activation_that_is_nearly_the_right_one(right, wrong, torch_function):
    both(right, wrong, torch_function, np.linspace(-4, 4, 24, dtype=np.float32).reshape(N, 12))


def normalised() -> nn.Module:
    torch.manual_seed(0)
    layer = parametrizations.weight_norm(nn.Linear(3, 4))
    with torch.no_grad():
        layer.parametrizations.weight.original0 *= 1.7
    return layer.eval()


def test_B08_a_normalised_weight_is_refused_in_pieces():
    layer, plain = normalised(), nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    transfer_refused(layer, plain, "remove_parametrizations", "kernel (3, 4) of the target gets nothing")
    x, levels = normal(N, 3), ("weights", "structure", "identical")
    direction = {"weight": layer.parametrizations.weight.original1.detach(), "bias": layer.bias.detach()}
    parity.transfer(layer, plain, merge="weight_norm")
    parametrize.remove_parametrizations(layer, "weight")
    accepted(layer, plain, x, levels=levels)
    parity.transfer(direction, plain)
    refused(layer, plain, x, by="weights identical", at="", levels=levels)


def test_B08_the_scale_of_a_normalised_weight_is_not_left_at_one():
    layer = normalised()
    wrapped = nnx.WeightNorm(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), epsilon=0.0, rngs=nnx.Rngs(0))
    x, levels = normal(N, 3), ("weights", "structure", "identical")
    parity.transfer(layer, wrapped)
    accepted(layer, wrapped, x, levels=levels)
    wrapped.scales = nnx.data({("kernel",): jnp.ones(4)})
    report = parity.compare(layer, wrapped, x, levels=levels)
    assert [result.status for result in report.levels] == ["failed", "passed", "failed"]
    assert report.level("weights").findings[0].where == "parametrizations.weight.original0"


@pytest.mark.parametrize("name", ["std", "var"])
def test_B10_deviation_over_n(name):
    x = normal(N, 7)
    right = lambda x: (x - x.mean(-1, keepdims=True)) / getattr(jnp, name)(x, axis=-1, keepdims=True, ddof=1)  # noqa: E731
    wrong = lambda x: (x - x.mean(-1, keepdims=True)) / getattr(jnp, name)(x, axis=-1, keepdims=True)  # noqa: E731
    both(right, wrong, lambda x: (x - x.mean(-1, keepdim=True)) / getattr(x, name)(-1, keepdim=True), x)


# ------------------------------------------------------------------------------ C. layout


class TorchFlatten(nn.Module):
    def __init__(self):
        super().__init__()
        self.flat, self.head = TorchStage(lambda x: x.flatten(1)), nn.Linear(12, WIDTH)

    def forward(self, x):
        return self.head(self.flat(x))


class FlaxFlatten(nnx.Module):
    def __init__(self, *axes: int):
        self.flat = FlaxStage(lambda x: x.transpose(0, *axes).reshape(x.shape[0], -1))
        self.head = nnx.Linear(12, WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.head(self.flat(x))


class ChannelsLast(nnx.Module):
    def __init__(self, core: nnx.Module):
        self.core = core

    def __call__(self, x):
        return jnp.moveaxis(self.core(jnp.moveaxis(x, 1, -1)), -1, 1)


@pytest.mark.parametrize(("kernel", "size"), [(3, 8), (7, 16)])
def test_C01_padding_that_is_larger_at_one_end(kernel, size):
    def pair(padding: Any) -> tuple[nn.Module, nnx.Module]:
        flax = nnx.Conv(2, 3, (kernel, kernel), 2, padding=padding, rngs=nnx.Rngs(0))
        return filled(TorchHolder(nn.Conv2d(2, 3, kernel, 2, kernel // 2)), ChannelsLast(flax))

    x, levels = normal(N, 2, size, size), ("weights", "identical")
    accepted(*pair(((kernel // 2,) * 2,) * 2), x, levels=levels)
    says = "at a stride above 1 its numbers depend on the input's size"
    refused(*pair("SAME"), x, by="weights identical", at="core", says=says, levels=levels)


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(4, 4, 0), (3, 2, 1), (4, 2, 1), (3, 1, 1)])
def test_C04_a_transposed_kernel_that_is_not_turned_round(kernel, stride, padding):
    def pair(transpose: bool) -> tuple[nn.Module, nnx.Module]:
        numbers = ((kernel - 1 - padding,) * 2,) * 2
        options = dict(padding=numbers, transpose_kernel=transpose, rngs=nnx.Rngs(0))
        flax = nnx.ConvTranspose(3, 3, (kernel, kernel), stride, **options)
        return filled(TorchHolder(nn.ConvTranspose2d(3, 3, kernel, stride, padding)), ChannelsLast(flax))

    x, levels = normal(N, 3, 4, 4), ("weights", "identical")
    for transpose in (True, False):
        torch_model, flax_model = pair(transpose)
        accepted(torch_model, flax_model, x, levels=levels)
        kernel_ = flax_model.core.kernel
        kernel_.set_value(kernel_[...][::-1, ::-1])
        refused(torch_model, flax_model, x, by="weights identical", at="core", levels=levels)


def test_C08_a_depthwise_convolution_has_the_same_gradients():
    def pair(groups: int) -> tuple[nn.Module, nnx.Module]:
        flax = nnx.Conv(4, 4, (4,), padding=((3, 0),), feature_group_count=groups, rngs=nnx.Rngs(0))
        torch_model = nn.Sequential(nn.ConstantPad1d((3, 0), 0.0), nn.Conv1d(4, 4, 4, groups=groups))
        return filled(torch_model, ChannelsLast(flax), rename={"1": "core"})

    torch_model, flax_model = pair(4)
    x, options = normal(N, 4, 6), dict(levels=("identical", "gradients"), rename={"1": "core"})
    accepted(torch_model, flax_model, x, **options)
    kernel = flax_model.core.kernel
    kernel.set_value(kernel[...][::-1])
    report = parity.compare(torch_model, flax_model, x, **options)
    assert [result.status for result in report.levels] == ["failed", "failed"]


def test_C05_channels_flattened_last():
    x = normal(N, 3, 2, 2)
    accepted(*filled(TorchFlatten(), FlaxFlatten(1, 2, 3)), x)
    for axes in ((2, 3, 1), (1, 3, 2)):
        refused(*filled(TorchFlatten(), FlaxFlatten(*axes)), x, by="wiring identical", at="flat")


def test_C06_zeros_of_the_padding_counted():
    def pooled(count):
        def flax_function(x):
            channels_last = nnx.avg_pool(x.swapaxes(1, 2), (3,), (1,), [(1, 1)], count_include_pad=count)
            return channels_last.swapaxes(1, 2)

        return flax_function

    for count in (True, False):
        torch_function = lambda x, count=count: F.avg_pool1d(x, 3, 1, 1, count_include_pad=count)  # noqa: E731
        both(pooled(count), pooled(not count), torch_function, normal(N, 3, 5), levels="identical")


# ------------------------------------------------------------------------------ D. state dict, checkpoints, transfer


def linears() -> tuple[nn.Module, nnx.Module]:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), nnx.Sequential(
        nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    )


@pytest.mark.parametrize("prefix", ["model", "module", "_orig_mod"])
def test_D01_a_prefix_on_one_side(prefix):
    torch_model, flax_model = linears()
    prefixed = {f"{prefix}.{name}": tensor for name, tensor in torch_model.state_dict().items()}
    assert f"every name of the source begins with {prefix!r}" in parity.transfer(prefixed, flax_model).notes[0]
    assert parity.compare(torch_model.eval(), flax_model, normal(3, 2), levels="weights").passed
    assert parity.transfer(prefixed, flax_model, rename={prefix: ""}).passed
    # Of no wrapper that is known, or not in front of all names: never dropped in silence.
    ours = {f"ours.{name}": tensor for name, tensor in torch_model.state_dict().items()}
    hint = "4 names of the source fit without 'ours' in front of them; pass rename={'ours': ''}"
    transfer_refused(ours, flax_model, hint, "ours.0.weight", "layers.0.kernel (2, 2) of the target gets nothing")
    more = prefixed | {"head.weight": torch.ones(2)}
    # Nobody calls a layer _orig_mod: that one is left out wherever it stands.
    others = () if prefix == "_orig_mod" else (f"{prefix}.0.weight", "layers.0.kernel (2, 2) of the target gets nothing")
    transfer_refused(more, flax_model, "head.weight (2,) of the source has no counterpart", *others)
    assert parity.compare(torch_model.eval(), flax_model, normal(3, 2), levels="weights").passed


class TorchTied(nn.Module):
    def __init__(self, tied: bool = True):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


class FlaxTied(nnx.Module):
    def __init__(self, tied: bool):
        self.embed = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
        if not tied:
            self.head = nnx.Linear(3, 5, use_bias=False, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.head(self.embed(x)) if hasattr(self, "head") else self.embed.attend(self.embed(x))


def test_D03_embeddings_tied_on_one_side():
    x, levels = np.array([[0, 1, 1], [4, 2, 0]]), ("weights", "structure", "identical", "gradients")
    accepted(*filled(TorchTied(), FlaxTied(tied=True)), x, levels=levels)
    report = refused(*filled(TorchTied(), FlaxTied(tied=False)), x, by="weights", at=None, levels=levels)
    assert "embed.weight and head.weight are one array, but embed.embedding and head.kernel are separate" in str(report)
    # Outputs are equal, so nothing but the tie and its gradient can tell.
    assert report.level("identical").passed
    transfer_refused(TorchTied(tied=False), FlaxTied(tied=True), "head.weight (5, 3) of the source has no counterpart")


class TorchBuffer(nn.Module):
    def __init__(self, persistent: bool, value: float = 1.0):
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("pe", torch.full((WIDTH,), value), persistent=persistent)
        self.line.requires_grad_()

    def forward(self, x):
        return self.line(x + self.pe)


class FlaxBuffer(nnx.Module):
    def __init__(self, value: float = 1.0):
        self.line, self.value = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), value

    def __call__(self, x):
        return self.line(x + jnp.full((WIDTH,), self.value, x.dtype))


def test_D04_a_buffer_that_the_port_computes():
    transfer_refused(TorchBuffer(True), FlaxBuffer(), "pe (4,) of the source has no counterpart")
    x, levels = normal(N, WIDTH), ("weights", "structure", "identical")
    for persistent, ignore in ((True, ("pe",)), (False, ())):
        for value in (1.0, 1.0 + 2**-20):
            torch_model, flax_model = TorchBuffer(persistent).eval(), FlaxBuffer(value)
            report = parity.transfer(torch_model, flax_model, ignore=ignore)
            assert report.ignored == ignore
            if value == 1:
                accepted(torch_model, flax_model, x, levels=levels, ignore=ignore)
            else:
                refused(torch_model, flax_model, x, by="identical", at="line", levels=levels, ignore=ignore)


def test_D05_ten_stands_behind_two():
    def stack():
        torch_model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(11)))
        return filled(torch_model, nnx.Sequential(*(nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(11))))

    torch_model, flax_model = stack()
    x, levels = normal(N, 2), ("weights", "structure", "identical")
    accepted(torch_model, flax_model, x, levels=levels)
    # What a sort of the names as text does: 0, 1, 10, 2, 3, ...
    order = sorted(range(11), key=str)
    flax_model.layers = nnx.List([flax_model.layers[i] for i in order])
    report = refused(torch_model, flax_model, x, by="weights identical", at="2", levels=levels)
    assert report.level("weights").findings[0].where == "2.weight"


@pytest.mark.parametrize("axis", [0, 1])
def test_D06_layers_stacked_along_an_axis_are_refused_until_the_axis_is_named(axis):
    separate = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    stacked = {
        "layers.kernel": torch.stack([layer.weight.detach().T for layer in separate], axis),
        "layers.bias": torch.stack([layer.bias.detach() for layer in separate], axis),
    }
    target = nnx.Sequential(*(nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(3)))
    transfer_refused(stacked, target, "layers.kernel", "has no counterpart", "layers.2.bias (4,) of the target gets nothing")
    rename = {f"layers.{end}[{':, ' * axis}{{i}}]": f"layers.{{i}}.{end}" for end in ("kernel", "bias")}
    rename["layers.kernel[" + ":, " * axis + "{i}]"] += " | as is"
    parity.transfer(stacked, target, rename=rename)
    assert parity.compare(separate.eval(), target, normal(3, 4), levels="weights").passed
    scanned = nnx.vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs), axis_size=3)(nnx.Rngs(0).split(3))
    transfer_refused(separate[0], scanned, "weight has shape (4, 4), so kernel must have (4, 4), but it has (3, 4, 4)")


class ScannedLayer(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        return jnp.tanh(linen.Dense(4, name="0")(x)), None


class Scanned(linen.Module):
    axis: int

    @linen.compact
    def __call__(self, x):
        layers = linen.scan(ScannedLayer, variable_axes={"params": self.axis}, split_rngs={"params": True}, length=3)
        return layers(name="h")(x, None)[0]


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        for layer in self.h:
            x = layer(x)
        return x


@pytest.mark.parametrize("axis", [0, 1])
def test_D06_layers_of_a_scan_in_linen_and_in_reverse(axis):
    separate, x, rename = Stack().eval(), normal(3, 4), {"h.{i}": "h[" + ":, " * axis + "{i}]"}
    empty = parity.Linen(Scanned(axis), None, x)
    with pytest.raises(parity.TransferError, match=re.escape(f"in a stack; if so, pass rename={rename}")):
        parity.transfer(separate, empty)
    scanned = parity.transfer(separate, empty, rename=rename).value
    levels = ("weights", "structure", "identical")
    accepted(separate, scanned, x, levels=levels, rename=rename)
    reverse = jax.tree.map(lambda array: jnp.flip(array, axis), scanned.variables)
    report = parity.compare(separate, parity.Linen(Scanned(axis), reverse), x, levels=levels, rename=rename)
    assert [result.status for result in report.levels] == ["failed", "passed", "failed"]
    assert {finding.where[:4] for finding in report.level("weights").findings} == {"h.0.", "h.2."}


def test_D07_bfloat16_keeps_every_bit():
    numbers = torch.tensor([[1, 3.14159, -2e-3]]).bfloat16()
    torch_model = nn.Linear(3, 1).bfloat16()
    with torch.no_grad():
        torch_model.weight.copy_(numbers)
    flax_model = nnx.Linear(3, 1, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert [entry.target_dtype for entry in parity.transfer(torch_model, flax_model).plan] == ["bfloat16"] * 2
    assert parity.diff(flax_model.kernel[...].T, numbers).passed
    assert parity.compare(torch_model.eval(), flax_model, numbers, levels="weights").passed
    # Never widened or rounded unasked.
    wide = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    transfer_refused(torch_model, wide, "weight is bfloat16 and kernel float32", 'pass cast="target"')
    parity.transfer(torch_model, wide, cast="target")
    report = parity.compare(torch_model, wide, numbers, levels="weights")
    assert "bfloat16 in torch, float32 in Flax" in str(report)


@pytest.mark.parametrize("extra", ["lora_A.weight", "lora_B.weight", "weight_scale", "base_layer.weight"])
def test_D10_an_adapter_is_not_left_behind(extra):
    state = nn.Linear(3, 4).state_dict() | {extra: torch.ones(2, 3)}
    transfer_refused(state, nnx.Linear(3, 4, rngs=nnx.Rngs(0)), f"{extra} (2, 3) of the source has no counterpart")


class Adapted(nn.Module):
    """A linear layer with an adapter, under the names of peft."""

    def __init__(self, alpha: float = 16.0):
        super().__init__()
        self.base_layer, self.scaling = nn.Linear(3, 4), {"default": alpha / 2}
        self.lora_A = nn.ModuleDict({"default": nn.Linear(3, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 4, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * self.scaling["default"]


def test_D10_an_adapter_is_merged_once_with_its_scale():
    source, target = TorchHolder(Adapted()), FlaxHolder(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
    transfer_refused(source, target, "torch computes core.weight from core.base_layer.weight", 'pass merge="lora"')
    done = parity.transfer(source, target, merge="lora")
    assert "core.weight is merged from core.base_layer.weight" in str(done)
    x, levels = normal(N, 3), ("native",)
    accepted(source, target, x, levels=levels)
    layer = source.core
    base, a, b = (p.detach().numpy() for p in (layer.base_layer.weight, *layer.lora_A.parameters(), *layer.lora_B.parameters()))
    for wrong in (base, base + b @ a, base + 2 * 8 * b @ a):
        target.core.kernel.set_value(jnp.asarray(wrong.T))
        assert not parity.compare(source, target, x, levels=levels).passed


def test_D10_a_quantised_weight_is_refused():
    state = {"weight": torch.zeros(4, 3, dtype=torch.uint8), "weight.absmax": torch.ones(1), "weight.quant_map": torch.ones(16)}
    transfer_refused(state, nnx.Linear(3, 4, rngs=nnx.Rngs(0)), "the weight was quantised by bitsandbytes")


def test_D11_shards_are_read_one_after_the_other_and_a_missing_one_is_named(tmp_path):
    torch_model, flax_model = linears()
    names = list(torch_model.state_dict())
    index = {name: f"model-{i // 2 + 1:05d}-of-00002.safetensors" for i, name in enumerate(names)}
    for shard in set(index.values()):
        save_file({name: torch_model.state_dict()[name] for name in names if index[name] == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    parity.transfer(tmp_path, flax_model)
    accepted(torch_model.eval(), flax_model, normal(N, 2), levels=("weights", "identical"))
    (tmp_path / index[names[-1]]).unlink()
    with pytest.raises(parity.InputError, match=r"model-00002-of-00002\.safetensors"):
        parity.transfer(tmp_path, flax_model)


def test_D12_names_of_old_checkpoints():
    torch_model = nn.Sequential(nn.LayerNorm(3), nn.LayerNorm(3))
    old = {
        name.replace("weight", "gamma").replace("bias", "beta"): torch.from_numpy(normal(3, name=name))
        for name in torch_model.state_dict()
    }
    norm = dict(epsilon=1e-5, use_fast_variance=False)
    target = nnx.Sequential(*(nnx.LayerNorm(3, rngs=nnx.Rngs(0), **norm) for _ in range(2)))
    transfer_refused(
        old, target, "0.gamma (3,) of the source has no counterpart", "layers.1.bias (3,) of the target gets nothing"
    )
    parity.transfer(old, target, rename={"{i}.gamma": "layers.{i}.scale", "{i}.beta": "layers.{i}.bias"})
    for i in range(2):
        assert np.array_equal(target.layers[i].scale[...], old[f"{i}.gamma"])
        assert np.array_equal(target.layers[i].bias[...], old[f"{i}.beta"])


def test_D13_a_cell_with_a_bias_too_few_is_refused():
    cell = nnx.GRUCell(3, 4, rngs=nnx.Rngs(0))
    transfer_refused(nn.GRUCell(3, 4), cell, "bias_hh has no counterpart: nnx.GRUCell has no bias inside the reset gate")
    report = parity.compare(nn.GRUCell(3, 4).eval(), cell, normal(N, 3), levels="weights")
    assert report.level("weights").status == "failed"


class CellHolder(FlaxHolder):
    def __call__(self, x, h):
        return self.core(h, x)[0]


def test_D13_gates_keep_their_order_where_the_bias_inside_is_0():
    source, target = TorchHolder(nn.GRUCell(3, 4)), CellHolder(nnx.GRUCell(3, 4, rngs=nnx.Rngs(0)))
    with torch.no_grad():
        source.core.bias_hh[8:] = 0
    parity.transfer(source, target, merge="recurrent biases")
    x, h = normal(N, 3), normal(N, 4)
    accepted(source, target, x, h, levels=("native",))
    kernel = target.core.dense_h.kernel
    kernel.set_value(kernel[...][:, [*range(4, 8), *range(4), *range(8, 12)]])
    assert not parity.compare(source, target, x, h, levels=("native",)).passed


@pytest.mark.parametrize("size", [4, 256])
def test_D15_a_later_write_stays_on_its_side(size):
    torch_model, flax_model = filled(nn.Linear(size, size), nnx.Linear(size, size, rngs=nnx.Rngs(0)))
    before = leaves(flax_model)
    with torch.no_grad():
        torch_model.weight.mul_(0)
        torch_model.bias.add_(1)
    assert all(np.array_equal(a, b) for a, b in zip(before, leaves(flax_model)))
    report = parity.compare(torch_model, flax_model, normal(N, size), levels="weights")
    assert {finding.where for finding in report.level("weights").findings} == {"weight", "bias"}
    parity.transfer(flax_model, torch_model)
    with torch.no_grad():
        torch_model.weight.mul_(0)
    assert all(np.array_equal(a, b) for a, b in zip(before, leaves(flax_model)))


def steps_taken(torch_model: nn.Module, optimizer: torch.optim.Optimizer, grads: dict[str, list[np.ndarray]], steps: range):
    for step in steps:
        for name, p in torch_model.named_parameters():
            p.grad = torch.from_numpy(grads[name][step])
        optimizer.step()


def test_D16_a_run_goes_on_with_its_moments_and_its_count():
    torch_model, flax_model = nn.Linear(3, 4), nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    grads = {name: [normal(*p.shape, name=(name, i)) for i in range(4)] for name, p in torch_model.named_parameters()}
    optimizer = torch.optim.Adam(torch_model.parameters(), lr=0.1)
    steps_taken(torch_model, optimizer, grads, range(3))
    parity.transfer(torch_model, flax_model)
    twin, params = parity.to_optax(optimizer), nnx.state(flax_model, nnx.Param)
    fresh = twin.init(params)
    state = parity.transfer_optimizer(optimizer, fresh, torch_model, flax_model).value
    late = {"kernel": grads["weight"][3].T, "bias": grads["bias"][3]}
    gradient = jax.tree.map_with_path(lambda path, _: jnp.asarray(late[path[0].key]), params)
    steps_taken(torch_model, optimizer, grads, range(3, 4))
    expected = torch_model.weight.detach().numpy().T

    def away(state: Any) -> float:
        updates, _ = twin.update(gradient, state, params)
        return float(np.abs(optax.apply_updates(params, updates)["kernel"][...] - expected).max())

    assert away(state) < 1e-6
    # Moments whose count begins anew, and no moments at all.
    counted = jax.tree.map(lambda new, old: old if new.ndim == 0 else new, state, fresh)
    assert away(counted) > 0.01
    assert away(fresh) > 0.01


# ------------------------------------------------------------------------------ E. precision


def cut(x: jax.Array, bits: int) -> jax.Array:
    """Fewer bits of mantissa in float32, as a tensor core takes them; float64 stays."""
    return jax.lax.reduce_precision(x, 8, bits) if x.dtype == jnp.float32 else x


@pytest.mark.parametrize(("fault", "bits"), [("E01", 10), ("E02", 7)])
def test_E01_products_of_cut_numbers(fault, bits):
    a, b = normal(N, 4, 768, name="a"), normal(N, 768, 4, name="b")
    report = both(
        lambda a, b: a @ b,
        lambda a, b: cut(a, bits) @ cut(b, bits),
        lambda a, b: a @ b,
        *(a, b),
        levels=("structure", "identical", "native"),
        by="native",
        at=None,
    )
    # In float64 the two are the same function.
    assert report.level("identical").passed
    assert report.level("native").figures["ratio"] > 10
    assert report.environment["jax matmul precision"] == "highest"


def test_E02_products_in_bfloat16():
    a, b = np.float32([[[0.3744, 0.1656], [0.4707, 0.1663]]]), np.float32([[[0.3946, 0.1186], [0.1569, 0.3145]]])

    def wrong(a, b):
        return (a.astype(jnp.bfloat16) @ b.astype(jnp.bfloat16)).astype(a.dtype)

    both(lambda a, b: a @ b, wrong, lambda a, b: a @ b, a, b, levels=("identical", "native"), by="identical native")


def test_E03_only_the_compiled_program_is_wrong():
    def compiled_only(x):
        return cut(x, 7) if isinstance(x, jax.core.Tracer) else x

    x, torch_model, flax_model = normal(N, 8), TorchHolder(lambda x: x + 0), FlaxHolder(compiled_only)
    report = parity.compare(torch_model, flax_model, x, levels="native", modes=("compiled", "eager"))
    assert [finding.where for finding in report.level("native").findings] == ["output (compiled)"]
    assert parity.compare(torch_model, flax_model, x, levels="native", modes="eager").passed


def test_E04_float64_that_is_not():
    wide, narrow = nn.Linear(4, 4).double().eval(), nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    x = normal(N, 4).astype(np.float64)
    with pytest.raises(parity.InputError, match="jax runs without 64-bit types"):
        parity.compare(wide, narrow, x)
    transfer_refused(wide, narrow, "weight is float64 and kernel float32")
    transfer_refused(wide, narrow, "would be cut from float64 to 32 bits", cast="source")
    with jax.enable_x64(True):
        parity.transfer(wide, narrow, cast="source")
        accepted(wide, narrow, x, levels=("weights", "structure", "native"))
        # A dtype of the layer's own cuts what it is given.
        cutting = nnx.Linear(4, 4, dtype=jnp.float32, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        parity.transfer(wide, cutting)
        says = "dtype=float32 makes the Flax layer compute in float32, torch computes in float64"
        levels = ("weights", "structure", "native")
        report = parity.compare(wide, cutting, x, levels=levels, modes="compiled")
    assert [result.status for result in report.levels] == ["failed"] * 3
    assert says in str(report)


def test_E06_another_order_of_summation_is_no_fault():
    def halves(x):
        middle = x.shape[-1] // 2
        return x[..., :middle].sum(-1) + x[..., middle:].sum(-1)

    x, levels = normal(N, 64, 512), ("structure", "identical", "native")
    # A running sum of 512 values is allowed to be 2**-20 off: from 2**-18 on the level `native` sees a factor.
    both(halves, lambda x: halves(x) * (1 + 2**-18), lambda x: x.sum(-1), x, levels=levels, by="identical native")
    # One row alone and the same row in a batch.
    one_by_one = lambda x, w: jnp.stack([row[None] @ w for row in x])[:, 0]  # noqa: E731
    rows, w = normal(8, 512, name="rows"), normal(512, 16, name="w")
    accepted(TorchHolder(lambda x, w: x @ w), FlaxHolder(one_by_one), rows, w, levels=("identical", "native"))


# ------------------------------------------------------------------------------ F. gradients and edge values

# The place, torch's function, one with its gradient there, and Flax's own or a natural one with another.
KINKS: dict[str, tuple[float, Any, Any, Any]] = {
    "relu": (0.0, torch.relu, jax.nn.relu, lambda x: jnp.maximum(x, 0)),
    "abs": (0.0, torch.abs, lambda x: jnp.where(x == 0, 0 * x, jnp.abs(x)), lambda x: jnp.where(x >= 0, x, -x)),
    "clamp": (
        *(1.0, lambda x: x.clamp(-1, 1)),
        lambda x: jnp.where(x > 1, 1.0, jnp.where(x < -1, -1.0, x)),
        lambda x: jnp.clip(x, -1, 1),
    ),
    "leaky_relu": (0.0, F.leaky_relu, lambda x: jnp.where(x > 0, x, 0.01 * x), jax.nn.leaky_relu),
    "hardtanh": (
        *(1.0, F.hardtanh),
        lambda x: jnp.where((x >= 1) | (x <= -1), jnp.sign(x), x),
        lambda x: jnp.where(x > 1, 1.0, x),
    ),
}


@pytest.mark.parametrize("name", KINKS)
def test_F02_the_gradient_at_a_kink(name):
    place, torch_function, right, wrong = KINKS[name]
    levels, x = ("structure", "identical", "gradients"), np.clip(normal(N, 6), -0.9, 0.9)
    # Away from the kink both conventions are right.
    for flax_function in (right, wrong):
        accepted(TorchHolder(torch_function), FlaxHolder(flax_function), x, levels=levels)
    x[0, 2] = place
    report = both(right, wrong, torch_function, x, levels=levels, by="gradients", at=None)
    assert report.level("identical").passed
    assert "gradient of input args[0]: 1 of 12 values differ" in str(report)
    assert "worst at (0, 2)" in str(report)


def test_F03_a_gradient_that_is_zero_in_exact_arithmetic():
    torch_model, flax_model = mirrored(bias=True)
    levels = ("weights", "identical", "gradients")
    report = accepted(torch_model, flax_model, *sequences(), levels=levels)
    assert "zero in exact arithmetic, so that both sides show rounding alone: W_k.bias" in report.level("gradients").notes
    # The converse: no output shows a wrong key bias, so the level below the outputs has to.
    flax_model.W_k.bias.set_value(jnp.zeros(8))
    report = refused(torch_model, flax_model, *sequences(), by="weights", at="W_k", levels=levels)
    assert report.level("identical").passed
    assert report.level("weights").findings[0].where == "W_k.bias"


class FlaxPadded(nnx.Module):
    def __init__(self, stop: bool):
        self.embed, self.stop = nnx.Embed(4, 2, rngs=nnx.Rngs(0)), stop

    def __call__(self, x):
        rows = self.embed(x)
        return jnp.where((x == 0)[..., None], jax.lax.stop_gradient(rows), rows) if self.stop else rows


class TorchPadded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 2, padding_idx=0)

    def forward(self, x):
        return self.embed(x)


def test_F04_the_gradient_of_the_padding_row():
    x, levels = np.array([[0, 1, 1], [2, 0, 3]]), ("structure", "identical", "gradients")
    accepted(*filled(TorchPadded(), FlaxPadded(stop=True)), x, levels=levels)
    report = refused(*filled(TorchPadded(), FlaxPadded(stop=False)), x, by="gradients", at=None, levels=levels)
    assert report.level("identical").passed
    assert "gradient of embed.weight: 2 of 8 values differ" in str(report)
    assert "worst at (0, " in str(report)
    # The setting is told already by the transfer.
    (setting,) = parity.transfer(TorchPadded(), FlaxPadded(stop=False)).settings
    assert "embed: padding_idx=0 in torch" in setting


def test_F06_measures_that_look_away():
    nan = np.array([1, np.nan])
    assert parity.diff({"a": nan}, {"a": nan}).passed
    assert not parity.diff(np.array([-5.0, 1]), np.array([5.0, 1]), tolerance=0.1).passed
    assert not parity.diff(np.array([1, np.nan]), np.array([1, 2.0]), tolerance=1e9).passed
    assert not parity.diff(np.array([1, np.inf]), np.array([1, -np.inf]), tolerance=1e9).passed
    assert "shape (3, 1), expected (3,)" in str(parity.diff(np.ones((3, 1)), np.ones(3), tolerance=1.0))
    assert "float64" in str(parity.diff(np.ones(3), np.ones(3, np.float32), tolerance=1.0))
    x, levels = normal(N, 3), ("structure", "identical")
    both(lambda x: x, lambda x: -x, lambda x: x + 0, x, levels=levels, by="identical")
    both(lambda x: x, lambda x: x.at[1, 2].set(jnp.nan), lambda x: x + 0, x, levels=levels, by="structure")
    both(lambda x: x, lambda x: x[..., None], lambda x: x + 0, x, levels=levels, by="structure")


# ------------------------------------------------------------------------------ G. training


# The measured gap, relative: the epsilon beside the norm.
@pytest.mark.parametrize(
    ("gradient", "max_norm", "gap"), [((0.03, 0.04), 0.01, 2.0e-5), ((6e-5, 8e-5), 1e-4, 9.9e-3), ((3.0, 4.0), 5.0, 2.0e-7)]
)
def test_G01_clipping_without_torchs_epsilon(gradient, max_norm, gap):
    with jax.enable_x64(True):
        p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        p.grad = torch.tensor(gradient, dtype=torch.float64)
        nn.utils.clip_grad_norm_(p, max_norm)
        grads = {"p": jnp.array(gradient)}

        def away(clip: Any) -> float:
            return float(np.abs(clip.update(grads, clip.init(grads))[0]["p"] / p.grad.numpy() - 1).max())

        assert away(parity.clip_grad_norm(max_norm)) < 1e-15
        assert away(optax.clip_by_global_norm(max_norm)) == pytest.approx(gap, rel=0.02)


L2 = optax.chain(optax.add_decayed_weights(0.1), optax.adam(0.1))


# torch's optimizer, the steps, what it arrives at from 1 with gradients of 0.5; a faulty port and what that arrives at.
@pytest.mark.parametrize(
    ("make", "steps", "expected", "wrong", "astray"),
    [
        (lambda p: torch.optim.AdamW(p, lr=0.1), 10, -5.47e-3, optax.adamw(0.1), -4.8e-5),
        (lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1), 3, 0.70017, optax.adamw(0.1, weight_decay=0.1), 0.67329),
        (lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1), 3, 0.67329, L2, 0.70018),
        (lambda p: torch.optim.Adam(p, lr=0.1, eps=0.5), 3, 0.85, optax.adam(0.1), 0.7),
    ],
)
def test_G04_the_decay_and_the_epsilon_of_adam(make, steps, expected, wrong, astray):
    p = nn.Parameter(torch.ones(()))
    optimizer = make([p])

    def arrives(twin: Any) -> float:
        params = {"p": jnp.ones(())}
        state = twin.init(params)
        for _ in range(steps):
            updates, state = twin.update({"p": jnp.full((), 0.5)}, state, params)
            params = optax.apply_updates(params, updates)
        return float(params["p"])

    ours = arrives(parity.to_optax(optimizer))
    for _ in range(steps):
        p.grad = torch.full((), 0.5)
        optimizer.step()
    assert ours == pytest.approx(p.item(), abs=1e-6)
    assert ours == pytest.approx(expected, abs=2e-5)
    assert arrives(wrong) == pytest.approx(astray, abs=2e-5)


# Deviations that were measured of torch and of Flax's own, for widths of 256 (of 64 the embedding).
DRAWN: dict[str, tuple[float, float, str, dict[str, Any], Callable[..., Any], Callable[..., Any]]] = {
    "Linear": (
        *(0.0360, 0.0627, "kernel", parity.initializers.linear(256)),
        lambda made: nnx.Linear(256, 256, **made, rngs=nnx.Rngs(0)),
        lambda made: linen.Dense(256, **made).init(jax.random.key(0), jnp.ones((1, 256)))["params"],
    ),
    "Linear's bias": (
        *(0.0351, 0.0, "bias", parity.initializers.linear(256)),
        lambda made: nnx.Linear(256, 256, **made, rngs=nnx.Rngs(0)),
        lambda made: linen.Dense(256, **made).init(jax.random.key(0), jnp.ones((1, 256)))["params"],
    ),
    "Embedding": (
        *(1.003, 0.126, "embedding", parity.initializers.embedding()),
        lambda made: nnx.Embed(256, 64, **made, rngs=nnx.Rngs(0)),
        lambda made: linen.Embed(256, 64, **made).init(jax.random.key(0), jnp.ones((1,), int))["params"],
    ),
    "MultiheadAttention": (
        *(0.0442, 0.0626, "kernel", parity.initializers.multi_head_attention(256)),
        lambda made: nnx.MultiHeadAttention(8, 256, decode=False, **made, rngs=nnx.Rngs(0)).query,
        lambda made: linen.MultiHeadDotProductAttention(8, **made).init(jax.random.key(0), jnp.ones((1, 2, 256)))["params"][
            "query"
        ],
    ),
}


@pytest.mark.parametrize("name", DRAWN)
def test_G05_flaxs_layers_draw_as_torchs_where_they_are_told(name):
    expected, astray, leaf, made, in_nnx, in_linen = DRAWN[name]
    for options, deviation in ((made, expected), ({}, astray)):
        for array in (getattr(in_nnx(options), leaf)[...], in_linen(options)[leaf]):
            assert float(np.std(array)) == pytest.approx(deviation, rel=0.1)


def test_G05_initial_numbers_are_drawn_as_torch_draws():
    bound = 256**-0.5
    right = jax_impl.Linear(256, 256, rngs=nnx.Rngs(0))
    for array in (right.kernel[...], right.bias[...]):
        assert abs(float(np.std(array)) * 3**0.5 / bound - 1) < 0.1
        assert np.abs(array).max() <= bound
    # Flax's own: another deviation, and biases of zero, which would hide a bias that nobody adds.
    stock = nnx.Linear(256, 256, rngs=nnx.Rngs(0))
    assert float(np.std(stock.kernel[...])) * 3**0.5 / bound > 1.5
    assert not stock.bias[...].any()
    report = parity.compare(nn.Linear(8, 8).eval(), nnx.Linear(8, 8, rngs=nnx.Rngs(0)), normal(N, 8), levels="weights")
    assert {finding.where for finding in report.level("weights").findings} == {"weight", "bias"}


def test_G05_a_bias_of_zero_hides_that_nobody_adds_it_from_the_outputs_only():
    class Forgetful(nnx.Linear):
        def __call__(self, inputs):
            return inputs @ self.kernel[...]

    x, levels = normal(N, WIDTH), ("weights", "structure", "identical", "gradients")
    pair = filled(TorchHolder(nn.Linear(WIDTH, 3)), FlaxHolder(Forgetful(WIDTH, 3, rngs=nnx.Rngs(0))))
    refused(*pair, x, by="identical gradients", at="core", levels=levels)
    with torch.no_grad():
        pair[0].core.bias.zero_()
    parity.transfer(*pair)
    report = refused(*pair, x, by="gradients", at=None, levels=levels, says="gradient of core.bias")
    assert report.level("identical").passed


def test_G06_dropout_that_shares_its_mask_or_its_mode():
    x = jnp.ones((N, 4, 8))
    own = jax_impl.Dropout(0.5, rngs=nnx.Rngs(0))(x)
    shared = nnx.Dropout(0.5, broadcast_dims=(0,), rngs=nnx.Rngs(0))
    assert (np.asarray(own[0]) != np.asarray(own[1])).any()
    assert (np.asarray(shared(x)[0]) == np.asarray(shared(x)[0])).any()

    def models(**options):
        return (
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)),
            nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Dropout(rngs=nnx.Rngs(0), **options)),
        )

    levels = ("weights", "structure", "identical")
    accepted(*filled(*models(rate=0.5)), np.asarray(normal(N, 8)), levels=levels)
    for options, says in (
        (dict(rate=0.5, broadcast_dims=(0,)), "1: broadcast_dims=(0,) in Flax, wanted ()"),
        (dict(rate=0.1), "1: p=0.5 in torch, rate=0.1 in Flax; set rate=0.5"),
    ):
        refused(*filled(*models(**options)), normal(N, 8), by="weights", at=None, levels=levels, says=says)
    for side, name in ((0, "torch"), (1, "Flax")):
        pair = filled(*models(rate=0.5))
        pair[side].train()
        with pytest.raises(parity.InputError, match=rf"the {name} model is in train mode.*call \.eval\(\)"):
            parity.compare(*pair, normal(N, 8))
