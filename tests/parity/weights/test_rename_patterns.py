"""Holes in a rename: filled in one way only, anchored, and told where two entries are at odds."""

import re

import jax.numpy as jnp
import pytest
import torch
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from transfer_helpers import FlaxHolder

import parity
from parity import InputError, TransferError
from parity.weights.paths import Rename

DOUBTFUL = {
    "side-by-side": {"a{i}{j}": "b.{i}.{j}"},
    "side-by-side-in-the-value": {"a.{i}.{j}": "b{i}{j}"},
    "two-words": {"{left}_{right}": "{left}.{right}"},
    "two-words-around-a-number": {"{left}_{i}_{right}": "{left}.{i}.{right}"},
    "a-digit-between-numbers": {"h{i}1{j}": "h.{i}.{j}"},
    "a-digit-between-word-and-number": {"{name}1{i}": "{name}.{i}"},
    "word-and-number": {"{name}{i}": "{name}.{i}"},
}


@pytest.mark.parametrize("name", DOUBTFUL)
def test_a_pattern_that_could_be_filled_in_several_ways_is_refused(name):
    with pytest.raises(InputError, match=r"the holes in '.*' could be filled in several ways; put a dot between them"):
        Rename(DOUBTFUL[name])


CLEAR = {
    "number-behind-a-word": ({"{name}_{i}": "{name}.{i}"}, "norm_1_12", "norm_1.12"),
    "word-behind-a-number": ({"{i}_{name}": "{name}.{i}"}, "12_norm_3", "norm_3.12"),
    "numbers-with-letters-between": ({"b{i}h{j}": "{j}.{i}"}, "b10h2", "2.10"),
    "digit-in-front": ({"h1{i}": "h.{i}"}, "h12", "h.2"),
    "part-of-a-word": ({"{name}_proj": "proj_{name}"}, "q_proj.w", "proj_q.w"),
    "three": ({"{a}.x{b}.{name}.w": "{name}.{b}_{a}"}, "1.x2.attn.w.z", "attn.2_1.z"),
    "last": ({"mlp.{name}": "ffn.{name}_layer"}, "mlp.up.w", "ffn.up_layer.w"),
}


@pytest.mark.parametrize("name", CLEAR)
def test_a_pattern_that_can_be_filled_in_one_way_comes_back(name):
    mapping, path, expected = CLEAR[name]
    assert Rename(mapping).apply(path)[0] == expected
    assert Rename(mapping).inverse().apply(expected)[0] == path


words = st.text("ab1_", min_size=1, max_size=3)


@given(st.lists(st.one_of(words, st.sampled_from(["{i}", "{j}", "{name}", "{other}"])), min_size=1, max_size=5), st.data())
def test_what_is_not_refused_comes_back_for_any_filling(pieces, data):
    holes = [piece for piece in pieces if piece.startswith("{")]
    if len(set(holes)) < len(holes):
        return
    pattern = "".join(piece + data.draw(st.sampled_from(["", ".", "_"])) for piece in pieces).strip("._")
    if not pattern or ".." in pattern:
        return
    value = ".".join(["x", *holes])
    try:
        rename = Rename({pattern: value})
    except InputError:
        return
    filled = pattern
    for hole in holes:
        number = len(hole) == 3
        filled = filled.replace(hole, data.draw(st.from_regex("[0-9]{1,2}", fullmatch=True) if number else words))
    new, key = rename.apply(filled)
    assert key == pattern
    assert rename.inverse().apply(new)[0] == filled


def test_a_pattern_fits_from_the_root_and_whole_parts_only():
    rename = Rename({"h.{i}.w": "x.{i}"})
    assert [rename.apply(path)[1] for path in ("a.h.1.w", "h.1.ww", "hh.1.w", "h.1.w_1", "h.1a.w")] == [None] * 5


def test_the_pattern_that_says_most_wins_whatever_its_holes_are_called():
    rename = Rename({"layers.{a_long_name}.w": "any.{a_long_name}", "layers.0.w": "first", "layers": "rest"})
    assert [rename.apply(f"layers.{path}")[0] for path in ("0.w", "1.w", "1.b")] == ["first", "any.1", "rest.1.b"]


def test_two_patterns_that_say_as_much_and_lead_elsewhere_are_told():
    source, target = {"a.0": torch.ones(2), "a.1": torch.ones(2)}, FlaxHolder(x=jnp.ones(2), y=jnp.ones(2))
    with pytest.raises(TransferError) as error:
        parity.transfer(source, target, rename={"{part}.0": "x{part}", "a.{i}": "y{i}"})
    assert (
        "rename keys '{part}.0' and 'a.{i}' both fit a.0, and lead to xa and y0; make one of them more exact"
        in error.value.problems
    )


def test_a_pattern_that_is_never_the_most_exact_is_no_fault():
    source, target = {"a.0": torch.ones(2)}, nnx.Dict(b=nnx.Dict(**{"0": nnx.Param(jnp.ones(2))}))
    assert (
        len(parity.transfer(source, target, rename={"a": "b", "a.{i}": "b.{i}", "{part}.0": "{part}.0", "a.0": "b.0"}).plan)
        == 1
    )


def test_one_name_in_two_entries_is_refused():
    with pytest.raises(InputError, match=re.escape("several entries are for 'w[0:2]'; a rename must be invertible")):
        Rename({"w[0:2]": "a", "w[ 0:2]": "b"})
    with pytest.raises(InputError, match=re.escape("several names lead to 'x'; a rename must be invertible")):
        Rename({"a": "x | as is", "b": "x"})


def test_a_key_that_fits_nothing_names_the_nearest():
    source = {f"encoder.layer.{i}.weight": torch.ones(2) for i in range(12)}
    with pytest.raises(TransferError) as error:
        parity.transfer(source, source, rename={"encoder.layers.{i}.weight": "x.{i}"})
    assert "rename key 'encoder.layers.{i}.weight' fits no name of the source; nearest name: encoder.layer." in str(error.value)
