"""Where the natural JAX port differs from torch: each case has torch's answer here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from helpers import DTYPES, HALVES, UNIT_ROUNDOFF, numpy_dtype, random, to_jax, to_numpy, to_torch

import jax_impl
import torch_impl
from jax_impl import operations
from torch_impl import operations as torch_operations


@pytest.fixture
def double():
    with jax.enable_x64(True):
        yield


# ---------------------------------------------------------------- dtypes are refused, not promoted


def modules():
    return {
        "Linear": (jax_impl.Linear(8, 4, rngs=nnx.Rngs(0)), 1),
        "FeedForwardNetwork": (jax_impl.FeedForwardNetwork(8, rngs=nnx.Rngs(0)), 1),
        "Multi_Head_Self_Attention": (jax_impl.Multi_Head_Self_Attention(8, 2, rngs=nnx.Rngs(0)), 3),
        "SelfAttention": (jax_impl.SelfAttention(8, 2, rngs=nnx.Rngs(0)), 3),
        "MultiHeadAttention": (jax_impl.MultiHeadAttention(8, 2, 4, 4, 4, rngs=nnx.Rngs(0)), 3),
    }


@pytest.mark.parametrize("name", modules())
@pytest.mark.parametrize("dtype", HALVES)
def test_another_dtype_than_the_weights_is_refused(name, dtype):
    module, inputs = modules()[name]
    x = jnp.ones((2, 3, 8), dtype)
    with pytest.raises(jax_impl.InputError, match=f"is {dtype} and the weights float32; cast .* to float32"):
        module(*[x] * inputs)
    wrong_value = [jnp.ones((2, 3, 8))] * (inputs - 1) + [x]
    with pytest.raises(jax_impl.InputError, match=f"is {dtype} and the weights float32"):
        jax.jit(module)(*wrong_value)


@pytest.mark.parametrize("name", modules())
def test_float64_without_x64_is_refused(name, unchecked_shapes):
    module, inputs = modules()[name]
    with pytest.raises(jax_impl.InputError, match="is float64, but jax runs without 64-bit types"):
        module(*[np.ones((2, 3, 8))] * inputs)


def test_mixed_heads_are_refused():
    Q, K = jnp.ones((2, 3, 5, 4)), jnp.ones((2, 3, 7, 4), jnp.bfloat16)
    with pytest.raises(jax_impl.InputError, match="K is bfloat16 and Q float32; cast K to float32"):
        jax_impl.scaled_dot_product_attention(Q, K, K)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_float16_scores_refuse_a_value_that_they_cannot_hold(compiled):
    call = jax.jit(operations.hide, static_argnums=2) if compiled else operations.hide
    scores, hidden = jnp.ones((2, 3), jnp.float16), jnp.zeros((2, 3), bool)
    with pytest.raises(jax_impl.InputError, match="hidden scores become -1e\\+20, which float16 cannot hold"):
        call(scores, hidden, -1e20)
    assert np.isneginf(np.asarray(call(scores, ~hidden, -float("inf")))).all()
    assert (np.asarray(call(scores.astype(jnp.bfloat16), ~hidden, -1e20)).astype(np.float32) < -9e19).all()


def test_self_attention_refuses_a_mask_in_float16_and_works_without_one():
    module = jax_impl.SelfAttention(8, 2, rngs=nnx.Rngs(0))
    module.fc_out.kernel.set_value(module.fc_out.kernel[...].astype(jnp.float16))
    module.fc_out.bias.set_value(module.fc_out.bias[...].astype(jnp.float16))
    x = jnp.ones((2, 3, 8), jnp.float16)
    assert np.isfinite(np.asarray(module(x, x, x))).all()
    with pytest.raises(jax_impl.InputError, match="float16 cannot hold"):
        module(x, x, x, jnp.ones((3, 3)))


@pytest.mark.parametrize("name", ["Multi_Head_Self_Attention", "SelfAttention", "MultiHeadAttention"])
@pytest.mark.parametrize("shape", [(5, 2, 3, 3), (1, 1, 3, 3, 3), (2, 3), (2, 2, 1, 2)], ids=str)
def test_a_mask_that_would_enlarge_the_scores_is_refused(name, shape):
    module, _ = modules()[name]
    x = jnp.ones((1, 3, 8))
    with pytest.raises(jax_impl.InputError, match="mask must broadcast to the scores' shape"):
        module(x, x, x, jnp.ones(shape, bool))


# ---------------------------------------------------------------- masks keep their meaning

NUMBERS = {
    "float32": [0.0, -0.0, 1e-40, -1e-45, 1.0, np.nan, np.inf, 2.0**-126],
    "float64": [0.0, -0.0, 1e-310, -5e-324, 1e-40, np.nan, 2.0**-1022, 1.0],
    "float16": [0.0, -0.0, 6e-8, -6e-8, 1.0, np.nan, np.inf, 2.0**-14],
    "bfloat16": [0.0, -0.0, 1e-40, -1e-40, 1.0, np.nan, np.inf, 2.0**-126],
}
MEANING = [False, False, True, True, True, True, True, True]


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_only_zero_is_zero_in_a_mask(dtype, compiled, double):
    numbers = np.array(NUMBERS[dtype]).astype(numpy_dtype(dtype))
    assert to_torch(numbers).bool().tolist() == MEANING
    wrap = jax.jit if compiled else lambda f: f
    assert np.asarray(wrap(operations.is_nonzero)(to_jax(numbers))).tolist() == MEANING
    assert np.asarray(wrap(operations.is_zero)(to_jax(numbers))).tolist() == [not m for m in MEANING]


@pytest.mark.parametrize(("dtype", "tiny"), [("float32", 1e-40), ("float64", 1e-310)])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", ["Multi_Head_Self_Attention", "SelfAttention", "MultiHeadAttention"])
def test_a_denormal_mask_means_what_a_one_means(name, dtype, tiny, compiled, double):
    module, _ = modules()[name]
    call = jax.jit(module) if compiled else module
    x = jnp.asarray(random("denormal").standard_normal((2, 3, 8)), jnp.float32)
    pattern = np.tril(np.ones((3, 3)))
    if name == "MultiHeadAttention":
        pattern = 1 - pattern
    found, expected, unmasked = (
        jax.tree.leaves(call(x, x, x, mask))[0]
        for mask in (jnp.asarray(pattern * tiny, dtype), jnp.asarray(pattern, dtype), jnp.asarray(0 * pattern, dtype))
    )
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    assert not np.array_equal(np.asarray(found), np.asarray(unmasked), equal_nan=True)


@pytest.mark.parametrize("number", [2**32, -(2**63), 2**40])
def test_wide_integer_numpy_masks_hide_without_x64(number, unchecked_shapes):
    mask = np.zeros((3, 3), np.int64)
    mask[:, 1] = number
    assert np.asarray(operations.is_nonzero(mask)).tolist() == [[False, True, False]] * 3
    module, _ = modules()["MultiHeadAttention"]
    x = jnp.asarray(random("wide").standard_normal((2, 3, 8)), jnp.float32)
    _, weights = module(x, x, x, mask)
    assert (np.asarray(weights)[..., 1] == 0).all()
    assert (np.asarray(weights)[..., 0] > 0).all()


def test_denormal_float64_numpy_masks_hide_without_x64(unchecked_shapes):
    assert np.asarray(operations.is_nonzero(np.array([0.0, 1e-310, 1e-60]))).tolist() == [False, True, True]


# ---------------------------------------------------------------- gradients at kinks


def test_relu_has_gradient_zero_at_zero_and_one_at_nan():
    x = np.array([-1.0, -0.0, 0.0, 2.0, np.nan, np.inf], np.float32)
    layer = jax_impl.ReLU()
    upstream = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], np.float32)
    leaf = to_torch(x).requires_grad_()
    out = torch_impl.ReLU()(leaf)
    out.backward(to_torch(upstream))
    found, pull = jax.vjp(layer, to_jax(x))
    np.testing.assert_array_equal(np.asarray(found), to_numpy(out))
    (gradient,) = pull(to_jax(upstream))
    np.testing.assert_array_equal(np.asarray(gradient), to_numpy(leaf.grad))
    assert np.asarray(gradient).tolist() == [0, 0, 0, 4, 5, 6]


# ---------------------------------------------------------------- division rounds once

DIVISORS = [float(np.sqrt(w)) for w in (*range(1, 41), 48, 64, 100, 500, 512, 1000)] + [0.1, 3.0, 7.0, 1e-3, 1e5, -3.0]


@pytest.fixture(scope="module")
def numerators():
    return random("numerators").standard_normal((3, 257)).astype(np.float32)


def quotients(x):
    return [operations.divide(x, c) for c in DIVISORS]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_division_is_numpys_and_torchs(numerators, compiled):
    found = (jax.jit(quotients) if compiled else quotients)(to_jax(numerators))
    for c, quotient in zip(DIVISORS, found, strict=True):
        np.testing.assert_array_equal(np.asarray(quotient), numerators / np.float32(c), err_msg=f"divisor {c}")
        np.testing.assert_array_equal(np.asarray(quotient), to_numpy(to_torch(numerators) / c), err_msg=f"divisor {c}")


def test_these_numerators_tell_a_division_from_a_reciprocal(numerators):
    told = []
    for c in map(np.float32, DIVISORS):
        twice_rounded = numerators * (np.float32(1) / c)
        told.append(bool((twice_rounded != numerators / c).any()))
        assert not (told[-1] and np.frexp(c)[0] == 0.5), f"divisor {c}"
    # A few reciprocals are so nearly exact that both roundings fall together.
    assert sum(told) >= 40


def test_the_gradient_of_division_rounds_once_too(numerators):
    def pulled_back(x, g):
        return [jax.vjp(lambda x, c=c: operations.divide(x, c), x)[1](g)[0] for c in DIVISORS]

    upstream = np.roll(numerators, 1)
    for c, gradient in zip(DIVISORS, jax.jit(pulled_back)(to_jax(numerators), to_jax(upstream)), strict=True):
        np.testing.assert_array_equal(np.asarray(gradient), upstream / np.float32(c), err_msg=f"divisor {c}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_division_in_other_dtypes_is_torchs(numerators, dtype, double):
    x = to_torch(numerators[0], dtype)
    found = jax.jit(quotients)(to_jax(x))
    for c, quotient in zip(DIVISORS, found, strict=True):
        np.testing.assert_array_equal(np.asarray(quotient), to_numpy(x / c), err_msg=f"divisor {c}")


WIDTHS = [*range(1, 129), 256, 300, 512, 1000, 1024, 2047, 4095]


@pytest.mark.parametrize("dtype", HALVES)
def test_rounded_root_is_torchs_bit_for_bit_in_half_precision(dtype):
    found = [operations.rounded_sqrt(w, jnp.zeros(1, dtype)) for w in WIDTHS]
    expected = [torch_operations.rounded_sqrt(w, torch.zeros(1, dtype=getattr(torch, dtype))).item() for w in WIDTHS]
    assert found == expected
    assert any(f != w**0.5 for f, w in zip(found, WIDTHS))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rounded_root_is_the_correctly_rounded_one(dtype, double):
    found = [operations.rounded_sqrt(w, jnp.zeros(1, dtype)) for w in WIDTHS]
    assert found == [float(np.sqrt(np.dtype(dtype).type(w))) for w in WIDTHS]
    torchs = [torch_operations.rounded_sqrt(w, torch.zeros(1, dtype=getattr(torch, dtype))).item() for w in WIDTHS]
    np.testing.assert_allclose(found, torchs, rtol=2 * UNIT_ROUNDOFF[dtype])


@pytest.mark.parametrize("dtype", HALVES)
def test_attention_divides_by_the_rounded_root_in_half_precision(dtype):
    # Small whole numbers: the products are exact, and large scores magnify what the root does.
    rng = random("rounded root", dtype)
    Q, K = (rng.integers(-3, 4, (2, 3, length, 48)).astype(numpy_dtype(dtype)) for length in (5, 7))
    _, weights = jax_impl.scaled_dot_product_attention(to_jax(Q), to_jax(K), to_jax(K))
    _, torchs = torch_impl.scaled_dot_product_attention(to_torch(Q), to_torch(K), to_torch(K))
    found, expected = np.asarray(weights).astype(np.float64), to_numpy(torchs).astype(np.float64)
    allowed = 2.5 * half_ulp(expected, dtype)
    assert (np.abs(found - expected) <= allowed).all()
    product = np.einsum("nhqd,nhkd->nhqk", Q.astype(np.float64), K.astype(np.float64))
    unrounded = exact_softmax((product / 48**0.5).astype(Q.dtype).astype(np.float64))
    assert (np.abs(unrounded - expected) > allowed).any(), "the rule cannot tell an unrounded root"


# ---------------------------------------------------------------- half precision rounds once


def half_ulp(exact, dtype):
    """Half the spacing of the dtype's numbers at each value: what a single rounding may cost."""
    digits = {"bfloat16": 8, "float16": 11}[dtype]
    smallest = {"bfloat16": -133, "float16": -24}[dtype]
    return 0.5 * np.exp2(np.maximum(np.frexp(exact)[1] - digits, smallest))


