"""Layouts that a rename names: what each does, its inverse bit for bit, and every wrong use."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from helpers import random
from torch import nn
from transfer_helpers import FlaxHolder, any_bits, bits, rngs, to_tensor

import parity
from parity import InputError, TransferError, cli
from parity.weights.named_layouts import KNOWN, Given, MisfitError, parse

C, H, W, HEADS, KV, D, E = 4, 3, 2, 6, 2, 4, 5


# A layout, a torch shape, and the Flax array for a torch array, written out otherwise than the layout itself.
MEANING = {
    "as is": ((3, 5), lambda a: a),
    "transposed": ((3, 5), lambda a: np.einsum("ij->ji", a)),
    "channels last": ((2, 3, 4, 5), lambda a: np.einsum("oihw->hwio", a)),
    "flipped": ((2, 3, 4, 5), lambda a: np.einsum("iohw->hwio", a)[::-1, ::-1]),
    f"heads({HEADS})": ((HEADS * D, E), lambda a: np.stack([a[h * D : h * D + D].T for h in range(HEADS)], 1)),
    f"heads in({HEADS})": ((E, HEADS * D), lambda a: np.stack([a[:, h * D : h * D + D].T for h in range(HEADS)])),
    f"flatten({C}, {H}, {W})": (
        (E, C * H * W),
        lambda a: a[:, [c * H * W + h * W + w for h in range(H) for w in range(W) for c in range(C)]],
    ),
    f"flatten({C}, {H})": ((C * H,), lambda a: a[[c * H + h for h in range(H) for c in range(C)]]),
    f"unflatten({C}, {H}, {W})": (
        (C * H * W, E),
        lambda a: a[[c * H * W + h * W + w for h in range(H) for w in range(W) for c in range(C)]],
    ),
    "rotary(2)": ((12, E), lambda a: a[[0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]]),
    "rotary(2, 4)": ((12,), lambda a: a[[0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]]),
    "qkv per head(2)": ((12, E), lambda a: a[[0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]]),
    "grouped(4, 2)": ((16,), lambda a: a[[0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]]),
    "rotary(2) | transposed": ((12, E), lambda a: a[[0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]].T),
    "transposed | rotary(2)": ((E, 12), lambda a: a.T[[0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]]),
}


def layout(text: str, shape: tuple[int, ...], flax_shape: tuple[int, ...] | None = None):
    return Given(tuple(map(parse, text.split(" | ")))).built(shape, flax_shape)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("text", MEANING)
def test_a_layout_does_what_it_says_and_its_inverse_gives_every_bit_back(text, dtype):
    shape, meaning = MEANING[text]
    array = any_bits(random("layouts", text), shape, dtype)
    made = layout(text, shape)
    there = made.apply(array)
    assert bits(there) == bits(meaning(array))
    assert made.shape(shape) == there.shape
    assert bits(made.inverse().apply(there)) == bits(array)
    assert bits(made.inverse().inverse().apply(array)) == bits(there)
    assert made.inverse().name == made.name == text


@pytest.mark.parametrize("text", [text for text in MEANING if " | " not in text])
def test_inverse_before_a_name_is_the_way_back(text):
    shape, _ = MEANING[text]
    array = any_bits(random("inverse", text), shape, "float32")
    there = layout(text, shape).apply(array)
    assert bits(layout(f"inverse {text}", there.shape, shape).apply(there)) == bits(array)


def test_every_layout_that_has_a_name_is_tried_here():
    assert {parse(word).word for text in MEANING for word in text.split(" | ")} == set(KNOWN)


def test_parity_rules_lists_the_layouts_with_their_meaning(capsys):
    assert set(parity.layout_names()) == {f"{word}{known.arguments}" for word, known in KNOWN.items()}
    assert all(meaning.endswith(".") for meaning in parity.layout_names().values())
    with pytest.raises(SystemExit) as stopped:
        cli.app(["rules"], standalone_mode=True)
    assert stopped.value.code == 0
    assert "grouped(heads, kv_heads)" in capsys.readouterr().out


def test_heads_take_their_number_from_the_flax_array_where_none_is_given():
    array = any_bits(random("heads"), (6, 5), "float32")
    assert bits(layout("heads", (6, 5), (5, 3, 2)).apply(array)) == bits(layout("heads(3)", (6, 5)).apply(array))
    assert layout("heads", (6,), (3, 2)).shape((6,)) == (3, 2)


# ---------------------------------------------------------------- wrong uses

UNKNOWN = {
    "rotery(2)": "there is no layout 'rotery(2)'; known are as is, transposed, channels last, flipped, heads([heads]), ",
    "Transposed": "there is no layout 'Transposed'",
    "rotary": "layout 'rotary' is written rotary(heads[, width]), in whole numbers from 1; known are as is, transposed",
    "rotary(2, 3, 4)": "layout 'rotary(2, 3, 4)' is written rotary(heads[, width])",
    "rotary(0)": "in whole numbers from 1",
    "rotary(two)": "in whole numbers from 1",
    "rotary(-2)": "in whole numbers from 1",
    "transposed(2)": "layout 'transposed(2)' is written transposed, in",
    "flatten(4)": "layout 'flatten(4)' is written flatten(C, H, W)",
    "grouped(4)": "layout 'grouped(4)' is written grouped(heads, kv_heads)",
    "rotary(2": "there is no layout 'rotary(2'",
    "": "there is no layout ''",
}


@pytest.mark.parametrize("word", UNKNOWN)
def test_a_layout_that_is_none_is_refused_and_the_known_ones_are_named(word):
    with pytest.raises(InputError, match=re.escape(UNKNOWN[word])) as error:
        parity.transfer({"x": torch.ones(2)}, FlaxHolder(x=jnp.ones(2)), rename={"x": f"x | {word}"})
    assert f"'x' -> 'x | {word}': " in str(error.value)
    assert "grouped" in str(error.value)


MISFITS = {
    "transposed": ((3,), "layout transposed needs 2 axes, got shape (3,)"),
    "channels last": ((3, 4), "layout channels last needs 3 to 5 axes, got shape (3, 4)"),
    "flipped": ((3, 4), "layout flipped needs 3 to 5 axes, got shape (3, 4)"),
    "heads(4)": ((6, 5), "layout heads(4) leads from (6, 5) to (5, heads, 6 / heads), wanted (5, 4, 1)"),
    "heads(2)": ((2, 3, 4), "layout heads(2) needs 1 to 2 axes, got shape (2, 3, 4)"),
    "heads | transposed": ((6, 5), "layout heads needs the number of heads where another layout follows: heads(8)"),
    "heads in(4)": ((5, 6), "layout heads in(4) leads from (5, 6) to (heads, 6 / heads, 5), wanted (4, 1, 5)"),
    "flatten(4, 3, 2)": ((5, 23), "layout flatten(4, 3, 2) needs a last axis of 24, got shape (5, 23)"),
    "unflatten(4, 3)": ((11, 5), "layout unflatten(4, 3) needs 12 rows, got shape (11, 5)"),
    "rotary(4)": ((6, 5), "layout rotary(4) needs rows in a multiple of heads = 4, got shape (6, 5)"),
    "rotary(2)": ((6, 5), "layout rotary(2) needs an even width of at most 3 in each of 2 heads, got shape (6, 5)"),
    "rotary(2, 8)": ((8, 5), "layout rotary(2, 8) needs an even width of at most 4 in each of 2 heads, got shape (8, 5)"),
    "qkv per head(4)": ((16, 5), "layout qkv per head(4) needs rows in a multiple of 3 * heads = 12, got shape (16, 5)"),
    "grouped(3, 2)": ((14, 5), "layout grouped(3, 2) needs heads in a multiple of kv_heads, got shape (14, 5)"),
    "grouped(4, 2)": ((12, 5), "needs rows in a multiple of heads + 2 * kv_heads = 8, got shape (12, 5)"),
    "inverse heads(2) | rotary(2)": ((5, 2, 3), "layout inverse heads(2) needs to be the last one, got shape (5, 2, 3)"),
}


@pytest.mark.parametrize("text", MISFITS)
def test_a_layout_that_does_not_fit_says_what_it_needs_and_what_it_saw(text):
    shape, words = MISFITS[text]
    with pytest.raises(MisfitError, match=re.escape(words)):
        layout(text, shape)
    with pytest.raises(TransferError, match=re.escape(f"rename 'x' -> 'y | {text}': x {shape} to y (7,): layout")):
        parity.transfer({"x": torch.ones(shape)}, FlaxHolder(y=jnp.ones(7)), rename={"x": f"y | {text}"})


def test_a_layout_that_leads_to_another_shape_names_both():
    source, target = {"x": torch.ones(3, 5)}, FlaxHolder(y=jnp.ones((5, 3)))
    with pytest.raises(TransferError) as error:
        parity.transfer(source, target, rename={"x": "y | as is"})
    assert "rename 'x' -> 'y | as is': x (3, 5) becomes (3, 5), but y has (5, 3)" in str(error.value)
    assert "; add ' | transposed' behind it" in str(error.value)
    with pytest.raises(TransferError, match=re.escape("(5, 3) becomes (3, 5), but y has (5, 3); take ' | transposed' away")):
        parity.transfer({"x": torch.ones(5, 3)}, target, rename={"x": "y | transposed"})


# ---------------------------------------------------------------- in a transfer


def square(name: str) -> nn.Linear:
    layer = nn.Linear(4, 4)
    layer.weight.data = to_tensor(any_bits(random(name), (4, 4), "float32"), "float32")
    return layer


def test_what_rename_says_wins_where_the_ledger_says_otherwise_and_both_fit():
    for word, expected in (("as is", lambda a: a), ("transposed", lambda a: a.T)):
        source, target = square("wins"), nnx.Linear(4, 4, rngs=rngs())
        done = parity.transfer(source, target, rename={"weight": f"kernel | {word}"})
        assert bits(target.kernel[...]) == bits(expected(source.weight.detach().numpy()))
        assert [(e.layout, e.decided_by) for e in done.plan] == [(word, "rename"), ("as is", "rule")]


def test_what_only_moves_rows_is_followed_by_what_the_ledger_says():
    source, target = square("rows"), nnx.Linear(4, 4, rngs=rngs())
    done = parity.transfer(source, target, rename={"weight": "kernel | rotary(1)"})
    assert bits(target.kernel[...]) == bits(source.weight.detach().numpy()[[0, 2, 1, 3]].T)
    assert done.plan[0].layout == "rotary(1) | transposed"
    assert done.rename == {"weight": "kernel | rotary(1)", "bias": "bias"}
    assert "weight -> kernel  rotary(1) | transposed, (4, 4) float32, 64 bytes" in str(done)
    assert done.to_dict()["plan"][0]["layout"] == "rotary(1) | transposed"
    assert done.to_dict()["plan"][0]["decided_by"] == "rename"


@pytest.mark.parametrize("form", ["model", "tree"])
def test_one_rename_serves_both_directions_and_may_be_written_in_either(form):
    rename = {"weight": "kernel | rotary(1)", "bias": "bias | rotary(1)"}
    turned = {value: key for key, value in rename.items()}
    source = square("both ways")
    for given in (rename, turned):
        target = nnx.Linear(4, 4, rngs=rngs())
        flax = target if form == "model" else nnx.state(target)
        value = parity.transfer(source, flax, rename=given).value
        back = parity.transfer(value, square("other").state_dict(), rename=given)
        assert all(bits(back.value[name]) == bits(tensor) for name, tensor in source.state_dict().items())
        assert back.rename == {"kernel | rotary(1)": "weight", "bias | rotary(1)": "bias"}
        assert parity.transfer(value, square("other").state_dict(), rename=back.rename).rename == back.rename


def test_between_two_of_one_framework_layouts_lead_to_the_side_that_they_stand_behind():
    array = torch.arange(8.0)
    there = parity.transfer({"q": array}, {"wq": torch.zeros(8)}, rename={"q": "wq | rotary(2)"}).value["wq"]
    assert there.tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    wide = parity.transfer({"q": torch.arange(12.0)}, {"wq": torch.zeros(12)}, rename={"q | rotary(2)": "wq"}).value["wq"]
    assert wide.tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


REFUSED = {
    "both-sides": ({"x | as is": "x | as is"}, InputError, "layouts stand behind both sides; write them behind Flax's name"),
    "torch-side": ({"u | as is": "x"}, TransferError, "gives a layout to a name of torch's; write it behind Flax's name"),
    "module": (
        {"part": "part | as is"},
        TransferError,
        "gives a layout to a module, of which part.y is one array; give it to each array by name",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_layout_in_a_place_where_it_means_nothing_is_refused(name):
    rename, error, words = REFUSED[name]
    source = {"u": torch.ones(2), "part.y": torch.ones(2)}
    target = nnx.Dict(x=nnx.Param(jnp.ones(2)), part=nnx.Dict(y=nnx.Param(jnp.ones(2))))
    with pytest.raises(error, match=re.escape(words)):
        parity.transfer(source, target, rename=rename)


def test_a_single_permutation_can_still_be_lent():
    source, target = nn.Linear(8, 8), nnx.Linear(8, 8, rngs=rngs())
    done = parity.transfer(source, target, rename={"weight": "kernel | as is"}, copy=False)
    assert done.plan[0].shared
    assert done.plan[0].layout == "as is"


def test_the_refusal_of_a_shape_says_how_to_give_the_layout():
    with pytest.raises(TransferError, match=re.escape("if this one is otherwise, rename to 'kernel | as is', and square ones")):
        parity.transfer({"weight": torch.ones(3, 5)}, nnx.Linear(3, 5, rngs=rngs()), rename={}, ignore=["bias"])


@pytest.mark.parametrize(
    ("shape", "flax_shape", "word"), [((6,), (3, 2), "heads"), ((6, 5), (5, 3, 2), "heads"), ((5, 6), (3, 2, 5), "heads in")]
)
def test_the_refusal_of_heads_says_how_to_name_them(shape, flax_shape, word):
    source, target = {"q": torch.ones(shape)}, FlaxHolder(q=jnp.zeros(flax_shape))
    with pytest.raises(TransferError, match=re.escape(f"; if these are heads, rename to 'q | {word}'")):
        parity.transfer(source, target)
    assert len(parity.transfer(source, target, rename={"q": f"q | {word}"}).plan) == 1


def test_layers_that_are_no_pair_may_be_one_by_a_layout_that_is_given():
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    parts = nnx.Dict(**{name: nnx.Linear(4, 4, rngs=rngs()) for name in "qkvo"})
    cut = {f"in_proj_weight[{4 * n}:{4 * n + 4}]": f"{c}.kernel" for n, c in enumerate("qkv")}
    named = {f"in_proj_bias[{c}]": f"{c}.bias" for c in "qkv"} | {"out_proj": "o"}
    with pytest.raises(TransferError) as error:
        parity.transfer(attention, parts, rename=cut | named)
    for words in (
        "rename says how it is laid out: 'k.kernel | transposed'",
        "rename says how it is laid out: 'k.bias | as is'",
    ):
        assert words in str(error.value)
    cut = {key: f"{value} | transposed" for key, value in cut.items()}
    named = {key: value if value == "o" else f"{value} | as is" for key, value in named.items()}
    parity.transfer(attention, parts, rename=cut | named)
    assert bits(parts.k.kernel[...]) == bits(attention.in_proj_weight[4:8].detach().numpy().T)
    back = nn.MultiheadAttention(4, 2, batch_first=True)
    parity.transfer(parts, back, rename=cut | named)
    assert torch.equal(back.in_proj_weight, attention.in_proj_weight)


def test_a_file_alone_takes_its_layout_from_rename(tmp_path):
    source = {"q.weight": torch.randn(4, 3), "q.bias": torch.randn(4)}
    parity.transfer(source, tmp_path / "t.safetensors")
    rename = {"q.weight": "q.kernel | rotary(1) | transposed", "q.bias": "q.bias | rotary(1)"}
    there = parity.transfer(tmp_path / "t.safetensors", tmp_path / "f.msgpack", rename=rename, verify=True)
    assert {entry.target: entry.shape for entry in there.plan} == {"q.kernel": (3, 4), "q.bias": (4,)}
    back = parity.transfer(tmp_path / "f.msgpack", tmp_path / "b.pt", rename=rename, verify=True)
    assert back.rename == {value: key for key, value in there.rename.items()}
    found = torch.load(tmp_path / "b.pt")
    assert all(torch.equal(found[name], tensor) for name, tensor in source.items())
    with pytest.raises(TransferError, match=re.escape("does not say in which order the axes lie; add ' | transposed'")):
        parity.transfer(tmp_path / "t.safetensors", tmp_path / "g.msgpack", rename={"q.weight": "q.kernel | rotary(1)"})
    with pytest.raises(
        TransferError, match=re.escape("layout rotary(3) needs rows in a multiple of heads = 3, got shape (4, 3)")
    ):
        parity.transfer(tmp_path / "t.safetensors", tmp_path / "g.pt", rename={"q.weight": "w | rotary(3)"})
    assert not (tmp_path / "g.msgpack").exists() and not (tmp_path / "g.pt").exists()
