"""The Flax wing against the torch wing on the same weights: values, gradients, masks, dtypes, transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from helpers import (
    ATTENTION,
    BY_ID,
    HALVES,
    MAIN,
    MASK_NUMBERS,
    MASK_SHAPES,
    Attention,
    assert_close,
    build,
    fill,
    jax_layer,
    linears,
    mask_array,
    mirror,
    random,
    to_jax,
    to_numpy,
    to_torch,
)

import jax_impl
import torch_impl

# In units of u·scale, for outputs and for gradients. The order of summation alone gives up to 43 in float32.
FLOAT = (64, 128)
HALF = (6, 12)


def leaves(result):
    return result if isinstance(result, tuple) else (result,)


# Compilation is nearly all that these tests cost, and half of it is optimisation. Programs compiled as a user's are
# held to the eager modules below.
QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def forward_and_back(graph, state, inputs, mask, cotangents):
    """One compiled program for a module and its vjp; weights, inputs and masks are its arguments."""
    parameters, rest = state

    def call(parameters, inputs):
        return leaves(nnx.merge(graph, parameters, rest)(*inputs, *mask))

    out, pull = jax.vjp(call, parameters, inputs)
    return out, *pull(cotangents)


def jax_evidence(module, twin, inputs, mask, cotangents):
    """Outputs and gradients of the twin, each under the name that torch gives it."""
    graph, parameters, rest = nnx.split(twin, nnx.Param, ...)
    arguments = (tuple(map(to_jax, xs)) for xs in (inputs, mask, cotangents))
    out, parameters, inputs = forward_and_back(graph, (parameters, rest), *arguments)
    gradients = nnx.merge(graph, parameters, rest)
    found = {f"output {i}": x for i, x in enumerate(out)} | {f"input {i} gradient": x for i, x in enumerate(inputs)}
    for path, layer in linears(module).items():
        twin_layer = jax_layer(gradients, path)
        found[f"{path}.weight gradient"] = twin_layer.kernel[...].T
        if layer.bias is not None:
            found[f"{path}.bias gradient"] = twin_layer.bias[...]
    return {name: np.asarray(x) for name, x in found.items()}


def torch_evidence(module, inputs, mask, cotangents):
    module.zero_grad()
    inputs = [to_torch(x).requires_grad_() for x in inputs]
    out = leaves(module(*inputs, *map(to_torch, mask)))
    torch.autograd.backward(out, [to_torch(x) for x in cotangents])
    found = {f"output {i}": x for i, x in enumerate(out)} | {f"input {i} gradient": x.grad for i, x in enumerate(inputs)}
    # A projection that no output depends on has no gradient in torch and gradient 0 in Flax: the same statement.
    found |= {f"{name} gradient": torch.zeros_like(p) if p.grad is None else p.grad for name, p in module.named_parameters()}
    return {name: to_numpy(x) for name, x in found.items()}


def evidence(case: Attention, dtype: str, *mask: np.ndarray):
    module = build(case, dtype)
    inputs = [to_numpy(to_torch(x, dtype)) for x in case.inputs()]
    cotangents = cotangents_of(case, dtype)
    return (
        jax_evidence(module, mirror(module, **case.sizes), inputs, mask, cotangents),
        torch_evidence(module, inputs, mask, cotangents),
    )


def cotangents_of(case, dtype):
    shapes = [(case.n, case.lq, case.width), *([case.scores] if case.name == "MultiHeadAttention" else [])]
    rng = random("cotangents", case.id)
    return [to_numpy(to_torch(rng.standard_normal(shape), dtype)) for shape in shapes]


def eager_outputs(case: Attention, *mask: np.ndarray):
    """Outputs alone, op by op: a new form of mask then costs two small compilations, not a program."""
    module, inputs = build(case, "float32"), [x.astype(np.float32) for x in case.inputs()]
    found = leaves(mirror(module, **case.sizes)(*map(to_jax, inputs), *map(to_jax, mask)))
    with torch.no_grad():
        expected = leaves(module(*map(to_torch, inputs), *map(to_torch, mask)))
    return [np.asarray(x) for x in found], [to_numpy(x) for x in expected]


def assert_outputs_agree(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, FLOAT[0])


def scale_of(name: str, expected: dict[str, np.ndarray]) -> float:
    # A key's bias moves no output: its gradient is rounding alone, so a bias is measured on its kernel's scale too.
    arrays = [expected[name], expected.get(name.replace(".bias gradient", ".weight gradient"))]
    return max(np.abs(x[np.isfinite(x)].astype(np.float64)).max(initial=0.0) for x in arrays)


def assert_agree(found, expected, bounds):
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        assert_close(found[name], want, bounds[not name.startswith("output")], scale_of(name, expected), name)


cases = pytest.mark.parametrize("case", ATTENTION, ids=[case.id for case in ATTENTION])
main = pytest.mark.parametrize("case", MAIN, ids=[case.name for case in MAIN])
# A program is compiled for each dtype and shape, so the other dtypes run on fewer cases.
FEW = [*MAIN, BY_ID["MultiHeadAttention-one-head"]]
few = pytest.mark.parametrize("case", FEW, ids=[case.id for case in FEW])


# ---------------------------------------------------------------- values and gradients


@cases
def test_float32_without_a_mask(case):
    assert_agree(*evidence(case, "float32"), FLOAT)


@cases
def test_float32_on_shifted_rows_of_low_variance(case):
    module = build(case, "float32")
    inputs, cotangents = [x.astype(np.float32) for x in case.inputs("shifted")], cotangents_of(case, "float32")
    found = jax_evidence(module, mirror(module, **case.sizes), inputs, [], cotangents)
    expected = torch_evidence(module, inputs, [], cotangents)
    exact = torch_evidence(
        module.double(), [x.astype(np.float64) for x in inputs], [], [x.astype(np.float64) for x in cotangents]
    )
    scales = {name: scale_of(name, expected) for name in expected}
    # Gradients cancel here, in torch too. Its own error, at the leaf where it is worst, says how much.
    noise = max(np.abs(expected[name] - exact[name]).max() / (scales[name] or 1) for name in expected) / 2.0**-24
    assert noise < 1e5, "nothing left to compare"
    for name, want in expected.items():
        assert_close(found[name], want, FLOAT[0] + 8 * noise, scales[name], name)


@main
@pytest.mark.parametrize("form", MASK_SHAPES)
def test_every_mask_form(case, form):
    found, expected = eager_outputs(case, mask_array(case, form))
    assert all(np.isfinite(x).all() for x in expected)
    assert_outputs_agree(found, expected)


@main
@pytest.mark.parametrize("mask_dtype", [name for name in MASK_NUMBERS if name != "int64"])
def test_every_mask_dtype(case, mask_dtype):
    assert_outputs_agree(*eager_outputs(case, mask_array(case, "(N,1,Lq,Lk)", mask_dtype)))


@main
@pytest.mark.parametrize("form", MASK_SHAPES)
def test_fully_hidden_queries_have_nan_in_the_same_places(case, form):
    found, expected = eager_outputs(case, mask_array(case, form, fully_hidden=True))
    assert np.isnan(expected[0]).any() != (case.name == "SelfAttention")
    assert_outputs_agree(found, expected)


@main
def test_gradients_under_a_mask(case):
    assert_agree(*evidence(case, "float32", mask_array(case, "(N,1,Lq,Lk)")), FLOAT)


@main
def test_gradients_of_fully_hidden_queries_have_nan_in_the_same_places(case):
    found, expected = evidence(case, "float32", mask_array(case, "(N,1,Lq,Lk)", fully_hidden=True))
    memory = "input 0 gradient" if case.name == "SelfAttention" else "input 2 gradient"
    assert np.isnan(expected[memory]).any() != (case.name == "SelfAttention")
    assert_agree(found, expected, FLOAT)


@pytest.mark.parametrize("form", ["(Lq,Lk)", "(N,1,1,Lk)", "(N,h,Lq,Lk)"])
@pytest.mark.parametrize("name", ["Multi_Head_Self_Attention-square", "SelfAttention-square", "MultiHeadAttention-output-bias"])
def test_masks_on_square_cases_where_a_swapped_axis_keeps_its_shape(name, form):
    assert_outputs_agree(*eager_outputs(BY_ID[name], mask_array(BY_ID[name], form)))


@few
def test_float64(case):
    with jax.enable_x64(True):
        found, expected = evidence(case, "float64")
        assert found["output 0"].dtype == np.float64
        assert_agree(found, expected, FLOAT)


@main
def test_float64_under_masks(case):
    with jax.enable_x64(True):
        for fully_hidden in (False, True):
            mask = mask_array(case, "(N,1,Lq,Lk)", "int64", fully_hidden)
            assert_agree(*evidence(case, "float64", mask), FLOAT)


@main
@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision(case, dtype):
    assert_agree(*evidence(case, dtype), HALF)


@main
@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_under_a_mask(case, dtype):
    if (case.name, dtype) == ("SelfAttention", "float16"):
        pytest.skip("float16 cannot hold -1e20: that both wings refuse it is tested elsewhere")
    assert_agree(*evidence(case, dtype, mask_array(case, "(N,1,Lq,Lk)")), HALF)


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [((6, 10, 0.1), "float32"), ((8, 8, 0.5), "float32"), *(((6, 10, 0.1), dtype) for dtype in HALVES)],
    ids=str,
)
def test_feed_forward(sizes, dtype):
    module = fill(torch_impl.FeedForwardNetwork(*sizes), dtype, sizes).eval()
    twin = mirror(module, d_model=sizes[0], d_ff=sizes[1], p_drop=sizes[2])
    twin.eval()
    rng = random("ffn", sizes)
    x, cotangent = (to_numpy(to_torch(rng.standard_normal((3, 4, sizes[0])), dtype)) for _ in range(2))
    found, expected = jax_evidence(module, twin, [x], [], [cotangent]), torch_evidence(module, [x], [], [cotangent])
    assert_agree(found, expected, FLOAT if dtype == "float32" else HALF)


def test_feed_forward_in_float64():
    with jax.enable_x64(True):
        test_feed_forward((6, 10, 0.1), "float64")


def test_defaults_are_the_documents():
    attention = nnx.eval_shape(lambda: jax_impl.MultiHeadAttention(rngs=nnx.Rngs(0)))
    network = nnx.eval_shape(lambda: jax_impl.FeedForwardNetwork(rngs=nnx.Rngs(0)))
    assert attention.W_q.kernel.shape == attention.W_o.kernel.shape == (512, 512)
    assert [layer.bias for layer in (attention.W_q, attention.W_k, attention.W_v, attention.W_o)] == [None] * 4
    assert [network.model.layers[i].kernel.shape for i in (0, 3)] == [(512, 2048), (2048, 512)]
    assert [network.model.layers[i].rate for i in (2, 4)] == [0.1, 0.1]


def test_the_core_function_broadcasts_as_torch_does():
    rng = random("core broadcast")
    arrays = [rng.standard_normal(s).astype(np.float32) for s in ((2, 3, 5, 4), (1, 3, 7, 4), (2, 1, 7, 6))]
    found = jax_impl.scaled_dot_product_attention(*map(to_jax, arrays))
    expected = torch_impl.scaled_dot_product_attention(*map(to_torch, arrays))
    for a, b in zip(found, expected, strict=True):
        assert_close(np.asarray(a), to_numpy(b), FLOAT[0])


@main
def test_no_key_at_all_gives_what_torch_gives(case):
    module = build(case, "float32")
    twin = mirror(module, **case.sizes)
    query, memory = np.ones((2, 5, case.width), np.float32), np.ones((2, 0, case.width), np.float32)
    inputs = [memory, memory, query] if case.name == "SelfAttention" else [query, memory, memory]
    found, expected = leaves(twin(*map(to_jax, inputs)))[0], leaves(module(*map(to_torch, inputs)))[0]
    assert_close(np.asarray(found), to_numpy(expected), FLOAT[0])


# ---------------------------------------------------------------- quirks


def test_unused_projections_have_no_gradient_in_torch_and_gradient_zero_in_flax():
    case = MAIN[1]
    module = build(case, "float32")
    twin = mirror(module, **case.sizes)
    inputs = case.inputs()
    module(*(to_torch(x, "float32") for x in inputs)).sum().backward()
    gradients = nnx.grad(lambda twin: twin(*(to_jax(x, "float32") for x in inputs)).sum())(twin)
    for name in ("values", "keys", "queries"):
        assert getattr(module, name).weight.grad is None
        assert (np.asarray(gradients[name]["kernel"][...]) == 0).all()
    assert (np.asarray(gradients["fc_out"]["kernel"][...]) != 0).all()


def test_key_bias_gradient_is_rounding_alone():
    found, expected = evidence(BY_ID["MultiHeadAttention-bias"], "float32")
    for gradients in (found, expected):
        assert np.abs(gradients["W_k.bias gradient"]).max() < 1e-5 * np.abs(gradients["W_k.weight gradient"]).max()


# ---------------------------------------------------------------- transformations


def call_of(case):
    twin = mirror(build(case, "float32"), **case.sizes)
    inputs = [to_jax(x, "float32") for x in case.inputs()]
    return twin, inputs, to_jax(mask_array(case, "(Lq,Lk)"))


@main
def test_eager_agrees_with_compiled(case):
    twin, inputs, mask = call_of(case)
    eager, compiled = twin(*inputs, mask), nnx.jit(lambda twin, *args: twin(*args))(twin, *inputs, mask)
    for a, b in zip(leaves(eager), leaves(compiled), strict=True):
        assert_close(np.asarray(a), np.asarray(b), FLOAT[0])


@main
def test_vmap_over_inputs_and_over_masks(case):
    twin, inputs, mask = call_of(case)
    stacked = [jnp.stack([x, -2 * x, x + 1]) for x in inputs]
    masks = jnp.stack([mask, jnp.roll(mask, 1, 0), jnp.roll(mask, 2, 0)])
    mapped = jax.jit(jax.vmap(twin))(*stacked, masks)
    one = jax.jit(twin)
    for i in range(3):
        for a, b in zip(leaves(mapped), leaves(one(*(x[i] for x in stacked), masks[i])), strict=True):
            assert_close(np.asarray(a[i]), np.asarray(b), FLOAT[0])


def test_second_derivative_agrees_with_torch():
    case = MAIN[2]
    module = build(case, "float64")
    with jax.enable_x64(True):
        twin = mirror(module, **case.sizes)
        query, key, value = case.inputs()

        def energy(q):
            return (twin(q, jnp.asarray(key), jnp.asarray(value))[0] ** 2).sum()

        direction = random("direction").standard_normal(query.shape)
        found = jax.jit(lambda q, v: jax.jvp(jax.grad(energy), (q,), (v,))[1])(jnp.asarray(query), jnp.asarray(direction))
    q = torch.from_numpy(query)
    _, expected = torch.autograd.functional.hvp(
        lambda q: (module(q, torch.from_numpy(key), torch.from_numpy(value))[0] ** 2).sum(), q, torch.from_numpy(direction)
    )
    assert_close(np.asarray(found), expected.numpy(), 4 * FLOAT[1])


def test_module_round_trips_through_split_and_merge():
    twin, inputs, mask = call_of(MAIN[0])
    again = nnx.merge(*nnx.split(twin))
    np.testing.assert_array_equal(np.asarray(again(*inputs, mask)), np.asarray(twin(*inputs, mask)))


# ---------------------------------------------------------------- the comparison can fail


def swap_projections(module):
    q, k = module.queries.kernel[...], module.keys.kernel[...]
    module.queries.kernel.set_value(k)
    module.keys.kernel.set_value(q)


PLANTED = {
    "one weight": lambda module: module.queries.kernel.set_value(module.queries.kernel[...].at[1, 2].multiply(1 + 1e-4)),
    "transposed weight": lambda module: module.fc_out.kernel.set_value(module.fc_out.kernel[...].T),
    "swapped projections": swap_projections,
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_seen(fault):
    case = BY_ID["Multi_Head_Self_Attention-square"]
    module = build(case, "float32")
    twin = mirror(module, **case.sizes)
    PLANTED[fault](twin)
    inputs = [x.astype(np.float32) for x in case.inputs()]
    cotangents = cotangents_of(case, "float32")
    found, expected = jax_evidence(module, twin, inputs, [], cotangents), torch_evidence(module, inputs, [], cotangents)
    with pytest.raises(AssertionError, match="u·scale"):
        assert_agree(found, expected, FLOAT)