def halves(rng, shape, dtype, spread=1.0):
    return (rng.standard_normal(shape) * spread).astype(numpy_dtype(dtype))


def exact_softmax(scores):
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_softmax_in_half_precision_rounds_once(dtype, compiled):
    scores = halves(random("softmax"), (2, 3, 40, 33), dtype, 2.0)
    exact = exact_softmax(scores.astype(np.float64))
    allowed = half_ulp(exact, dtype) + 1e-6 * exact
    call = jax.jit(operations.softmax) if compiled else operations.softmax
    found = np.asarray(call(to_jax(scores)))
    assert found.dtype == numpy_dtype(dtype)
    assert (np.abs(found.astype(np.float64) - exact) <= allowed).all()
    assert np.abs(found.astype(np.float64).sum(-1) - 1).max() <= UNIT_ROUNDOFF[dtype]
    # The rule tells: exponentials rounded before they are summed break it.
    rounded = np.exp((scores - scores.max(-1, keepdims=True)).astype(np.float64)).astype(scores.dtype).astype(np.float64)
    twice = (rounded / rounded.sum(-1, keepdims=True)).astype(scores.dtype).astype(np.float64)
    assert (np.abs(twice - exact) > allowed).any()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", ["float32", *HALVES])
def test_softmax_over_one_key_is_one_and_of_a_hidden_one_nan(dtype, compiled):
    def attend(scores, hidden):
        return operations.softmax(operations.hide(scores, hidden, -float("inf")))

    scores = to_jax(halves(random("one key"), (3, 4, 5, 1), dtype))
    call = jax.jit(attend) if compiled else attend
    assert (np.asarray(call(scores, jnp.zeros((5, 1), bool))).astype(np.float64) == 1).all()
    # Left to XLA, what lies in freed memory decides: several calls, since NaN may lie there too.
    for _ in range(5):
        assert np.isnan(np.asarray(call(scores, jnp.ones((1, 1), bool))).astype(np.float64)).all()


