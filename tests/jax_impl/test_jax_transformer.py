"""The Transformer of the Flax wing against the torch wing on the same weights: parts, layers, whole, and decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from helpers import (
    DTYPES,
    SEED,
    assert_close,
    fill,
    jax_leaves,
    mirror,
    numpy_dtype,
    random,
    to_jax,
    to_numpy,
    to_torch,
)
from transformer_cases import LT, N_SOURCE, N_TARGET, OPTIONS, PATTERNS, SIZES, N, ids, mask_of, states

import jax_impl
import torch_impl

QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
WINGS = (torch_impl, jax_impl)


@pytest.fixture
def double():
    with jax.enable_x64(True):
        yield


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK)
def forward_and_back(graph, call, state, args, cotangents):
    """Outputs, and gradients of the parameters and of the floating point arguments."""
    parameters, rest = state
    real = [jnp.issubdtype(a.dtype, jnp.floating) for a in args]

    def run(parameters, values):
        given = iter(values)
        return call(nnx.merge(graph, parameters, rest), *(next(given) if r else a for r, a in zip(real, args)))

    out, pull = jax.vjp(run, parameters, [a for r, a in zip(real, args) if r])
    return out, *pull(cotangents)


def plain_call(module, *args):
    return module(*args)


def evidence(module, twin, args, call=plain_call, dtype="float64"):
    """Outputs and gradients of both, each under the name that torch gives it."""
    tensors = [to_torch(a).requires_grad_(a.dtype.kind not in "ib") for a in args]
    module.zero_grad()
    out = call(module, *tensors)
    cotangent = to_numpy(to_torch(random("cotangent").standard_normal(out.shape), dtype))
    out.backward(to_torch(cotangent))
    inputs = {f"input {i} gradient": t.grad for i, t in enumerate(tensors) if t.requires_grad}
    parameters = {f"{name} gradient": p.grad for name, p in module.named_parameters()}
    expected = {"output": out} | inputs | parameters
    graph, variables, rest = nnx.split(twin, nnx.Param, ...)
    found, gradients, of_inputs = forward_and_back(graph, call, (variables, rest), [*map(to_jax, args)], to_jax(cotangent))
    found = {"output": found} | dict(zip(inputs, of_inputs, strict=True))
    for path, (variable, transposed) in jax_leaves(module, nnx.merge(graph, gradients, rest)).items():
        found[f"{path} gradient"] = variable[...].T if transposed else variable[...]
    return {k: np.asarray(x) for k, x in found.items()}, {k: to_numpy(x) for k, x in expected.items()}


def assert_agree(found, expected, units):
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        # A key's bias moves no output: its gradient is rounding alone, so a bias is measured on its kernel's scale too.
        arrays = [want, expected.get(name.replace(".bias gradient", ".weight gradient"), want)]
        scale = max(np.abs(x.astype(np.float64)).max() for x in arrays)
        assert_close(found[name], want, units, scale, name)


# ---------------------------------------------------------------- parts


class Parts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch_impl.Embedding(7, 12)
        self.layer = torch_impl.LayerNorm(12, 1e-2)
        self.no_bias = torch_impl.LayerNorm(12, bias=False)
        self.rms = torch_impl.RMSNorm(12)


class FlaxParts(nnx.Module):
    def __init__(self, *, rngs):
        self.embedding = jax_impl.Embedding(7, 12, rngs=rngs)
        self.layer = jax_impl.LayerNorm(12, 1e-2, rngs=rngs)
        self.no_bias = jax_impl.LayerNorm(12, bias=False, rngs=rngs)
        self.rms = jax_impl.RMSNorm(12, rngs=rngs)


def all_parts(module, tokens, x):
    """Every part's output in one array, so that one program serves all."""
    wing = torch_impl if isinstance(module, Parts) else jax_impl
    stack = torch.stack if wing is torch_impl else jnp.stack
    exact, tanh = wing.GELU(), wing.GELU("tanh")
    parts = [module.embedding(tokens), module.layer(x), module.no_bias(x), module.rms(x), exact(x), tanh(x)]
    tied = module.embedding.attend(x)
    # Padded to the others' width by itself.
    return stack([*parts, (torch.cat if wing is torch_impl else jnp.concatenate)([tied, tied[..., :5]], -1)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_agree_with_torch_forwards_and_backwards(dtype, double):
    module = fill(Parts(), dtype)
    twin = FlaxParts(rngs=nnx.Rngs(0))
    for path, (variable, _) in jax_leaves(module, twin).items():
        variable.set_value(to_jax(dict(module.named_parameters())[path]))
    rng = random("parts")
    x = to_numpy(to_torch(3 * rng.standard_normal((2, 5, 12)), dtype))
    found, expected = evidence(module, twin, [rng.integers(0, 7, (2, 5)), x], all_parts, dtype)
    for i, name in enumerate(("embedding", "layer", "no bias", "rms", "gelu", "gelu tanh", "attend")):
        assert_close(found["output"][i], expected["output"][i], 2 if dtype in ("bfloat16", "float16") else 16, what=name)
    assert_agree(found, expected, 12 if dtype in ("bfloat16", "float16") else 128)


def test_initial_weights_are_distributed_like_torchs():
    rows = np.asarray(jax_impl.Embedding(400, 50, rngs=nnx.Rngs(SEED)).embedding[...], np.float64).ravel()
    n = len(rows)
    assert abs(rows.mean()) < 5 / n**0.5
    assert abs(rows.var() - 1) < 5 * (2 / n) ** 0.5
    assert abs((rows**4).mean() - 3) < 5 * (96 / n) ** 0.5
    for layer in (jax_impl.LayerNorm(6, rngs=nnx.Rngs(0)), jax_impl.RMSNorm(6, rngs=nnx.Rngs(0))):
        assert (np.asarray(layer.scale[...]) == 1).all()
    assert (np.asarray(jax_impl.LayerNorm(6, rngs=nnx.Rngs(0)).bias[...]) == 0).all()


def test_a_cast_embedding_computes_in_its_new_dtype():
    embedding = jax_impl.Embedding(7, 4, rngs=nnx.Rngs(0))
    embedding.embedding.set_value(embedding.embedding[...].astype(jnp.bfloat16))
    assert embedding(jnp.array([3])).dtype == jnp.bfloat16
    # What nnx.Embed computes in where it is asked to; parity reads it as a setting.
    assert embedding.dtype is None


def test_an_id_that_names_no_row_gives_nan_in_a_compiled_program():
    embedding = jax_impl.Embedding(7, 4, rngs=nnx.Rngs(0))
    out = np.asarray(jax.jit(embedding)(jnp.array([0, 7, -1, 6])))
    assert np.isnan(out).all(-1).tolist() == [False, True, True, False]


def test_position_tables_are_torchs():
    for length, width in ((9, 6), (1024, 12)):
        np.testing.assert_array_equal(
            jax_impl.positions.sinusoids(length, width), torch_impl.positions.sinusoids(length, width)
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_positions_are_torchs(dtype, double):
    rng = random("positions")
    for name, shape in (("SinusoidalPositions", (2, 4, 6)), ("RotaryPositions", (2, 3, 4, 6))):
        x = to_torch(rng.standard_normal(shape), dtype)
        ours, twin = (getattr(wing, name)(6, 9) for wing in WINGS)
        compiled = jax.jit(twin)
        for offset in (0, 5):
            expected = to_numpy(ours(x, offset))
            for found in (twin(to_jax(x), offset), compiled(to_jax(x), jnp.asarray(offset))):
                # Turning adds two products: fused or not is the compiler's choice.
                assert_close(np.asarray(found), expected, 0 if name == "SinusoidalPositions" else 4)


def test_masks_are_torchs():
    tokens = ids("int32")[0]
    found = jax_impl.padding_mask(to_jax(tokens), 0)
    np.testing.assert_array_equal(np.asarray(found), to_numpy(torch_impl.padding_mask(to_torch(tokens), 0)))
    np.testing.assert_array_equal(np.asarray(found), mask_of("padding", tokens, 1))
    for lq, lk, offset in ((5, 5, 0), (2, 7, 3), (4, 2, 0)):
        found = jax.jit(jax_impl.causal_mask, static_argnums=(0, 1))(lq, lk, found, jnp.asarray(offset))
        expected = torch_impl.causal_mask(lq, lk, torch.zeros(1), offset)
        np.testing.assert_array_equal(np.asarray(found), to_numpy(expected))


def attention_call(module, query, memory, mask):
    return module(query, memory, memory + 1, mask)[0]


@pytest.mark.parametrize(
    "options", [dict(n_kv_heads=2), dict(n_kv_heads=1, rotary=True, bias=True, output_bias=False)], ids=["grouped", "rotary"]
)
def test_options_of_attention(options, double):
    sizes = dict(d_model=12, n_heads=6, d_q=4, d_k=4, d_v=3)
    rotary = [dict(options, rotary=wing.RotaryPositions(4, 9)) if "rotary" in options else options for wing in WINGS]
    module = fill(torch_impl.MultiHeadAttention(**sizes, **rotary[0]), "float64")
    twin = mirror(module, **sizes, **rotary[1])
    rng = random("options")
    args = [rng.standard_normal((2, 5, 12)), rng.standard_normal((2, 7, 12)), rng.random((2, 1, 5, 7)) < 0.3]
    assert_agree(*evidence(module, twin, args, attention_call), 128)


def test_without_need_weights_the_output_is_the_same():
    module = jax_impl.MultiHeadAttention(12, 6, 4, 4, 3, rngs=nnx.Rngs(0))
    x = to_jax(states("float32")[0])
    out, none = module(x, x, x, need_weights=False)
    assert none is None
    np.testing.assert_array_equal(np.asarray(out), np.asarray(module(x, x, x)[0]))


def test_attention_dropout_drops_the_weights_before_the_values_and_returns_them_whole():
    module = jax_impl.MultiHeadAttention(12, 6, 4, 4, 3, p_drop=0.4, rngs=nnx.Rngs(SEED))
    again = jax_impl.MultiHeadAttention(12, 6, 4, 4, 3, p_drop=0.4, rngs=nnx.Rngs(SEED))
    x = to_jax(states("float32")[0])
    dropped, returned = module(x, x, x)
    again.eval()
    out, weights = again(x, x, x)
    np.testing.assert_array_equal(np.asarray(returned), np.asarray(weights))
    again.train()
    expected = jnp.matmul(again.attention.dropout(weights), again.keys_values(x, x)[1])
    expected = again.W_o(expected.swapaxes(1, 2).reshape(N, LT, 18))
    assert_close(np.asarray(dropped), np.asarray(expected), 16)
    assert np.abs(np.asarray(dropped - out)).max() > 1e-2


# ---------------------------------------------------------------- layers and the whole


def pair(name, chosen, dtype="float64", **more):
    sizes = SIZES | dict(n_layers=more.pop("n_layers", 1))
    ours, theirs = (wing.TransformerConfig(**sizes, **chosen) for wing in WINGS)
    ends = dict(n_source=N_SOURCE, n_target=N_TARGET) if name == "Transformer" else {}
    module = fill(getattr(torch_impl, name)(config=ours, **ends, **more), dtype, *chosen).eval()
    twin = mirror(module, config=theirs, **ends, **more)
    twin.eval()
    return module, twin


@pytest.mark.parametrize("chosen", [OPTIONS["paper"], OPTIONS["rotary, one key head"]], ids=["paper", "rotary"])
def test_layers_under_every_pattern_of_masks(chosen, double):
    (x, memory), (source, target) = states(), ids()
    for name, args, shapes in (
        ("EncoderLayer", [x], [(target, (N, 1, LT, LT))]),
        ("DecoderLayer", [x, memory], [(target, (N, 1, LT, LT)), (source, (N, 1, LT, 7))]),
    ):
        module, twin = pair(name, chosen)
        graph, state = nnx.split(twin)
        compiled = jax.jit(lambda s, *xs, graph=graph: nnx.merge(graph, s)(*xs), compiler_options=QUICK)
        for pattern in PATTERNS:
            # One shape for all patterns, so that one program serves them.
            masks = [] if pattern == "none" else [np.broadcast_to(mask_of(pattern, t, LT), s).copy() for t, s in shapes]
            found = compiled(state, *map(to_jax, args), *map(to_jax, masks))
            expected = module(*map(to_torch, args), *map(to_torch, masks))
            assert_close(np.asarray(found), to_numpy(expected), 128, what=f"{name}, {pattern}")


@pytest.mark.parametrize("chosen", OPTIONS.values(), ids=OPTIONS)
def test_the_transformer_agrees_with_torch_forwards_and_backwards(chosen, double):
    tied = chosen.get("norm_first", False)
    module, twin = pair("Transformer", chosen, tied=tied)
    assert_agree(*evidence(module, twin, ids()), 1024)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_transformer_in_other_dtypes(dtype):
    module, twin = pair("Transformer", OPTIONS["pre-norm, gelu, bias"], dtype)
    expected = to_numpy(module(*map(to_torch, ids("int32"))))
    found = np.asarray(jax.jit(twin, compiler_options=QUICK)(*map(to_jax, ids("int32"))))
    assert found.dtype == numpy_dtype(dtype)
    assert_close(found, expected, 64)


def test_a_source_of_padding_alone_gives_nan_in_its_own_row():
    module, twin = pair("Transformer", {}, "float32")
    source, target = ids("int32")
    source[1] = 0
    found = np.asarray(jax.jit(twin, compiler_options=QUICK)(to_jax(source), to_jax(target)))
    expected = to_numpy(module(to_torch(source), to_torch(target)))
    assert np.isnan(found).all((1, 2)).tolist() == [False, True, False]
    assert_close(found, expected, 256)


def test_dropout_stands_where_torchs_stands():
    module, twin = pair("Transformer", dict(p_drop=0.5, p_attention=0.25), "float32")
    rates = {name: m.p for name, m in module.named_modules() if isinstance(m, torch_impl.Dropout)}
    found = {".".join(map(str, path)): m.rate for path, m in nnx.iter_modules(twin) if isinstance(m, jax_impl.Dropout)}
    assert {name.replace("model.layers", "model"): rate for name, rate in found.items()} == rates
    layer = twin.encoder.layers[0]
    layer.train()
    x, call = to_jax(states("float32")[0]), nnx.jit(plain_call)
    first, second = (np.asarray(call(layer, x)) for _ in range(2))
    assert not np.array_equal(first, second)


# ---------------------------------------------------------------- transformations


def test_gradients_of_each_sequence_by_vmap():
    _, twin = pair("Transformer", {}, "float32")
    graph, state, rest = nnx.split(twin, nnx.Param, ...)
    source, target = map(to_jax, ids("int32"))

    def loss(state, source, target):
        return (nnx.merge(graph, state, rest)(source[None], target[None]) ** 2).sum()

    gradient = jax.jit(jax.grad(loss), compiler_options=QUICK)
    mapped = jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0)), compiler_options=QUICK)(state, source, target)
    for i in range(N):
        for a, b in zip(jax.tree.leaves(mapped), jax.tree.leaves(gradient(state, source[i], target[i])), strict=True):
            np.testing.assert_allclose(np.asarray(a[i]), np.asarray(b), rtol=0, atol=1e-4 * float(jnp.abs(b).max()) + 1e-4)


