"""Initial distributions and dropout of the Flax wing against torch's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from helpers import DTYPES, SEED, jax_layer, linears, numpy_dtype, to_numpy

import jax_impl
import torch_impl

# ---------------------------------------------------------------- initialisation


def assert_uniform(draws: np.ndarray, bound: float) -> None:
    """Kolmogorov-Smirnov against uniform(-bound, bound), and the moments; one false alarm in 10^6 or fewer."""
    x = np.sort(np.asarray(draws, np.float64).ravel())
    n = len(x)
    assert np.abs(x).max() <= bound * (1 + 1e-6), "outside the bound"
    assert np.abs(x).max() >= bound * (1 - 15 / n), "the bound is smaller than torch's"
    cdf = (x + bound) / (2 * bound)
    steps = np.arange(n + 1) / n
    distance = max(np.abs(cdf - steps[1:]).max(), np.abs(cdf - steps[:-1]).max())
    assert distance <= 2.8 / np.sqrt(n), f"Kolmogorov-Smirnov distance {distance:.3g}"
    assert abs(x.mean()) <= 5 * bound / np.sqrt(3 * n), "mean is not 0"
    # The square of a uniform number on (-b, b) has variance 4 b^4 / 45.
    assert abs((x**2).mean() - bound**2 / 3) <= 5 * bound**2 * np.sqrt(4 / 45 / n), "variance is not bound^2 / 3"


def stacked(cls, count, *sizes):
    """Kernels and biases of many layers, one after another from one stream."""
    rngs = nnx.Rngs(SEED)
    layers = [cls(*sizes, rngs=rngs) for _ in range(count)]
    return np.stack([x.kernel[...] for x in layers]), np.stack([x.bias[...] for x in layers])


SIZES = [(50, 400), (400, 50), (3, 64)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_linear_is_drawn_as_torch_draws(sizes):
    bound = sizes[0] ** -0.5
    for draws in stacked(jax_impl.Linear, 8, *sizes):
        assert_uniform(draws, bound)
    torch.manual_seed(SEED)
    layers = [torch_impl.Linear(*sizes) for _ in range(8)]
    assert_uniform(np.stack([to_numpy(layer.weight) for layer in layers]), bound)
    assert_uniform(np.stack([to_numpy(layer.bias) for layer in layers]), bound)


def test_the_test_of_the_distribution_fails_on_flaxs_own_initialisers():
    kernels, biases = stacked(nnx.Linear, 8, 50, 400)
    for draws in (kernels, biases):
        with pytest.raises(AssertionError):
            assert_uniform(draws, 50**-0.5)


@pytest.mark.parametrize("scale", [0.99, 1.01, 3**0.5], ids=str)
def test_the_test_of_the_distribution_fails_on_another_bound(scale):
    kernels, biases = stacked(jax_impl.Linear, 8, 50, 400)
    for draws in (kernels, biases):
        with pytest.raises(AssertionError):
            assert_uniform(scale * draws, 50**-0.5)


def test_the_test_of_the_distribution_fails_on_another_shape_with_the_same_moments():
    rng = np.random.default_rng(SEED)
    bound = 50**-0.5
    two_humps = np.clip(np.sign(rng.uniform(-1, 1, 20_000)) * bound * rng.normal(3**-0.5, 0.01, 20_000), -bound, bound)
    with pytest.raises(AssertionError):
        assert_uniform(two_humps, bound)


MODULES = {
    "Multi_Head_Self_Attention": ("Multi_Head_Self_Attention", {"embed_size": 72, "heads": 3}),
    "SelfAttention": ("SelfAttention", {"embed_size": 120, "heads": 2}),
    "MultiHeadAttention": (
        "MultiHeadAttention",
        {"d_model": 60, "n_heads": 4, "d_q": 25, "d_k": 25, "d_v": 20, "bias": True},
    ),
    "FeedForwardNetwork": ("FeedForwardNetwork", {"d_model": 50, "d_ff": 90}),
}


@pytest.mark.parametrize(("name", "sizes"), MODULES.values(), ids=MODULES)
def test_every_layer_of_a_module_is_drawn_as_torch_draws_and_on_its_own(name, sizes):
    torch_module = getattr(torch_impl, name)(**sizes)
    module = getattr(jax_impl, name)(**sizes, rngs=nnx.Rngs(SEED))
    seen = []
    for path, torch_layer in linears(torch_module).items():
        layer = jax_layer(module, path)
        bound = torch_layer.in_features**-0.5
        assert layer.kernel.shape == tuple(torch_layer.weight.T.shape)
        assert (layer.bias is None) == (torch_layer.bias is None)
        assert_uniform(layer.kernel[...], bound)
        seen.append(np.asarray(layer.kernel[...]).ravel()[:50] / bound)
        if layer.bias is not None:
            assert np.abs(np.asarray(layer.bias[...])).max() <= bound
            assert len(np.unique(np.asarray(layer.bias[...]))) > 0.9 * layer.bias.shape[0]
            seen.append(np.asarray(layer.bias[...])[:50] / bound)
    correlation = np.corrcoef(np.stack(seen)) - np.eye(len(seen))
    assert np.abs(correlation).max() < 0.75, "two parameters share their draws"


# ---------------------------------------------------------------- dropout


def dropout(p, seed=SEED):
    return jax_impl.Dropout(p, rngs=nnx.Rngs(seed))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_rate_is_p(p):
    n = 200_000
    dropped = float((dropout(p)(jnp.ones((2, 100, n // 200))) == 0).mean())
    assert abs(dropped - p) <= 5 * (p * (1 - p) / n) ** 0.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_scale_is_torchs_bit_for_bit(dtype):
    with jax.enable_x64(True):
        ones, torch_ones = jnp.ones(4096, dtype), torch.ones(4096, dtype=getattr(torch, dtype))
        for p in (k / 100 for k in range(1, 100)):
            found = np.unique(np.asarray(dropout(p)(ones)).astype(np.float64))
            expected = np.unique(torch_impl.Dropout(p)(torch_ones).double().numpy())
            np.testing.assert_array_equal(found, expected, err_msg=f"p={p}")
            assert len(found) == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_are_torchs_under_the_same_mask(dtype):
    x = jnp.asarray(np.random.default_rng(SEED).standard_normal((3, 5, 7)), dtype)
    found = dropout(0.3)(x)
    kept = torch.from_numpy(np.array(found != 0))
    mask = kept.to(getattr(torch, dtype)) / (1 - 0.3)
    expected = torch.from_numpy(np.array(x, np.float32)).to(mask.dtype) * mask
    np.testing.assert_array_equal(np.asarray(found).astype(np.float32), expected.float().numpy())


def test_no_axis_shares_its_mask():
    kept = np.asarray(dropout(0.5)(jnp.ones((8, 9, 10))) != 0)
    for axis in range(3):
        slices = np.moveaxis(kept, axis, 0).reshape(kept.shape[axis], -1)
        assert len({row.tobytes() for row in slices}) == len(slices), f"axis {axis} shares a mask"


def test_calls_and_layers_draw_anew_and_equal_streams_replay():
    ones, layer = jnp.ones((4, 50)), dropout(0.5)
    first, second = np.asarray(layer(ones)), np.asarray(layer(ones))
    assert not np.array_equal(first, second)
    again = dropout(0.5)
    np.testing.assert_array_equal(np.asarray(again(ones)), first)
    np.testing.assert_array_equal(np.asarray(again(ones)), second)
    assert not np.array_equal(np.asarray(dropout(0.5, SEED + 1)(ones)), first)
    network = jax_impl.FeedForwardNetwork(6, 10, 0.5, rngs=nnx.Rngs(SEED))
    a, b = (np.asarray(network.model.layers[i](ones)) for i in (2, 4))
    assert not np.array_equal(a, b)


def test_compiled_calls_draw_anew_and_like_eager_ones():
    ones, layer = jnp.ones((4, 50)), dropout(0.5)
    call = nnx.jit(lambda layer, x: layer(x))
    compiled = [np.asarray(call(layer, ones)) for _ in range(2)]
    assert not np.array_equal(*compiled)
    again = dropout(0.5)
    for mask in compiled:
        np.testing.assert_array_equal(np.asarray(again(ones)), mask)


def test_eval_mode_passes_the_input_through_and_train_mode_returns():
    x = jnp.asarray([[1.0, -2.0, np.nan, np.inf]])
    layer = dropout(0.99)
    layer.eval()
    np.testing.assert_array_equal(np.asarray(layer(x)), np.asarray(x))
    layer.train()
    assert (np.asarray(layer(jnp.ones(500))) == 0).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ends_of_the_rate_are_torchs(dtype):
    numbers = np.array([1.0, -3.0, 0.0, np.inf, np.nan]).astype(numpy_dtype(dtype))
    with jax.enable_x64(True):
        for p in (0.0, 1.0):
            expected = to_numpy(torch_impl.Dropout(p)(torch.tensor(numbers.astype(np.float64)).to(getattr(torch, dtype))))
            found = np.asarray(dropout(p)(jnp.array(numbers)))
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found.astype(np.float64), expected.astype(np.float64))
            numbers_out = ~np.isnan(expected.astype(np.float64))
            np.testing.assert_array_equal(np.signbit(found)[numbers_out], np.signbit(expected)[numbers_out])


def test_nan_and_infinity_in_a_dropped_place_come_out_as_nan_in_both_wings():
    for number in (np.nan, np.inf):
        found = np.asarray(dropout(0.5)(jnp.full(400, number)))
        torchs = torch_impl.Dropout(0.5)(torch.full((400,), number)).numpy()
        for out in (found, torchs):
            dropped = np.isnan(out).mean()
            assert dropped == 1 if np.isnan(number) else 0.2 < dropped < 0.8
            assert np.isinf(out[~np.isnan(out)]).all()


def test_the_gradient_is_the_mask():
    def drop(x):
        # Made inside: NNX refuses to advance a stream from another trace.
        return dropout(0.3)(x)

    x = jnp.full((4, 50), 2.0)
    out, pull = jax.vjp(drop, x)
    np.testing.assert_array_equal(np.asarray(pull(jnp.ones_like(x))[0]), np.asarray(out) / 2)


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_a_rate_outside_0_to_1_is_refused_in_both_wings(p):
    for make in (torch_impl.Dropout, dropout):
        with pytest.raises(ValueError, match="Dropout: the dropout rate must be between 0 and 1, got "):
            make(p)


def test_dropout_of_the_network_stands_behind_both_projections():
    network = jax_impl.FeedForwardNetwork(16, 64, 0.5, rngs=nnx.Rngs(SEED))
    out = np.asarray(network(jnp.ones((20, 30, 16))))
    assert abs((out == 0).mean() - 0.5) < 0.05
    network.eval()
    assert (np.asarray(network(jnp.ones((20, 30, 16)))) != 0).all()
    # Every row of the input is the same: without the first dropout each column would hold one number.
    assert len(np.unique(out[out != 0])) > 1000, "the first dropout draws nothing"