def linear_case(dtype, n=24, i=17, o=31):
    rng = random("half linear", dtype)
    x, w, b = halves(rng, (3, n, i), dtype), halves(rng, (o, i), dtype), halves(rng, (o,), dtype, 3.0)
    wide = [a.astype(np.float64) for a in (x, w, b)]
    exact = wide[0] @ wide[1].T + wide[2]
    allowed = half_ulp(exact, dtype) + i * 2.0**-24 * (np.abs(wide[0]) @ np.abs(wide[1]).T + np.abs(wide[2]))
    return x, w, b, exact, allowed


def flax_linear(w, b):
    layer = jax_impl.Linear(w.shape[1], w.shape[0], rngs=nnx.Rngs(0))
    layer.kernel.set_value(to_jax(w.T))
    layer.bias.set_value(to_jax(b))
    return layer


def torch_linear(w, b):
    layer = torch_impl.Linear(w.shape[1], w.shape[0]).to(to_torch(w).dtype)
    layer.load_state_dict({"weight": to_torch(w), "bias": to_torch(b)})
    return layer


@pytest.mark.parametrize("dtype", HALVES)
def test_linear_in_half_precision_rounds_once_in_both_wings(dtype):
    x, w, b, exact, allowed = linear_case(dtype)
    layer = flax_linear(w, b)
    found = {
        "eager": np.asarray(layer(to_jax(x))),
        "jit": np.asarray(jax.jit(layer)(to_jax(x))),
        "torch": to_numpy(torch_linear(w, b)(to_torch(x))),
    }
    for name, y in found.items():
        assert y.dtype == numpy_dtype(dtype), name
        assert (np.abs(y.astype(np.float64) - exact) <= allowed).all(), name
    product = (x.astype(np.float64) @ w.astype(np.float64).T).astype(x.dtype).astype(np.float64)
    twice = (product + b.astype(np.float64)).astype(x.dtype).astype(np.float64)
    assert (np.abs(twice - exact) > allowed).any(), "the rule cannot tell a bias added after the rounding"


