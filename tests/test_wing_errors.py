"""Every refusal of both wings fires, and says the same words for the same mistake."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from helpers import to_numpy, to_torch
from jaxtyping import TypeCheckError

import jax_impl
import torch_impl


@dataclass(frozen=True)
class Wing:
    """One wing behind the calls that both have."""

    package: Any
    kind: str

    def make(self, name: str, *args: Any, **options: Any) -> Any:
        drawn = self.package is jax_impl and name not in WITHOUT_PARAMETERS
        rngs = {"rngs": nnx.Rngs(0)} if drawn else {}
        return getattr(self.package, name)(*args, **options, **rngs)

    def array(self, *shape: int, dtype: str = "float32") -> Any:
        return torch.ones(shape, dtype=getattr(torch, dtype)) if self.package is torch_impl else jnp.ones(shape, dtype)

    @property
    def attend(self) -> Any:
        return self.package.scaled_dot_product_attention

    @property
    def checks(self) -> Any:
        return sys.modules[f"{self.package.__name__}.checks"]

    def half(self, module: Any) -> Any:
        """Cast every parameter of a module to float16."""
        if self.package is torch_impl:
            return module.half()
        for layer in (module.values, module.keys, module.queries, module.fc_out):
            layer.kernel.set_value(layer.kernel[...].astype(jnp.float16))
        module.fc_out.bias.set_value(module.fc_out.bias[...].astype(jnp.float16))
        return module


WITHOUT_PARAMETERS = ("ReLU", "GELU", "SinusoidalPositions", "RotaryPositions", "TransformerConfig")
TORCH, JAX = Wing(torch_impl, "torch.Tensor"), Wing(jax_impl, "jax.Array")
wings = pytest.mark.parametrize("wing", [TORCH, JAX], ids=["torch", "jax"])

SEQUENCES = (
    ("Multi_Head_Self_Attention", (8, 2), ("queries", "keys", "values")),
    ("SelfAttention", (8, 2), ("values", "keys", "query")),
    ("MultiHeadAttention", (8, 2, 4, 4, 4), ("query", "key", "value")),
)


def call(wing, name, sizes, order, changed, *mask):
    """Call a module with good inputs, except for those in `changed`."""
    good = dict.fromkeys(order, ((2, 5, 8), "float32"))
    inputs = [
        wing.array(*shape, dtype=dtype) if isinstance(shape, tuple) else shape
        for shape, dtype in (changed.get(name, value) for name, value in good.items())
    ]
    return wing.make(name, *sizes)(*inputs, *mask)


def listed(where, words):
    return f"{where}: {words[0]}" if len(words) == 1 else f"{where}: {len(words)} problems\n  - " + "\n  - ".join(words)


def in_query_order(order):
    """Problems are listed query first, whatever the order of the call."""
    return sorted(order, key=lambda name: ("quer" not in name, "key" not in name))


# ---------------------------------------------------------------- constructors

CONSTRUCTORS = [
    ("Linear", (0, 4), "Linear: in_features must be at least 1, got 0"),
    ("Linear", (3, -4), "Linear: out_features must be at least 1, got -4"),
    (
        "Linear",
        (0, True),
        "Linear: 2 problems\n  - in_features must be at least 1, got 0\n"
        "  - out_features must be a whole number, got True; pass options such as bias by keyword",
    ),
    ("Linear", (3, 4.0), "Linear: out_features must be a whole number, got 4.0 of type float"),
    ("Dropout", (1.5,), "Dropout: the dropout rate must be between 0 and 1, got 1.5"),
    ("Dropout", (-0.5,), "Dropout: the dropout rate must be between 0 and 1, got -0.5"),
    (
        "FeedForwardNetwork",
        (0,),
        "FeedForwardNetwork: 2 problems\n  - d_model must be at least 1, got 0\n  - d_ff must be at least 1, got 0",
    ),
    ("FeedForwardNetwork", (8, 0), "FeedForwardNetwork: d_ff must be at least 1, got 0"),
    ("FeedForwardNetwork", (8, 4, 2.0), "Dropout: the dropout rate must be between 0 and 1, got 2.0"),
    (
        "Multi_Head_Self_Attention",
        (10, 3),
        "Multi_Head_Self_Attention: embed_size must be a multiple of heads, got embed_size=10, heads=3; "
        "the nearest embed_size that fits is 9",
    ),
    (
        "SelfAttention",
        (1, 4),
        "SelfAttention: embed_size must be a multiple of heads, got embed_size=1, heads=4; "
        "the nearest embed_size that fits is 4",
    ),
    ("SelfAttention", (8, 0), "SelfAttention: heads must be at least 1, got 0"),
    (
        "Multi_Head_Self_Attention",
        ("8", 2),
        "Multi_Head_Self_Attention: embed_size must be a whole number, got '8' of type str",
    ),
    ("MultiHeadAttention", (8, 2, 4, 5, 4), "MultiHeadAttention: d_q must equal d_k, got d_q=4, d_k=5; set both"),
    (
        "MultiHeadAttention",
        (8, 0, 4, 4, -1),
        "MultiHeadAttention: 2 problems\n  - n_heads must be at least 1, got 0\n  - d_v must be at least 1, got -1",
    ),
    (
        "MultiHeadAttention",
        (True,),
        "MultiHeadAttention: d_model must be a whole number, got True; pass options such as bias by keyword",
    ),
    ("LayerNorm", (0,), "LayerNorm: width must be at least 1, got 0"),
    ("RMSNorm", ("8",), "RMSNorm: width must be a whole number, got '8' of type str"),
    (
        "Embedding",
        (0, 2.5),
        "Embedding: 2 problems\n  - n_tokens must be at least 1, got 0\n"
        "  - width must be a whole number, got 2.5 of type float",
    ),
    ("GELU", ("exact",), "GELU: approximate must be one of 'none', 'tanh', got 'exact'"),
    ("SinusoidalPositions", (8, 0), "SinusoidalPositions: max_len must be at least 1, got 0"),
    ("SinusoidalPositions", (7,), "SinusoidalPositions: d_model must be even, for sine and cosine come in pairs, got 7"),
    ("RotaryPositions", (5,), "RotaryPositions: width must be even, for sine and cosine come in pairs, got 5"),
    ("RotaryPositions", (0,), "RotaryPositions: width must be at least 1, got 0"),
]
# Options go by keyword.
OPTIONS = [
    (
        "MultiHeadAttention",
        (8, 6),
        dict(n_kv_heads=4),
        "MultiHeadAttention: n_heads must be a multiple of n_kv_heads, got n_heads=6, n_kv_heads=4; "
        "the nearest n_heads that fits is 8",
    ),
    ("MultiHeadAttention", (8, 6), dict(n_kv_heads=0), "MultiHeadAttention: n_kv_heads must be at least 1, got 0"),
    ("MultiHeadAttention", (), dict(p_drop=1.5), "Dropout: the dropout rate must be between 0 and 1, got 1.5"),
    (
        "FeedForwardNetwork",
        (8,),
        dict(activation="swish"),
        "FeedForwardNetwork: activation must be one of 'relu', 'gelu', 'gelu_tanh', got 'swish'",
    ),
    (
        "TransformerConfig",
        (),
        dict(d_model=0, n_heads=2.0, n_layers=0, max_len=-1, d_ff=0, n_kv_heads=0),
        "TransformerConfig: 6 problems\n  - d_model must be at least 1, got 0\n"
        "  - n_heads must be a whole number, got 2.0 of type float\n  - n_layers must be at least 1, got 0\n"
        "  - d_ff must be at least 1, got 0\n  - max_len must be at least 1, got -1\n  - n_kv_heads must be at least 1, got 0",
    ),
    (
        "TransformerConfig",
        (10, 4),
        dict(n_kv_heads=3, p_drop=-1.0, p_attention=2.0, norm="batch", activation="tanh", positions="learned"),
        "TransformerConfig: 7 problems\n  - d_model must be a multiple of n_heads, got d_model=10, n_heads=4; "
        "the nearest d_model that fits is 8\n  - n_heads must be a multiple of n_kv_heads, got n_heads=4, n_kv_heads=3; "
        "the nearest n_heads that fits is 3\n  - p_drop must be between 0 and 1, got -1.0\n"
        "  - p_attention must be between 0 and 1, got 2.0\n  - norm must be one of 'layer', 'rms', got 'batch'\n"
        "  - activation must be one of 'relu', 'gelu', 'gelu_tanh', got 'tanh'\n"
        "  - positions must be one of 'sinusoidal', 'rotary', got 'learned'",
    ),
    ("TransformerConfig", (9, 3), {}, "TransformerConfig: d_model must be even for sinusoidal positions, got 9"),
    (
        "TransformerConfig",
        (6, 2),
        dict(positions="rotary"),
        "TransformerConfig: d_model / n_heads must be even for rotary positions, got d_model=6, n_heads=2",
    ),
    ("Transformer", (0, 5), {}, "Transformer: n_source must be at least 1, got 0"),
    ("Transformer", (9, 5), dict(pad=5), "Transformer: pad must be from 0 to 4, got 5"),
    ("Transformer", (9, 5), dict(pad=True), "Transformer: pad must be a whole number, got True of type bool"),
]


@wings
@pytest.mark.parametrize(("name", "args", "words"), CONSTRUCTORS)
def test_constructors_refuse(wing, name, args, words, unchecked_shapes):
    with pytest.raises(wing.package.InputError) as refusal:
        wing.make(name, *args)
    assert str(refusal.value) == words


@wings
@pytest.mark.parametrize(("name", "args", "options", "words"), OPTIONS)
def test_options_are_refused(wing, name, args, options, words, unchecked_shapes):
    with pytest.raises(wing.package.InputError) as refusal:
        wing.make(name, *args, **options)
    assert str(refusal.value) == words


def test_attention_dropout_draws_masks_and_needs_a_stream():
    with pytest.raises(jax_impl.InputError) as refusal:
        jax_impl.ScaledDotProductAttention(0.5)
    assert str(refusal.value) == "ScaledDotProductAttention: p_drop=0.5 draws masks and needs rngs; pass rngs=nnx.Rngs(0)"
    assert jax_impl.ScaledDotProductAttention(0.5, rngs=nnx.Rngs(0)).dropout is not None
    assert jax_impl.ScaledDotProductAttention().dropout is None


@wings
def test_the_nearest_width_that_an_error_names_does_fit(wing):
    wing.make("SelfAttention", 9, 3)
    wing.make("SelfAttention", 4, 4)


@wings
def test_an_error_is_caught_as_torch_errors_and_as_value_errors_are(wing):
    for kind in (ValueError, RuntimeError):
        with pytest.raises(kind):
            wing.make("SelfAttention", 10, 3)


# ---------------------------------------------------------------- sequences


@wings
@pytest.mark.parametrize(("name", "sizes", "order"), SEQUENCES)
def test_sequences_of_wrong_kind_rank_width_or_dtype_come_in_one_error(wing, name, sizes, order, unchecked_shapes):
    query, key, value = in_query_order(order)
    bad = {query: ([[1.0]], None), key: ((5, 8), "float32"), value: ((2, 5, 7), "float32")}
    with pytest.raises(wing.package.InputError) as refusal:
        call(wing, name, sizes, order, bad)
    assert str(refusal.value) == (
        f"{name}: 3 problems\n"
        f"  - {query} must be a {wing.kind}, got list\n"
        f"  - {key} must have 3 axes (batch, length, width), got 2 with shape (5, 8)\n"
        f"  - {value} must have width 8 on its last axis, got shape (2, 5, 7)"
    )
    bad = {query: ((2, 5, 8), "int32"), key: ((2, 5, 8), "float16"), value: ((2, 5, 8), "bfloat16")}
    with pytest.raises(wing.package.InputError) as refusal:
        call(wing, name, sizes, order, bad)
    assert str(refusal.value) == (
        f"{name}: 3 problems\n"
        f"  - {query} must be floating point, got int32\n"
        f"  - {key} is float16 and the weights float32; cast {key} to float32\n"
        f"  - {value} is bfloat16 and the weights float32; cast {value} to float32"
    )


@wings
@pytest.mark.parametrize(("name", "sizes", "order"), SEQUENCES)
def test_sequences_that_do_not_fit_each_other(wing, name, sizes, order, unchecked_shapes):
    query, key, value = in_query_order(order)
    with pytest.raises(wing.package.InputError) as refusal:
        call(wing, name, sizes, order, {query: ((3, 5, 8), "float32"), value: ((2, 6, 8), "float32")})
    named = f"{query} (3, 5, 8), {key} (2, 5, 8), {value} (2, 6, 8)"
    assert str(refusal.value) == (
        f"{name}: 2 problems\n"
        f"  - all inputs must have the same batch size, got {named}\n"
        f"  - {key} and {value} must be equally long, got {named}"
    )


# ---------------------------------------------------------------- masks


@wings
@pytest.mark.parametrize("module", SEQUENCES, ids=lambda module: module[0])
@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((3, 1, 5, 5), "float32", ["{broadcast}(3, 1, 5, 5)"]),
        ((1, 2, 2, 5, 5), "float32", ["{broadcast}(1, 2, 2, 5, 5)"]),
        ((4,), "bool", ["{broadcast}(4,)"]),
        ((2, 5), "bool", ["{broadcast}(2, 5); a mask over (batch, keys) needs mask[:, None, None, :]"]),
        ((5, 5), "complex64", ["mask must be boolean, integer or real, got complex64"]),
        ((5, 4), "complex64", ["mask must be boolean, integer or real, got complex64", "{broadcast}(5, 4)"]),
    ],
    ids=str,
)
def test_masks_are_refused(wing, module, shape, dtype, words):
    broadcast = "mask must broadcast to the scores' shape (batch, heads, queries, keys) = (2, 2, 5, 5), got "
    with pytest.raises(wing.package.InputError) as refusal:
        call(wing, *module, {}, wing.array(*shape, dtype=dtype))
    assert str(refusal.value) == listed(module[0], [line.format(broadcast=broadcast) for line in words])


@wings
@pytest.mark.parametrize(("name", "sizes", "order"), SEQUENCES)
def test_a_mask_of_another_kind_is_refused(wing, name, sizes, order, unchecked_shapes):
    with pytest.raises(wing.package.InputError) as refusal:
        call(wing, name, sizes, order, {}, [[True]])
    assert str(refusal.value) == f"{name}: mask must be a {wing.kind} or None, got list"


@wings
@pytest.mark.parametrize(("name", "sizes", "order"), SEQUENCES)
def test_the_repair_that_the_hint_names_works(wing, name, sizes, order):
    call(wing, name, sizes, order, {}, wing.array(2, 5, dtype="bool")[:, None, None, :])


@wings
def test_float16_cannot_hold_what_hides(wing):
    module, x = wing.half(wing.make("SelfAttention", 8, 2)), wing.array(2, 3, 8, dtype="float16")
    module(x, x, x)
    with pytest.raises(wing.package.InputError) as refusal:
        module(x, x, x, wing.array(3, 3))
    assert str(refusal.value) == (
        "hidden scores become -1e+20, which float16 cannot hold (largest 65504); run this module in float32 or bfloat16"
    )


# ---------------------------------------------------------------- the core function and the layers


@wings
def test_the_core_function_refuses_heads_that_do_not_fit(wing, unchecked_shapes):
    a = wing.array
    for Q, K, V, words in (
        (
            (3, 5, 4),
            (2, 3, 7, 4),
            (2, 3, 7, 6),
            ["Q must have 4 axes (batch, heads, length, width), got 3 with shape (3, 5, 4)"],
        ),
        ((2, 3, 5, 4), (2, 3, 7, 5), (2, 3, 7, 6), ["Q and K must have the same head width on their last axis, got {named}"]),
        ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 8, 6), ["K and V must be equally long on axis 2, got {named}"]),
        (
            (2, 3, 5, 4),
            (4, 2, 7, 4),
            (1, 1, 7, 6),
            [
                "the batch sizes on axis 0 must be equal, got {named}",
                "the numbers of heads on axis 1 must be equal, got {named}",
            ],
        ),
    ):
        with pytest.raises(wing.package.InputError) as refusal:
            wing.attend(a(*Q), a(*K), a(*V))
        named = [line.format(named=f"Q {Q}, K {K}, V {V}") for line in words]
        assert str(refusal.value) == listed("scaled_dot_product_attention", named)


@wings
def test_the_core_function_refuses_kinds_dtypes_and_masks(wing, unchecked_shapes):
    Q, K, V = wing.array(2, 3, 5, 4), wing.array(2, 3, 7, 4), wing.array(2, 3, 7, 6)
    for args, words in (
        (
            (None, wing.array(2, 3, 7, 4, dtype="int32"), V),
            "2 problems\n  - Q must be a {kind}, got NoneType\n  - K must be floating point, got int32",
        ),
        (
            (Q, wing.array(2, 3, 7, 4, dtype="float16"), wing.array(2, 3, 7, 6, dtype="bfloat16")),
            "2 problems\n  - K is float16 and Q float32; cast K to float32\n  - V is bfloat16 and Q float32; cast V to float32",
        ),
        (
            (Q, K, V, wing.array(4, 3, 5, 7)),
            "mask must broadcast to the scores' shape (batch, heads, queries, keys) = (2, 3, 5, 7), got (4, 3, 5, 7)",
        ),
    ):
        with pytest.raises(wing.package.InputError) as refusal:
            wing.attend(*args)
        assert str(refusal.value) == "scaled_dot_product_attention: " + words.format(kind=wing.kind)


@wings
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("Linear", (8, 4)), ("FeedForwardNetwork", (8, 4)), ("LayerNorm", (8,)), ("RMSNorm", (8,)), ("Embedding", (4, 8))],
)
def test_layers_refuse_features(wing, name, sizes, unchecked_shapes):
    module = wing.make(name, *sizes)
    module = module.attend if name == "Embedding" else module
    for x, words in (
        (wing.array(2, 7), "the input must have width 8 on its last axis, got shape (2, 7)"),
        (wing.array(), "the input must have width 8 on its last axis, got shape ()"),
        (wing.array(2, 8, dtype="int32"), "the input must be floating point, got int32"),
        (wing.array(2, 8, dtype="float16"), "the input is float16 and the weights float32; cast the input to float32"),
        (
            wing.array(2, 7, dtype="bfloat16"),
            "2 problems\n  - the input must have width 8 on its last axis, got shape (2, 7)\n"
            "  - the input is bfloat16 and the weights float32; cast the input to float32",
        ),
        (3.0, f"the input must be a {wing.kind}, got float"),
    ):
        with pytest.raises(wing.package.InputError) as refusal:
            module(x)
        assert str(refusal.value) == f"{name}: {words}"


# ---------------------------------------------------------------- positions, ids and the Transformer


def ids_of(wing, rows, dtype="int32"):
    return torch.tensor(rows, dtype=getattr(torch, dtype)) if wing is TORCH else jnp.array(rows, dtype)


@wings
def test_positions_refuse_widths_and_lengths(wing, unchecked_shapes):
    for name, shape in (("SinusoidalPositions", (2, 4, 6)), ("RotaryPositions", (2, 3, 4, 6))):
        module = wing.make(name, 6, 9)
        for args, words in (
            ((wing.array(*shape[:-1], 8),), f"the input must have width 6 on its last axis, got shape {(*shape[:-1], 8)}"),
            ((wing.array(*shape, dtype="int32"),), "the input must be floating point, got int32"),
            ((wing.array(*shape), 6), "10 positions are wanted and max_len is 9; give a larger max_len"),
        ):
            with pytest.raises(wing.package.InputError) as refusal:
                module(*args)
            assert str(refusal.value) == f"{name}: {words}"
        assert module(wing.array(*shape), 5).shape == shape


@wings
def test_an_embedding_refuses_what_are_no_ids(wing, unchecked_shapes):
    module = wing.make("Embedding", 7, 4)
    for ids, words in (
        (ids_of(wing, [[0, 7], [-1, 3]]), "the ids must be from 0 to 6, got -1 to 7"),
        (wing.array(2, 3), "the ids must be integers, got float32"),
        (wing.array(2, 3, dtype="bool"), "the ids must be integers, got bool"),
        ([[1, 2]], f"the ids must be a {wing.kind}, got list"),
    ):
        with pytest.raises(wing.package.InputError) as refusal:
            module(ids)
        assert str(refusal.value) == f"Embedding: {words}"
    assert module(ids_of(wing, [[0, 6]])).shape == (1, 2, 4)


def transformer_of(wing):
    config = wing.make("TransformerConfig", 8, 2, n_layers=1, max_len=6)
    model = wing.make("Transformer", 11, 13, config)
    model.eval()
    return model


@wings
def test_the_transformer_refuses_ids_that_do_not_fit(wing, unchecked_shapes):
    model, good = transformer_of(wing), ids_of(wing, [[1, 2, 3]] * 2)
    for args, words in (
        ((wing.array(2, 3), [1]), ["source must be integers, got float32", f"target must be a {wing.kind}, got list"]),
        (
            (good[0], ids_of(wing, [[1] * 7] * 2)),
            [
                "source must have 2 axes (batch, length), got 1 with shape (3,)",
                "target is 7 tokens long and max_len is 6; shorten it or give a larger max_len",
            ],
        ),
        ((good, good[:1]), ["all ids must have the same batch size, got source (2, 3), target (1, 3)"]),
    ):
        with pytest.raises(wing.package.InputError) as refusal:
            model(*args)
        assert str(refusal.value) == listed("Transformer", words)
    with pytest.raises(wing.package.InputError, match=r"^Embedding: the ids must be from 0 to 10, got 1 to 12$"):
        model(ids_of(wing, [[1, 2, 12]] * 2), good)
    with pytest.raises(wing.package.InputError, match=r"^Transformer: source must have 2 axes"):
        model.encode(good[0])
    with pytest.raises(wing.package.InputError, match=r"^Transformer: target must have 2 axes"):
        model.decode(good[0], wing.array(2, 3, 8))
    # An encoder's output of another batch is the attention's to refuse.
    with pytest.raises(wing.package.InputError, match=r"^MultiHeadAttention: all inputs must have the same batch size"):
        model.decode(good, wing.array(1, 3, 8))


@wings
def test_decoding_refuses_tokens_and_lengths(wing, unchecked_shapes):
    model, source = transformer_of(wing), ids_of(wing, [[1, 2, 3]])
    for given, words in (
        (dict(max_new=0), "max_new must be at least 1, got 0"),
        (dict(max_new=7), "7 positions are wanted and max_len is 6; give a larger max_len"),
        (dict(start=13, stop=-1), ["start must be from 0 to 12, got 13", "stop must be from 0 to 12, got -1"]),
        (dict(stop=2.0), "stop must be a whole number, got 2.0 of type float"),
        (dict(start=0), "start must not be the padding, 0: nothing but padding would be decoded"),
    ):
        with pytest.raises(wing.package.InputError) as refusal:
            wing.package.greedy_decode(model, source, **dict(start=1, stop=2, max_new=3) | given)
        assert str(refusal.value) == listed("greedy_decode", [words] if isinstance(words, str) else words)
    with pytest.raises(wing.package.InputError, match=r"^Transformer: source must have 2 axes"):
        wing.package.greedy_decode(model, source[0], start=1, stop=2, max_new=3)


@wings
def test_layers_refuse_what_their_parts_refuse(wing, unchecked_shapes):
    config = wing.make("TransformerConfig", 8, 2, n_layers=1, max_len=6)
    x, other = wing.array(2, 3, 8), wing.array(2, 3, 6)
    for name, args, where in (
        ("EncoderLayer", (other,), "query must have width 8 on its last axis, got shape (2, 3, 6)"),
        ("Encoder", (x, wing.array(2, 3)), "mask must broadcast to the scores' shape"),
        ("DecoderLayer", (x, other), "key must have width 8 on its last axis, got shape (2, 3, 6)"),
        ("Decoder", (x, wing.array(2, 5, 8), None, wing.array(3, 3)), "mask must broadcast to the scores' shape"),
    ):
        with pytest.raises(wing.package.InputError) as refusal:
            wing.make(name, config)(*args)
        assert str(refusal.value).startswith("MultiHeadAttention: ")
        assert where in str(refusal.value)


@wings
def test_no_problem_no_error_and_one_problem_no_list(wing):
    wing.checks.raise_all("here", [])
    with pytest.raises(wing.package.InputError, match=r"^here: there$"):
        wing.checks.raise_all("here", ["there"])


def test_float64_without_x64_is_refused_with_a_repair_that_works(unchecked_shapes):
    module, x = JAX.make("Linear", 8, 4), np.ones((2, 8))
    with pytest.raises(jax_impl.InputError) as refusal:
        module(x)
    assert str(refusal.value) == (
        "Linear: the input is float64, but jax runs without 64-bit types; "
        'call jax.config.update("jax_enable_x64", True) or cast the input to float32'
    )
    assert module(x.astype(np.float32)).shape == (2, 4)


# ---------------------------------------------------------------- devices

ON_TWO_DEVICES = """
import jax
from flax import nnx
import jax.numpy as jnp
import jax_impl
home, away = jax.devices()
def refusal(call, *args):
    try:
        call(*args)
    except jax_impl.InputError as error:
        return str(error)
    return "no error"
