"""Initial parameters against those that torch draws: bounds never crossed and nearly reached, moments equal."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx
from torch import nn

import parity
from parity import initializers as init


def attention(rngs: nnx.Rngs, width: int, keys: int | None = None) -> nnx.Module:
    made = init.multi_head_attention(width, keys, keys)
    return nnx.MultiHeadAttention(4, width, in_kv_features=keys, decode=False, **made, rngs=rngs)


def lstm(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.OptimizedLSTMCell(20, H, **init.recurrent(H), rngs=rngs)


# torch's layer and array; Flax's layer and array; the bound that torch documents, None for a normal distribution.
Row = tuple[Callable[[], Any], str, Callable[[nnx.Rngs], Any], str, float | None]
H = 100
ROWS: dict[str, Row] = {
    "Linear": (lambda: nn.Linear(49, 200), "weight", lambda r: nnx.Linear(49, 200, **init.linear(49), rngs=r), "kernel", 1 / 7),
    "Linear bias": (
        lambda: nn.Linear(49, 9000),
        "bias",
        lambda r: nnx.Linear(49, 9000, **init.linear(49), rngs=r),
        "bias",
        1 / 7,
    ),
    "Conv": (
        lambda: nn.Conv2d(8, 80, (5, 3), groups=2),
        "weight",
        lambda r: nnx.Conv(8, 80, (5, 3), feature_group_count=2, **init.conv(8, (5, 3), 2), rngs=r),
        "kernel",
        60**-0.5,
    ),
    "Conv bias": (
        lambda: nn.Conv1d(3, 9000, 3),
        "bias",
        lambda r: nnx.Conv(3, 9000, (3,), **init.conv(3, 3), rngs=r),
        "bias",
        1 / 3,
    ),
    "ConvTranspose": (
        lambda: nn.ConvTranspose2d(60, 4, (5, 5)),
        "weight",
        lambda r: nnx.ConvTranspose(60, 4, (5, 5), **init.conv_transpose(4, (5, 5)), rngs=r),
        "kernel",
        1 / 10,
    ),
    "Embedding": (
        lambda: nn.Embedding(80, 90),
        "weight",
        lambda r: nnx.Embed(80, 90, **init.embedding(), rngs=r),
        "embedding",
        None,
    ),
    "MultiheadAttention in": (
        lambda: nn.MultiheadAttention(72, 4),
        "in_proj_weight",
        lambda r: attention(r, 72),
        "key.kernel",
        (6 / (4 * 72)) ** 0.5,
    ),
    "MultiheadAttention keys": (
        lambda: nn.MultiheadAttention(72, 4, kdim=100, vdim=100),
        "k_proj_weight",
        lambda r: attention(r, 72, 100),
        "key.kernel",
        (6 / 172) ** 0.5,
    ),
    "MultiheadAttention out": (
        lambda: nn.MultiheadAttention(72, 4),
        "out_proj.weight",
        lambda r: attention(r, 72),
        "out.kernel",
        72**-0.5,
    ),
    "LSTM in": (lambda: nn.LSTMCell(20, H), "weight_ih", lstm, "dense_i.kernel", 0.1),
    "LSTM state": (lambda: nn.LSTMCell(20, H), "weight_hh", lstm, "dense_h.kernel", 0.1),
}


def drawn(row: Row) -> tuple[np.ndarray, np.ndarray]:
    torch.manual_seed(3)
    layer, name, flax, flax_name, _ = row
    found: Any = flax(nnx.Rngs(5))
    for part in flax_name.split("."):
        found = getattr(found, part)
    return np.asarray(found[...], np.float64).ravel(), layer().get_parameter(name).detach().double().numpy().ravel()


def moments(values: np.ndarray) -> np.ndarray:
    return np.array([np.mean(values**power) for power in (1, 2, 4)])


@pytest.mark.parametrize("name", ROWS)
def test_a_distribution_is_torchs(name):
    actual, expected = drawn(ROWS[name])
    bound = ROWS[name][-1]
    assert len(actual) >= 4000
    if bound is not None:
        for values in (actual, expected):
            assert 0.995 * bound < np.abs(values).max() <= bound * (1 + 1e-6)
    scale = expected.std() ** np.array([1, 2, 4])
    # Six standard deviations of what 4,000 numbers leave undetermined, for both sides; Flax's own defaults are far outside.
    assert (np.abs(moments(actual) - moments(expected)) < 0.14 * np.array([1, 1.5, 8]) * scale).all()


@pytest.mark.parametrize("name", [name for name in ROWS if "bias" not in name])
def test_flaxs_own_default_would_be_seen(name):
    _, expected = drawn(ROWS[name])
    fan_in = {"Linear": 49, "Conv": 60, "ConvTranspose": 1500, "Embedding": 90, "LSTM in": 20, "LSTM state": H}.get(name, 72)
    default = np.asarray(nnx.initializers.lecun_normal()(jax.random.key(0), (fan_in, 9000 // fan_in + 100)), np.float64).ravel()
    wrong = abs(np.mean(default**2) / np.mean(expected**2) - 1) > 0.21
    bound = ROWS[name][-1]
    assert wrong or (bound is not None and np.abs(default).max() > 1.01 * bound)


def test_the_bias_of_a_cell_is_the_sum_of_torchs_two():
    torch.manual_seed(0)
    cell = nn.LSTMCell(3, 4000)
    expected = (cell.bias_ih + cell.bias_hh).detach().double().numpy()
    flax = np.asarray(init.recurrent(4000)["bias_init"](jax.random.key(0), (16000,)), np.float64)
    assert np.abs(flax).max() <= 2 / 4000**0.5
    np.testing.assert_allclose(moments(flax)[1:], moments(expected)[1:], rtol=0.1)


def test_the_bias_of_a_gru_has_one_gate_with_one():
    made = init.recurrent(4000, "GRU")["bias_init"]
    bias = np.asarray(made(jax.random.key(0), (12000,)), np.float64) * 4000**0.5
    np.testing.assert_allclose([np.mean(part**2) for part in bias.reshape(3, -1)], [2 / 3, 2 / 3, 1 / 3], rtol=0.1)
    assert nnx.GRUCell(3, 5, **init.recurrent(5, "GRU"), rngs=nnx.Rngs(0)).dense_i.bias[...].shape == (15,)
    with pytest.raises(parity.InputError, match=r"shape \(12000,\) of nnx.GRUCell, got \(4000,\); Linen's GRUCell has one"):
        made(jax.random.key(0), (4000,))


def test_rows_of_padding_norms_biases_and_slopes():
    table = nnx.Embed(4, 3, **init.embedding(2), rngs=nnx.Rngs(0)).embedding[...]
    assert (np.asarray(table) == 0).all(1).tolist() == [False, False, True, False]
    assert (table == 0).all(1).tolist() == (nn.Embedding(4, 3, padding_idx=2).weight == 0).all(1).tolist()
    norm = nnx.LayerNorm(3, **init.norm(), rngs=nnx.Rngs(0))
    assert (norm.scale[...] == 1).all() and (norm.bias[...] == 0).all()
    assert (nnx.RMSNorm(3, **init.norm(bias=False), rngs=nnx.Rngs(0)).scale[...] == 1).all()
    assert (attention(nnx.Rngs(0), 8).query.bias[...] == 0).all() and (nn.MultiheadAttention(8, 2).in_proj_bias == 0).all()
    assert float(nnx.PReLU(**init.prelu()).negative_slope[...]) == nn.PReLU().weight.item() == 0.25
    assert (nnx.SimpleCell(3, 4, **init.recurrent(4, "RNN"), rngs=nnx.Rngs(0)).dense_i.bias[...] != 0).all()


def test_linen_takes_the_same_arguments():
    layer = linen.Dense(300, param_dtype=jnp.bfloat16, **init.linear(49))
    params = layer.init(jax.random.key(0), jnp.ones((1, 49), jnp.bfloat16))["params"]
    assert params["kernel"].dtype == params["bias"].dtype == jnp.bfloat16
    for values in params.values():
        assert 0.9 / 7 < float(jnp.abs(values).max()) <= 1.01 / 7
    assert linen.Embed(7, 3, **init.embedding()).init(jax.random.key(0), jnp.zeros(1, int))
    x = jnp.ones((1, 2, 8))
    assert linen.MultiHeadDotProductAttention(2, **init.multi_head_attention(8)).init(jax.random.key(0), x)
    assert linen.OptimizedLSTMCell(4, **init.recurrent(4)).init(jax.random.key(0), (jnp.ones((1, 4)),) * 2, jnp.ones((1, 3)))


def test_sizes_that_are_none_are_refused_all_at_once():
    with pytest.raises(parity.InputError, match=r"got in_features=0, groups=-1, kernel_size\[1\]=2.5"):
        init.conv(0, (3, 2.5), -1)  # type: ignore[arg-type]
    with pytest.raises(parity.InputError, match='kind must be "LSTM", "RNN" or "GRU", got \'lstm\''):
        init.recurrent(4, "lstm")