@pytest.mark.parametrize("dtype", HALVES)
def test_bias_gradient_in_half_precision_is_at_most_twice_as_wrong_as_torchs(dtype):
    x, w, b, _, _ = linear_case(dtype, n=200)
    upstream = halves(random("upstream", dtype), (3, 200, 31), dtype)
    layer = torch_linear(w, b)
    layer(to_torch(x)).backward(to_torch(upstream))
    twin = flax_linear(w, b)
    gradients = nnx.jit(nnx.grad(lambda layer, x, g: (layer(x) * g).astype(jnp.float32).sum()))(
        twin, to_jax(x), to_jax(upstream)
    )
    exact = upstream.astype(np.float64).sum((0, 1))
    found, torchs = (np.asarray(g).astype(np.float64) for g in (gradients.bias[...], to_numpy(layer.bias.grad)))
    error, torchs_error = np.abs(found - exact).max(), np.abs(torchs - exact).max()
    assert error <= 2 * max(torchs_error, UNIT_ROUNDOFF[dtype] * np.abs(exact).max())
    # Summed in half precision itself, the error would be far outside.
    naive = np.zeros(31, numpy_dtype(dtype))
    for row in upstream.reshape(-1, 31):
        naive += row
    assert np.abs(naive.astype(np.float64) - exact).max() > 2 * torchs_error