def placed(*shape):
    return jax.device_put(jnp.ones(shape), away)
def at_home(*shape):
    return jax.device_put(jnp.ones(shape), home)
module = jax_impl.SelfAttention(8, 2, rngs=nnx.Rngs(0))
free = jnp.ones((2, 5, 8))
assert module(free, free, free).shape == (2, 5, 8)
nnx.update(module, jax.device_put(nnx.state(module), home))
x, elsewhere = at_home(2, 5, 8), placed(2, 5, 8)
for text in (
    refusal(module, elsewhere, x, x),
    refusal(module, x, x, x, placed(5, 5)),
    refusal(jax_impl.scaled_dot_product_attention, at_home(1, 2, 3, 4), placed(1, 2, 3, 4), placed(1, 2, 3, 4)),
    refusal(module.fc_out, elsewhere),
    refusal(module, free, x, x),
):
    print(text.replace(str(away), "AWAY").replace(str(home), "HOME").replace("\\n", "|"))
"""


def torch_refusals():
    def refusal(call, *args):
        with pytest.raises(torch_impl.InputError) as caught:
            call(*args)
        return str(caught.value).replace("meta", "AWAY").replace("cpu", "HOME").replace("\n", "|")

    def away(*shape):
        return torch.ones(shape, device="meta")

    module, x = torch_impl.SelfAttention(8, 2), torch.ones(2, 5, 8)
    return [
        refusal(module, away(2, 5, 8), x, x),
        refusal(module, x, x, x, away(5, 5)),
        refusal(torch_impl.scaled_dot_product_attention, torch.ones(1, 2, 3, 4), away(1, 2, 3, 4), away(1, 2, 3, 4)),
        refusal(module.fc_out, away(2, 5, 8)),
    ]


def test_another_device_is_refused_in_the_same_words():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", ON_TWO_DEVICES],
        env=environment,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    *refusals, uncommitted = run.stdout.splitlines()
    assert refusals == torch_refusals()
    assert refusals[0] == "SelfAttention: values is on AWAY and the weights on HOME; move values to HOME"
    # jax itself moves an array that nobody has placed on purpose.
    assert uncommitted == "no error"


# ---------------------------------------------------------------- the shape annotations


@wings
def test_shape_annotations_are_enforced_in_this_run(wing):
    module, x = wing.make("SelfAttention", 8, 2), wing.array(2, 5, 8)
    with pytest.raises(TypeCheckError, match="SelfAttention"):
        module(x, x, wing.array(5, 8))
    with pytest.raises(TypeCheckError):
        module(x, wing.array(2, 6, 8), x)
    with pytest.raises(TypeCheckError):
        module(x, x, wing.array(2, 5, 8, dtype="int32"))
    with pytest.raises(TypeCheckError):
        wing.make("Linear", 8, "4")


@wings
def test_enforcement_can_be_switched_off(wing, unchecked_shapes):
    with pytest.raises(wing.package.InputError):
        wing.make("SelfAttention", 8, 2)(wing.array(5, 8), wing.array(2, 5, 8), wing.array(2, 5, 8))


@wings
def test_a_wrong_result_is_caught_as_well(wing, monkeypatch):
    module = wing.make("Multi_Head_Self_Attention", 8, 2)
    core = sys.modules[f"{wing.package.__name__}.multi_head_self_attention"]
    monkeypatch.setattr(core, "softmax", lambda scores: scores[:, :1])
    x = wing.array(2, 5, 8)
    with pytest.raises(TypeCheckError, match="return"):
        module(x, x, x)


def test_arguments_are_not_written_into():
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2, 5, 8)).astype(np.float32) for _ in range(3)]
    for name, sizes, _ in SEQUENCES:
        tensors, mask = [to_torch(a) for a in arrays], torch.ones(5, 5).tril()
        TORCH.make(name, *sizes)(*tensors, mask)
        assert all(np.array_equal(to_numpy(t), a) for t, a in zip(tensors, arrays))
        assert torch.equal(mask, torch.ones(5, 5).tril())