# ---------------------------------------------------------------- decoding


def token_by_token(twin, source, target, masks):
    memory, hidden = twin.encode(source), jax_impl.padding_mask(source, 0)
    caches, scores = twin.decoder.start(memory, LT), []
    for i in range(LT):
        x = twin.embed(twin.target_embedding, target[:, i : i + 1], i)
        x, caches = twin.decoder.step(x, caches, i, masks[:, :, i : i + 1], hidden)
        scores.append(twin.scores(x))
    return twin.decode(target, memory, hidden), jnp.concatenate(scores, 1)


@pytest.mark.parametrize("name", ["paper", "rotary, one key head"])
def test_token_by_token_the_cache_gives_the_scores_of_the_whole_target(name, double):
    _, twin = pair("Transformer", OPTIONS[name])
    masks = to_jax(mask_of("both", ids()[1], LT))
    graph, state = nnx.split(twin)
    compiled = jax.jit(lambda state, *args: token_by_token(nnx.merge(graph, state), *args), compiler_options=QUICK)
    whole, steps = compiled(state, *map(to_jax, ids()), masks)
    assert_close(np.asarray(steps), np.asarray(whole), 256)


@pytest.mark.parametrize("name", ["paper", "rotary, one key head"])
def test_both_wings_decode_the_same_tokens_with_and_without_a_cache(name):
    module, _ = pair("Transformer", OPTIONS[name], "float32")
    source = ids("int32")[0]
    with torch.no_grad():
        for path, p in module.named_parameters():
            # Random shifts would outshout what is read: one token would be the likeliest everywhere.
            if path.endswith("bias"):
                p.zero_()
            elif ".W_" in path:
                p.mul_(3)
        module.output.bias[0] = -20
    config = jax_impl.TransformerConfig(**SIZES | dict(n_layers=1), **OPTIONS[name])
    twin = mirror(module, n_source=N_SOURCE, n_target=N_TARGET, config=config)
    twin.eval()
    said = torch_impl.greedy_decode(module, to_torch(source), start=1, stop=1, max_new=6)
    # One token that ends a sequence early, and that which began it.
    for stop in (int(said[0, 3]) or 1, 1):
        expected = torch_impl.greedy_decode(module, to_torch(source), start=1, stop=stop, max_new=6)
        for use_cache in (True, False):
            found = jax_impl.greedy_decode(twin, to_jax(source), start=1, stop=stop, max_new=6, use_cache=use_cache)
            assert found.dtype == source.dtype
            np.testing.assert_array_equal(np.asarray(found), to_numpy(expected))
    assert len(said.unique()) > 2


def test_padding_that_the_model_chooses_ends_a_target_and_lengths_reach_max_len():
    _, twin = pair("Transformer", {}, "float32")
    twin.output.bias.set_value(twin.output.bias[...].at[0].set(1e3))
    source = to_jax(ids("int32")[0])
    found = jax_impl.greedy_decode(twin, source, start=1, stop=2, max_new=16)
    assert np.asarray(found).tolist() == [[1] + [0] * 16] * N