@pytest.mark.parametrize("dtype", HALVES)
def test_products_in_half_precision_are_summed_in_float32(dtype):
    rng = random("product", dtype)
    a, b = halves(rng, (2, 3, 9, 200), dtype), halves(rng, (2, 3, 200, 7), dtype)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    allowed = half_ulp(exact, dtype) + 200 * 2.0**-24 * (np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)))
    for found in (
        jax.jit(operations.matmul)(to_jax(a), to_jax(b)),
        jax.jit(lambda a, b: operations.einsum("nhik,nhkj->nhij", a, b))(to_jax(a), to_jax(b)),
    ):
        assert (np.abs(np.asarray(found).astype(np.float64) - exact) <= allowed).all()
    naive = np.zeros(exact.shape, a.dtype)
    for k in range(200):
        naive += a[..., k : k + 1] * b[..., k : k + 1, :]
    assert (np.abs(naive.astype(np.float64) - exact) > allowed).any()


# ---------------------------------------------------------------- matmul precision


PRODUCTS = {"matmul": operations.matmul, "einsum": lambda a, b: operations.einsum("ik,kj->ij", a, b)}


def program(product, dtype):
    return str(jax.make_jaxpr(product)(jnp.ones((3, 4), dtype), jnp.ones((4, 5), dtype)))


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_products_ask_for_full_float32_unless_the_user_chose_otherwise(product):
    assert "HIGHEST" in program(product, "float32")
    with jax.default_matmul_precision("bfloat16"):
        assert "HIGHEST" not in program(product, "float32")


# On the CPU XLA sums in float32 unasked, so that no value here could tell; on other devices it may not.
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
@pytest.mark.parametrize("dtype", HALVES)
def test_products_in_half_precision_ask_for_float32_sums(product, dtype):
    assert "preferred_element_type=float32" in program(product, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_dtype_is_where_torch_computes(dtype):
    assert operations.wide_dtype(numpy_dtype(dtype)) == np.dtype("float64" if dtype == "float64" else "float32")
