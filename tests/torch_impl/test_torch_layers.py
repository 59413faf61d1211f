"""The small parts of the Transformer in the torch wing: each against torch.nn or against a formula written again."""

import math

import numpy as np
import pytest
import torch
from helpers import DTYPES, assert_same_bits, fill, random, to_torch
from test_torch_documents import third_document_core

import torch_impl
from torch_impl import masks, operations, positions


def bits_and_gradients(ours, reference, x):
    """Outputs and all gradients of two modules that hold the same weights."""
    reference.load_state_dict(ours.state_dict())
    found = []
    for module in (ours, reference):
        leaf = x.clone().requires_grad_() if x.is_floating_point() else x
        module.zero_grad()
        out = module(leaf)
        out.backward(to_torch(random("cotangent").standard_normal(out.shape)).to(out.dtype))
        found.append([out, *([leaf.grad] if x.is_floating_point() else []), *(p.grad for p in module.parameters())])
    for a, b in zip(*found, strict=True):
        assert_same_bits(a, b)


def numbers(dtype, *shape):
    return to_torch(random("layers", shape).standard_normal(shape) * 3, dtype)


LAYERS = {
    "GELU": (torch_impl.GELU, torch.nn.GELU),
    "GELU tanh": (lambda: torch_impl.GELU("tanh"), lambda: torch.nn.GELU(approximate="tanh")),
    "LayerNorm": (lambda: torch_impl.LayerNorm(12), lambda: torch.nn.LayerNorm(12)),
    "LayerNorm, eps": (lambda: torch_impl.LayerNorm(12, 0.5), lambda: torch.nn.LayerNorm(12, eps=0.5)),
    "LayerNorm, no bias": (lambda: torch_impl.LayerNorm(12, bias=False), lambda: torch.nn.LayerNorm(12, bias=False)),
    "RMSNorm": (lambda: torch_impl.RMSNorm(12), lambda: torch.nn.RMSNorm(12, eps=1e-6)),
    "RMSNorm, eps": (lambda: torch_impl.RMSNorm(12, 0.5), lambda: torch.nn.RMSNorm(12, eps=0.5)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ours", "reference"), LAYERS.values(), ids=LAYERS)
def test_a_layer_is_torchs_bit_for_bit(ours, reference, dtype):
    bits_and_gradients(fill(ours(), dtype), reference().to(getattr(torch, dtype)), numbers(dtype, 2, 5, 12))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_embedding_is_torchs_bit_for_bit(dtype):
    ids = torch.tensor([[1, 0, 6], [6, 6, 2]])
    bits_and_gradients(fill(torch_impl.Embedding(7, 4), dtype), torch.nn.Embedding(7, 4, dtype=getattr(torch, dtype)), ids)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_tied_projection_is_a_linear_layer_without_bias(dtype):
    embedding, x = fill(torch_impl.Embedding(7, 4), dtype), numbers(dtype, 2, 3, 4)
    assert_same_bits(embedding.attend(x), torch.nn.functional.linear(x, embedding.weight))


@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (lambda: torch_impl.Embedding(7, 4), lambda: torch.nn.Embedding(7, 4)),
        (lambda: torch_impl.LayerNorm(4), lambda: torch.nn.LayerNorm(4)),
        (lambda: torch_impl.RMSNorm(4), lambda: torch.nn.RMSNorm(4)),
    ],
    ids=["Embedding", "LayerNorm", "RMSNorm"],
)
def test_untouched_weights_are_torchs_own(make, plain, seed):
    torch.manual_seed(seed)
    ours = make()
    torch.manual_seed(seed)
    for a, b in zip(ours.parameters(), plain().parameters(), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize(("name", "kind"), [("relu", torch.nn.ReLU), ("gelu", torch.nn.GELU), ("gelu_tanh", torch.nn.GELU)])
def test_the_activation_of_the_network_goes_by_its_name(name, kind):
    network = fill(torch_impl.FeedForwardNetwork(6, 10, 0.0, activation=name), "float64")
    plain = kind(approximate="tanh") if name == "gelu_tanh" else kind()
    x = numbers("float64", 3, 4, 6)
    assert_same_bits(network(x), network.model[3](plain(network.model[0](x))))


@pytest.mark.parametrize("dtype", DTYPES)
def test_multiply_rounds_once(dtype):
    x = numbers(dtype, 3, 40)
    wide = torch.float32 if dtype in ("bfloat16", "float16") else x.dtype
    expected = (x.to(wide) * torch.tensor(math.sqrt(12), dtype=wide)).to(x.dtype)
    assert_same_bits(operations.multiply(x, math.sqrt(12)), expected)


# ---------------------------------------------------------------- positions


def papers_table(length, width):
    """The formula of section 3.5, number by number."""
    return [
        [(math.sin, math.cos)[j % 2](position / 10000 ** (2 * (j // 2) / width)) for j in range(width)]
        for position in range(length)
    ]


@pytest.mark.parametrize(("length", "width"), [(9, 6), (1024, 12)])
def test_sinusoids_are_the_papers(length, width):
    # An angle is below 1024: half an ulp of it is 2^-44.
    np.testing.assert_allclose(positions.sinusoids(length, width), papers_table(length, width), rtol=0, atol=2.0**-43)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinusoids_are_added_where_the_token_stands_and_rounded_once(dtype):
    module, x = torch_impl.SinusoidalPositions(6, 9), numbers(dtype, 2, 4, 6)
    table = torch.from_numpy(positions.sinusoids(9, 6)).to(x.dtype)
    for offset in (0, 5, torch.tensor(3)):
        assert_same_bits(module(x, offset), x + table[offset : int(offset) + 4])


@pytest.mark.parametrize("make", [lambda: torch_impl.SinusoidalPositions(6, 9), lambda: torch_impl.RotaryPositions(6, 9)])
def test_casting_a_model_leaves_its_positions_in_full_precision(make):
    module = make()
    x = torch.ones(2, 4, 6, dtype=torch.float64)
    x = x[:, None] if isinstance(module, positions.RotaryPositions) else x
    expected = module(x)
    assert_same_bits(module.bfloat16().double()(x), expected)
    assert not list(module.state_dict())


def test_the_tables_of_two_models_are_their_own():
    first, second = torch_impl.SinusoidalPositions(6, 9), torch_impl.SinusoidalPositions(6, 9)
    first.table.zero_()
    assert second.table.any()
    assert positions.sinusoids(9, 6).any()


def turned(x, offset=0, base=10000.0):
    """Rotary positions as a product of complex numbers: coordinate i is the real part and i + d / 2 the imaginary one."""
    d = x.shape[-1]
    rates = torch.tensor([base ** (-2 * i / d) for i in range(d // 2)], dtype=torch.float64)
    angle = (torch.arange(x.shape[-2], dtype=torch.float64) + offset)[:, None] * rates
    z = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1)


@pytest.mark.parametrize(("offset", "base"), [(0, 10000.0), (3, 10000.0), (0, 100.0)])
def test_rotary_positions_are_a_product_of_complex_numbers(offset, base):
    x = numbers("float64", 2, 3, 5, 8)
    module = torch_impl.RotaryPositions(8, 9, base)
    torch.testing.assert_close(module(x, offset), turned(x, offset, base), rtol=0, atol=1e-13)
    torch.testing.assert_close(module(x.bfloat16(), offset).double(), turned(x, offset, base), rtol=0, atol=0.2)


def test_rotary_scores_depend_on_the_distance_alone():
    q, k = numbers("float64", 1, 1, 1, 8), numbers("float64", 2, 1, 1, 8)[1:]
    module = torch_impl.RotaryPositions(8, 64)
    scores = [(module(q, i + 7) * module(k, i)).sum().item() for i in (0, 1, 40)]
    assert max(scores) - min(scores) < 1e-12
    assert abs(scores[0] - (module(q, 6) * module(k, 0)).sum().item()) > 1e-3


# ---------------------------------------------------------------- masks


def test_masks_hide_what_they_say():
    tokens = torch.tensor([[4, 0, 5], [0, 0, 6]])
    assert masks.padding_mask(tokens, 0).tolist() == [[[[False, True, False]]], [[[True, True, False]]]]
    assert masks.padding_mask(tokens, 5).sum() == 1
    whole = masks.causal_mask(4, 4, tokens)
    assert torch.equal(whole, torch.ones(4, 4).triu(1).bool()[None, None])
    assert torch.equal(masks.causal_mask(2, 4, tokens, 1), whole[:, :, 1:3])
    assert torch.equal(masks.causal_mask(2, 4, tokens, torch.tensor(2)), whole[:, :, 2:])


# ---------------------------------------------------------------- attention's options


def attention(dtype="float64", **options):
    return fill(torch_impl.MultiHeadAttention(12, 6, 4, 4, 3, bias=True, **options), dtype, *options).eval()


def inputs(dtype="float64"):
    rng = random("options")
    arrays = [rng.standard_normal((2, length, 12)) for length in (5, 7, 7)]
    return [to_torch(x, dtype) for x in arrays], to_torch(rng.random((2, 1, 5, 7)) < 0.3)


@pytest.mark.parametrize("n_kv_heads", [1, 2, 3])
def test_grouped_queries_are_heads_repeated_by_hand(n_kv_heads):
    module, (args, mask) = attention(n_kv_heads=n_kv_heads), inputs()
    plain = attention()
    state = dict(module.state_dict())
    for name, width in (("W_k", 4), ("W_v", 3)):
        for leaf in ("weight", "bias"):
            heads = state[f"{name}.{leaf}"].unflatten(0, (n_kv_heads, width))
            # Neighbouring queries share: query head i reads key head i // (6 / n_kv_heads).
            state[f"{name}.{leaf}"] = heads[[i // (6 // n_kv_heads) for i in range(6)]].flatten(0, 1)
    plain.load_state_dict(state)
    for a, b in zip(module(*args, mask), plain(*args, mask), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
    assert module.W_k.weight.shape == (4 * n_kv_heads, 12)


def test_rotary_attention_turns_queries_and_keys_before_they_meet():
    module, (args, mask) = attention(rotary=torch_impl.RotaryPositions(4, 9)), inputs()
    Q, K, V = (layer(x).unflatten(-1, (6, -1)).transpose(1, 2) for layer, x in zip((module.W_q, module.W_k, module.W_v), args))
    out, weights = third_document_core(turned(Q), turned(K), V, mask)
    expected = module.W_o(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(*args, mask), (expected, weights), rtol=0, atol=1e-13)


def test_without_need_weights_the_output_is_the_same():
    module, (args, mask) = attention(), inputs()
    out, none = module(*args, mask, need_weights=False)
    assert none is None
    assert_same_bits(out, module(*args, mask)[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_dropout_drops_the_weights_before_the_values_and_returns_them_whole(dtype, seed):
    module, (args, mask) = attention(dtype, p_drop=0.4), inputs(dtype)
    out, weights = module(*args, mask)
    module.train()
    torch.manual_seed(seed)
    dropped, returned = module(*args, mask)
    torch.manual_seed(seed)
    V = module.keys_values(args[1], args[2])[1]
    expected = torch.nn.functional.dropout(weights, 0.4) @ V
    assert_same_bits(dropped, module.W_o(expected.transpose(1, 2).flatten(2)))
    assert_same_bits(returned, weights)
    assert not torch.equal(dropped, out)
    assert len(list(module.state_dict())) == 8


def test_an_output_bias_of_its_own():
    options = [(dict(bias=True, output_bias=False), (True, False)), (dict(output_bias=True), (False, True))]
    for given, (inner, outer) in options:
        module = torch_impl.MultiHeadAttention(12, 6, 4, 4, 3, **given)
        assert [layer.bias is not None for layer in (module.W_q, module.W_k, module.W_v, module.W_o)] == [inner] * 3 + [outer]
