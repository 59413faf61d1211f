"""Slices and stacks in a rename: arrays cut and joined on either side, every value exactly once."""

import itertools
import json
import re
import tracemalloc
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transfer_helpers import FlaxHolder, bits, rngs, scramble, snapshot

import parity
from parity import InputError, TransferError
from parity.weights.cuts import Alike, cut_as_named, uncovered
from parity.weights.leaf import Leaf, gathered
from parity.weights.names import Name, Span
from parity.weights.paths import Rename, bare, in_order


def numbered(*shape: int, start: int = 0) -> torch.Tensor:
    """A tensor in which no two values are the same."""
    return torch.arange(start, start + int(np.prod(shape)), dtype=torch.float32).reshape(shape)


def tree(**shapes: tuple[int, ...]) -> nnx.State:
    return nnx.State({name: nnx.Param(jnp.zeros(shape)) for name, shape in shapes.items()})


def arrays(value) -> dict[str, np.ndarray]:
    return {path: np.frombuffer(data, dtype).reshape(shape) for path, (dtype, shape, data) in snapshot(value).items()}


# ---------------------------------------------------------------- names

APPLIED = {
    "slice": ({"w[0:2]": "q"}, "w[0:2]", "q"),
    "spaces": ({"w[ :,0 : 2 ]": "q"}, "w[:, 0:2]", "q"),
    "number": ({"w[3]": "q"}, "w[3]", "q"),
    "negative": ({"w[-2:]": "q"}, "w[-2:]", "q"),
    "step": ({"w[0::3]": "q"}, "w[0::3]", "q"),
    "slice-to-slice": ({"w[0:2]": "q[:, 1]"}, "w[0:2]", "q[:, 1]"),
    "other-slice": ({"w[0:2]": "q"}, "w[2:4]", "w[2:4]"),
    "whole": ({"w[0:2]": "q"}, "w", "w"),
    "stack": ({"h.{i}.w": "h.k[{i}]"}, "h.10.w", "h.k[10]"),
    "stack-axis": ({"h.{i}.w": "h.k[:, {i}]"}, "h.0.w", "h.k[:, 0]"),
    "stack-of-modules": ({"h.{i}": "h[{i}]"}, "h.2.a.w", "h.a.w[2]"),
    "stack-in-the-middle": ({"h.{i}.a": "h[{i}].b"}, "h.2.a.w", "h.b.w[2]"),
    "stack-of-stacks": ({"h.{i}.m.{j}": "h[{i}].m[{j}]"}, "h.2.m.3.w", "h.m.w[2, 3]"),
    "stack-that-is-the-whole-model": ({"h.{i}": "[{i}]"}, "h.2.a.w", "a.w[2]"),
    "stack-under-a-long-hole": ({"h.{layer}.w": "k[{layer}]"}, "h.2.w", "k[2]"),
    "stack-of-words-is-none": ({"h.{layer}.w": "k[{layer}]"}, "h.last.w", "h.last.w"),
    "no-zeros-in-front": ({"h.{i}.w": "k[{i}]"}, "h.02.w", "h.02.w"),
    "stack-to-stack": ({"a[{i}]": "b[:, {i}]"}, "a.w[4]", "b.w[:, 4]"),
    "block-of-the-ledger": ({"a": "b"}, "a.in_proj_weight[q]", "b.in_proj_weight[q]"),
    "layout-first": ({"w | qkv per head(2) | [0:4]": "q"}, "w | qkv per head(2) | [0:4]", "q"),
}


@pytest.mark.parametrize("name", APPLIED)
def test_a_slice_is_part_of_a_name_in_both_directions(name):
    mapping, path, expected = APPLIED[name]
    found, key = Rename(mapping).apply(path)
    assert found == expected
    assert (key is None) == (path == expected)
    if key is not None:
        assert Rename(mapping).inverse().apply(found)[0] == path
        assert bare(bare(path)) == bare(path).split("[")[0].split(" | ")[0] or "in_proj" in path


NO_SLICE = {
    "w[...]": "[...] is no slice; write a number, a:b, a:b:c or {i} for each axis",
    "w[..., 0:2]": "[..., 0:2] is no slice",
    "w[0:2:3:4]": "[0:2:3:4] is no slice",
    "w[a:b]": "[a:b] is no slice",
    "w[]": "[] is no slice",
    "w | transposed | [q]": "[q] is no slice",
    "w[0:2] | [0:2]": "'w[0:2] | [0:2]' is cut twice; write one slice",
}


@pytest.mark.parametrize("text", NO_SLICE)
def test_what_is_no_slice_is_refused_before_anything_is_read(text):
    with pytest.raises(InputError, match=re.escape(NO_SLICE[text])):
        parity.transfer({"w": numbered(4)}, tree(q=(2,)), rename={text: "q"})


@given(st.data())
def test_a_slice_means_what_python_means_by_it(data):
    shape = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    items = []
    for size in shape[: data.draw(st.integers(1, 2))]:
        bound = st.one_of(st.just(""), st.integers(-size, size).map(str))
        ranges = st.tuples(bound, bound, st.sampled_from(["", ":", ":1", ":2", ":3", ":-1"]))
        items.append(data.draw(st.one_of(st.integers(-size, size - 1).map(str), ranges.map(lambda r: f"{r[0]}:{r[1]}{r[2]}"))))
    array = np.arange(np.prod(shape)).reshape(shape)
    expected = eval(f"array[{', '.join(items)}]")
    name = Name(f"w[{', '.join(items)}]")
    if not expected.size or any(item.endswith(":-1") for item in items):
        with pytest.raises(InputError):
            list(name.slices(shape))
        return
    [(mark, spans)] = name.slices(shape)
    assert f"w{mark}" == name.meant
    part = leaf(array).at(spans, mark)
    assert np.array_equal(part.read(), expected)
    assert part.shape == expected.shape


def leaf(array: np.ndarray) -> Leaf:
    return Leaf("w", "", "w", (), array.shape, "int64", "parameter", id(array), lambda: array, lambda axes: array)


# ---------------------------------------------------------------- every place once


@given(st.data())
def test_a_place_in_no_slice_or_in_several_is_found_wherever_it_is(data):
    shape = (data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4)))
    array, parts, counts = np.arange(np.prod(shape)).reshape(shape), [], np.zeros(shape, int)
    for _ in range(data.draw(st.integers(1, 4))):
        spans = []
        for size in shape:
            start, step = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, 2))
            spans.append(Span(range(size)[start : data.draw(st.integers(start + 1, size)) : step]))
        parts.append(leaf(array).at(tuple(spans), f"[{', '.join(map(str, spans))}]"))
        counts[parts[-1].part.index] += 1
    sentence = uncovered(leaf(array), parts)
    assert (sentence == "") == bool((counts == 1).all())
    if sentence:
        where = sentence.split(": [", 1)[1].split("]")[0]
        named = eval(f"counts[{where}]")
        assert (named == named.flat[0]).all() and named.flat[0] != 1
        assert ("is in no slice" in sentence) == (named.flat[0] == 0)
    else:
        assert np.array_equal(gathered([(part, part.read()) for part in parts])["w"], array)


# ---------------------------------------------------------------- arrays cut and joined

# Torch's shapes, Flax's shapes, the rename, and what one of Flax's arrays must be.
TRAVELS = {
    "rows": (
        {"w": (6, 5)},
        {"q": (2, 5), "k": (4, 5)},
        {"w[0:2]": "q", "w[2:6]": "k"},
        lambda t: {"q": t["w"][:2], "k": t["w"][2:]},
    ),
    "columns": (
        {"w": (3, 7)},
        {"q": (3, 4), "k": (3, 3)},
        {"w[:, :4]": "q", "w[:, -3:]": "k"},
        lambda t: {"q": t["w"][:, :4], "k": t["w"][:, 4:]},
    ),
    "interleaved-rows": (
        {"w": (6, 2)},
        {"q": (2, 2), "k": (2, 2), "v": (2, 2)},
        {f"w[{n}::3]": c for n, c in enumerate("qkv")},
        lambda t: {c: t["w"][n::3] for n, c in enumerate("qkv")},
    ),
    "blocks-in-both-axes": (
        {"w": (4, 4)},
        {"a": (2, 3), "b": (2, 3), "c": (4, 1)},
        {"w[0:2, 0:3]": "a", "w[2:4, 0:3]": "b", "w[:, 3:4]": "c"},
        lambda t: {"a": t["w"][:2, :3], "c": t["w"][:, 3:]},
    ),
    "joined": (
        {"q": (2, 5), "k": (4, 5)},
        {"w": (5, 6)},
        {"q": "w[:, 0:2] | transposed", "k": "w[:, 2:6] | transposed"},
        lambda t: {"w": np.concatenate((t["q"], t["k"])).T},
    ),
    "joined-with-an-axis-for-the-kinds": (
        {"q": (6, 4), "k": (6, 4)},
        {"w": (4, 3, 2, 2)},
        {"q": "w[:, :, 0] | heads", "k": "w[:, :, 1] | heads"},
        lambda t: {"w": np.stack([t[c].T.reshape(4, 3, 2) for c in "qk"], 2)},
    ),
    "cut-and-joined": (
        {"a": (4,), "b": (4,)},
        {"x": (6,), "y": (2,)},
        {"a[0:2]": "y", "a[2:4]": "x[0:2]", "b": "x[2:6]"},
        lambda t: {"y": t["a"][:2], "x": np.concatenate((t["a"][2:], t["b"]))},
    ),
    "stacked": (
        {f"h.{i}.w": (2, 3) for i in range(11)},
        {"s": (11, 3, 2)},
        {"h.{i}.w": "s[{i}] | transposed"},
        lambda t: {"s": np.stack([t[f"h.{i}.w"].T for i in range(11)])},
    ),
    "stacked-last": (
        {f"h.{i}.w": (2, 3) for i in range(4)},
        {"s": (2, 3, 4)},
        {"h.{i}.w": "s[:, :, {i}]"},
        lambda t: {"s": np.stack([t[f"h.{i}.w"] for i in range(4)], -1)},
    ),
    "stacked-pieces": (
        {f"h.{i}.w": (4,) for i in range(3)},
        {"q": (3, 1), "k": (3, 3)},
        {"h.{i}.w[0:1]": "q[{i}]", "h.{i}.w[1:4]": "k[{i}]"},
        lambda t: {"k": np.stack([t[f"h.{i}.w"][1:] for i in range(3)])},
    ),
    "stacked-twice": (
        {f"h.{i}.e.{j}.w": (2,) for i in range(3) for j in range(2)},
        {"s": (2, 3, 2)},
        {"h.{i}.e.{j}.w": "s[{j}, {i}]"},
        lambda t: {"s": np.stack([[t[f"h.{i}.e.{j}.w"] for i in range(3)] for j in range(2)])},
    ),
    "stacks-on-both-sides": (
        {"a": (3, 2)},
        {"s": (2, 3)},
        {"a[{i}]": "s[:, {i}]"},
        lambda t: {"s": t["a"].T},
    ),
}


@pytest.mark.parametrize("form", ["tree", "model", "safetensors", "pt-msgpack"])
@pytest.mark.parametrize("name", TRAVELS)
def test_arrays_are_cut_and_joined_there_and_back(name, form, tmp_path):
    torch_shapes, flax_shapes, rename, expected = TRAVELS[name]
    starts = itertools.count(0, 1000)
    source = {path: numbered(*shape, start=next(starts)) for path, shape in torch_shapes.items()}
    back = {path: torch.zeros(shape) for path, shape in torch_shapes.items()}
    if form in ("tree", "model"):
        target = tree(**flax_shapes) if form == "tree" else FlaxHolder(**{n: jnp.zeros(s) for n, s in flax_shapes.items()})
        there = parity.transfer(source, target, rename=rename, verify=True)
        found, value = arrays(there.value), there.value
    else:
        first = tmp_path / ("t.safetensors" if form == "safetensors" else "t.pt")
        second = tmp_path / ("f.safetensors" if form == "safetensors" else "f.msgpack")
        parity.transfer(source, first)
        there = parity.transfer(first, second, like=tree(**flax_shapes), rename=rename, verify=True)
        found, value = arrays(parity.transfer(second, tree(**flax_shapes)).value), second
    for path, array in expected({path: tensor.numpy() for path, tensor in source.items()}).items():
        assert bits(found[path]) == bits(array)
    returned = parity.transfer(value, back, rename=rename, verify=True)
    assert all(torch.equal(returned.value[path], tensor) for path, tensor in source.items())
    assert returned.rename == {value: key for key, value in there.rename.items()} or any("|" in v for v in rename.values())
    # What was paired can be passed again, in either direction.
    for saved in (there.rename, returned.rename):
        again = parity.transfer(source, tree(**flax_shapes), rename=saved)
        assert {path: bits(array) for path, array in arrays(again.value).items()} == {p: bits(a) for p, a in found.items()}
        assert again.rename == there.rename


def test_a_part_that_is_lent_is_copied_for_it_is_no_array_of_its_own():
    source = {"w": numbered(4, 5)}
    done = parity.transfer(source, tree(a=(2, 5), b=(2, 5)), rename={"w[0:2]": "a", "w[2:4]": "b"}, copy=False)
    before = arrays(done.value)
    assert not any(entry.shared for entry in done.plan)
    source["w"].fill_(7)
    assert {path: bits(a) for path, a in arrays(done.value).items()} == {path: bits(a) for path, a in before.items()}


# ---------------------------------------------------------------- whole modules in a stack


class TorchLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(4), nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)


class FlaxLayer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.fc = nnx.Linear(4, 4, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 4, broadcast_dropout=False, dropout_rate=0.0, rngs=rngs)


def torch_layers(count: int) -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList(TorchLayer() for _ in range(count))})


def flax_layers(count: int) -> nnx.Module:
    """As nnx.vmap makes them, without compiling what draws the values."""
    layer = nnx.eval_shape(lambda: FlaxLayer(nnx.Rngs(0)))
    for _, variable in nnx.to_flat_state(nnx.state(layer, nnx.Param)):
        variable.set_value(jnp.zeros((count, *variable.get_value().shape)))
    return nnx.Dict(layers=layer)


STACKED = {"layers.{i}": "layers[{i}]"}


def test_a_stack_of_modules_takes_every_leaf_and_follows_the_ledger_in_each_layer():
    source, target = scramble(torch_layers(11), "stack"), flax_layers(11)
    done = parity.transfer(source, target, rename=STACKED)
    kernel = np.asarray(target.layers.fc.kernel[...])
    assert all(bits(kernel[i]) == bits(source.layers[i].fc.weight.detach().numpy().T) for i in range(11))
    assert {e.decided_by for e in done.plan} == {"rule"}
    assert [e.target for e in done.plan if e.target.startswith("layers.fc.bias")] == [f"layers.fc.bias[{i}]" for i in range(11)]
    query = next(e for e in done.plan if e.source == "layers.10.attention.in_proj_weight[q]")
    assert (query.target, query.layout, query.shape) == ("layers.attention.query.kernel[10]", "heads", (4, 2, 2))
    # A setting that does not agree is told for each layer of torch's, although Flax has one.
    assert sum("eps=1e-05 in torch, epsilon=1e-06 in Flax" in sentence for sentence in done.settings) == 11
    back = torch_layers(11)
    parity.transfer(target, back, rename=STACKED)
    assert snapshot(back) == snapshot(source)


def test_the_whole_flax_model_may_be_the_stack_and_hold_a_sequential():
    source = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3))
    target = nnx.Sequential(nnx.Linear(4, 4, rngs=rngs()), jnp.tanh, nnx.Linear(4, 4, rngs=rngs()))
    for _, variable in nnx.to_flat_state(nnx.state(target, nnx.Param)):
        variable.set_value(jnp.zeros((3, *variable.get_value().shape)))
    parity.transfer(scramble(source, "root"), target, rename={"{i}": "[{i}]"})
    assert bits(target.layers[2].kernel[...][1]) == bits(source[1][2].weight.detach().numpy().T)
    back = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3))
    parity.transfer(target, back, rename={"{i}": "[{i}]"})
    assert snapshot(back) == snapshot(source)


def test_one_leaf_of_a_stack_may_be_said_otherwise():
    source, target = scramble(torch_layers(3), "mixed"), flax_layers(3)
    target.layers.fc.kernel.set_value(jnp.zeros((4, 3, 4)))
    rename = STACKED | {"layers.{i}.fc.weight": "layers.fc.kernel[:, {i}] | as is"}
    parity.transfer(source, target, rename=rename)
    assert bits(target.layers.fc.kernel[...][:, 1]) == bits(source.layers[1].fc.weight.detach().numpy())
    back = torch_layers(3)
    parity.transfer(target, back, rename=rename)
    assert snapshot(back) == snapshot(source)


def test_a_file_that_lists_ten_before_two_is_stacked_and_told_in_the_order_of_numbers(tmp_path):
    source = scramble(torch_layers(12), "order").state_dict()
    by_letters = dict(sorted(source.items()))
    parity.transfer(by_letters, tmp_path / "t.pt")
    target = flax_layers(12)
    done = parity.transfer(tmp_path / "t.pt", target, rename=STACKED)
    told = [int(entry.source.split(".")[1]) for entry in done.plan]
    assert told == sorted(told) and max(told) == 11
    assert bits(target.layers.fc.bias[...][10]) == bits(source["layers.10.fc.bias"])


@given(st.lists(st.sampled_from(["a.2", "a.10", "b", "c_10", "c_2.w", "a.10.x", "a.2.x", "c_1"]), unique=True))
def test_numbers_go_up_and_all_else_keeps_its_place(paths):
    ordered = in_order(paths)
    assert sorted(ordered) == sorted(paths)
    assert in_order(ordered) == ordered
    for low, high in (("a.2", "a.10"), ("a.2.x", "a.10.x"), ("c_2.w", "c_10"), ("c_1", "c_2.w")):
        if {low, high} <= set(paths):
            assert ordered.index(low) < ordered.index(high)
    assert [path[0] for path in in_order(["b", "a.10", "a.2"])] == ["b", "a", "a"]


# ---------------------------------------------------------------- refusals


REFUSED = {
    "gap": (
        {"w": (6, 2)},
        {"q": (2, 2), "k": (2, 2)},
        {"w[0:2]": "q", "w[4:6]": "k"},
        "w (6, 2): [2:4] is in no slice of rename",
    ),
    "gap-at-the-end": ({"w": (6,)}, {"q": (4,)}, {"w[0:4]": "q"}, "w (6,): [4:6] is in no slice of rename ([0:4])"),
    "overlap": (
        {"w": (2, 6)},
        {"q": (2, 3), "k": (2, 4)},
        {"w[:, 0:3]": "q", "w[:, 2:6]": "k"},
        "w (2, 6): [:, 2:3] is in 2 slices of rename ([:, 0:3], [:, 2:6]); each place must be in one",
    ),
    "gap-in-flax": ({"q": (2,)}, {"w": (3,)}, {"q": "w[0:2]"}, "w (3,): [2:3] is in no slice of rename ([0:2])"),
    "gap-in-a-stack": (
        {f"h.{i}.w": (1,) for i in range(2)},
        {"s": (2, 3)},
        {"h.{i}.w": "s[{i}, 1:2]"},
        "s (2, 3): [0:1, 0:1] is in no slice of rename ([0, 1:2], [1, 1:2])",
    ),
    "out-of-range": ({"w": (6,)}, {"q": (8,)}, {"w[0:8]": "q"}, "w: [0:8] does not lie in shape (6,): 0:8 is out of range"),
    "number-out-of-range": (
        {"w": (2, 3)},
        {"q": (3,)},
        {"w[2]": "q"},
        "w: [2] does not lie in shape (2, 3): 2 is out of range",
    ),
    "empty": ({"w": (6,)}, {"q": (6,)}, {"w[3:3]": "q"}, "w: [3:3] does not lie in shape (6,): 3:3 is empty"),
    "backwards": ({"w": (6,)}, {"q": (6,)}, {"w[::-1]": "q"}, "w: [::-1] does not lie in shape (6,): ::-1 runs backwards"),
    "step-of-none": ({"w": (6,)}, {"q": (6,)}, {"w[::0]": "q"}, "::0 runs backwards or stands still"),
    "too-many-axes": ({"w": (6,)}, {"q": (6,)}, {"w[:, 0:6]": "q"}, "w: [:, 0:6] is for 2 axes or more, got shape (6,)"),
    "stack-of-numbers": ({"h.0.w": ()}, {"s": ()}, {"h.{i}.w": "s[{i}]"}, "s: [{i}] is for 1 axes or more, got shape ()"),
    "whole-and-in-slices": (
        {"w": (6,)},
        {"q": (6,), "k": (2,)},
        {"w": "q", "w[0:2]": "k"},
        "w: rename takes it whole and in slices: 'w'; write a slice for each",
    ),
    "laid-out-in-two-ways": (
        {"w": (6,)},
        {"q": (2,), "k": (4,)},
        {"w | qkv per head(2) | [0:2]": "q", "w[2:6]": "k"},
        "w: its slices lay it out in several ways before they cut it; write the same layouts in each",
    ),
    "laid-out-in-no-way": (
        {"w": (6,)},
        {"q": (6,)},
        {"w | rotary(4) | [0:6]": "q"},
        "w: layout rotary(4) needs rows in a multiple of heads = 4, got shape (6,)",
    ),
    "more-layers-in-torch": (
        {f"h.{i}.w": (2,) for i in range(12)},
        {"s": (3, 2)},
        {"h.{i}.w": "s[{i}]"},
        "h.{i}.w of the source has 12 (0 to 11), s[{i}] of the target 3 (0 to 2); "
        "number 3, 4, 5, 6 and others is in the source alone",
    ),
    "fewer-layers-in-torch": (
        {f"h.{i}.w": (2,) for i in range(2)},
        {"s": (3, 2)},
        {"h.{i}.w": "s[{i}] | as is"},
        "h.{i}.w of the source has 2 (0, 1), s[{i}] | as is of the target 3 (0 to 2); number 2 is in the target alone",
    ),
    "a-layer-left-out": (
        {f"h.{i}.w": (2,) for i in (0, 1, 3)},
        {"s": (3, 2)},
        {"h.{i}.w": "s[{i}]"},
        "h.{i}.w of the source has 3 (0, 1, 3), s[{i}] of the target 3 (0 to 2); number 2, 3 is in",
    ),
    "counted-from-one": (
        {f"h.{i}.w": (2,) for i in (1, 2)},
        {"s": (2, 2)},
        {"h.{i}.w": "s[{i}]"},
        "h.{i}.w of the source has 2 (1, 2), s[{i}] of the target 2 (0, 1); number 0, 2 is in",
    ),
    "shape-of-a-layer": (
        {f"h.{i}.w": (2 + (i == 1),) for i in range(3)},
        {"s": (3, 2)},
        {"h.{i}.w": "s[{i}]"},
        "h.1.w has shape (3,), so s[1] must have (3,), but it has (2,)",
    ),
    "slice-of-no-array": (
        {"h.weight": (6,)},
        {"q": (6,)},
        {"h.wieght[0:6]": "q"},
        "rename key 'h.wieght[0:6]' fits no name of the source; nearest name: h.weight",
    ),
    "to-no-array": (
        {"w": (4,)},
        {"the_query": (2,), "k": (2,)},
        {"w[0:2]": "the_qeury", "w[2:4]": "k"},
        "w[0:2] (2,) of the source has no counterpart in the target; nearest name: the_query",
    ),
    "nothing-for-a-stack": (
        {"x": (2,)},
        {"x": (2,), "s": (5, 3)},
        {"h.{i}": "s[{i}]"},
        "s (5, 3) of the target gets nothing from the source",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_slice_or_stack_that_does_not_fit_is_refused_and_nothing_is_written(name):
    torch_shapes, flax_shapes, rename, words = REFUSED[name]
    source = {path: torch.ones(shape) for path, shape in torch_shapes.items()}
    target = FlaxHolder(**{path: jnp.zeros(shape) for path, shape in flax_shapes.items()})
    before = snapshot(target)
    with pytest.raises(TransferError, match=re.escape(words)) as error:
        parity.transfer(source, target, rename=rename)
    assert snapshot(target) == before
    assert len(error.value.problems) == len(set(error.value.problems))
    # From Flax to torch the same is said, with the sides the other way round.
    with pytest.raises(TransferError):
        parity.transfer(target, source, rename=rename)


def test_a_square_cut_from_columns_needs_to_be_told_whether_it_is_transposed():
    source = {"c_attn.weight": numbered(4, 8)}
    target = nnx.Dict(**{c: nnx.Linear(4, 4, use_bias=False, rngs=rngs()) for c in "qk"})
    rename = {"c_attn.weight[:, 0:4]": "q.kernel", "c_attn.weight[:, 4:8]": "k.kernel | as is"}
    with pytest.raises(TransferError) as error:
        parity.transfer(source, target, rename=rename)
    assert error.value.problems == (
        "c_attn.weight[:, 0:4] is cut in columns and is square, so that nothing shows whether Flax wants it transposed; "
        "rename to 'q.kernel | transposed' or to 'q.kernel | as is'",
    )


def test_parts_that_arrive_in_several_dtypes_are_refused():
    source = {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.float16)}
    rename = {"a": "s[0:2]", "b": "s[2:4]"}
    with pytest.raises(TransferError, match=re.escape('s would get a in float32 and b in float16; pass cast="target"')):
        parity.transfer(source, tree(s=(4,)), rename=rename, cast="source")
    assert arrays(parity.transfer(source, tree(s=(4,)), rename=rename, cast="target").value)["s"].tolist() == [1, 1, 1, 1]


def test_a_new_file_does_not_take_a_part_without_being_told_how_large_the_array_is(tmp_path):
    parity.transfer({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "t.pt")
    with pytest.raises(TransferError, match=re.escape("'a' -> 's[0:2]' fills a part of an array")) as error:
        parity.transfer(tmp_path / "t.pt", tmp_path / "n.pt", rename={"a": "s[0:2]", "b": "s[2:4]"})
    assert "give the names of the target with like (--like)" in str(error.value)


def test_a_new_file_takes_arrays_cut_from_one(tmp_path):
    parity.transfer({"w": numbered(4, 3)}, tmp_path / "t.pt")
    rename = {"w[0:1]": "a.weight", "w[1:]": "b.weight"}
    parity.transfer(tmp_path / "t.pt", tmp_path / "n.safetensors", rename=rename, verify=True)
    found = parity.transfer(tmp_path / "n.safetensors", {"w": torch.zeros(4, 3)}, rename={v: k for k, v in rename.items()})
    assert torch.equal(found.value["w"], numbered(4, 3))


# ---------------------------------------------------------------- memory, NaN, the plan, the command line


def test_a_stack_holds_no_more_than_itself_and_one_layer_beside_what_is_written(tmp_path):
    layers, size = 16, 256
    source = {f"h.{i}.w": torch.full((size, size), float(i)) for i in range(layers)}
    parity.transfer(source, tmp_path / "t.safetensors")
    like = nnx.eval_shape(lambda: FlaxHolder(s=jnp.zeros((layers, size, size))))
    del source
    tracemalloc.start()
    rename = {"h.{i}.w": "s[{i}] | transposed"}
    parity.transfer(tmp_path / "t.safetensors", tmp_path / "f.safetensors", like=like, rename=rename)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < (layers + 3) * size * size * 4


def test_an_array_of_a_file_is_read_once_for_all_of_its_parts_and_one_of_a_model_each_time():
    array, reads = np.arange(12).reshape(6, 2), []

    def read():
        reads.append(1)
        return array

    renames = Rename({"w | rotary(1) | [{i}]": "s.{i}"})
    for from_file, expected in ((True, 1), (False, 6)):
        reads.clear()
        given_ = replace(leaf(array), read=read, from_file=from_file)
        parts = cut_as_named([given_], [], renames, (lambda one: [one.path], lambda one: [])).sources
        assert [part.path for part in parts] == [f"w | rotary(1) | [{i}]" for i in range(6)]
        assert [part.read().tolist() for part in parts] == array[[0, 3, 1, 4, 2, 5]].tolist()
        assert len(reads) == expected


def test_nan_in_a_part_is_told_under_its_own_name(tmp_path):
    array = torch.zeros(4)
    array[3] = float("nan")
    parity.transfer({"w": array}, tmp_path / "t.pt")
    done = parity.transfer(tmp_path / "t.pt", tree(a=(2,), b=(2,)), rename={"w[0:2]": "a", "w[2:4]": "b"})
    assert [n for n in done.notes if "NaN" in n] == ["1 of 2 values of w[2:4] are NaN; they were sent as they are"]


@pytest.fixture
def files(tmp_path):
    """A fused checkpoint, names to take on, and a rename file."""
    parity.transfer({"attn.qkv.weight": numbered(12, 4), "attn.qkv.bias": numbered(12)}, tmp_path / "t.safetensors")
    target = {f"attn.{c}.{end}": nnx.Param(jnp.zeros(s)) for c in "qkv" for end, s in (("kernel", (4, 4)), ("bias", (4,)))}
    parity.transfer(nnx.State(target), tmp_path / "like.msgpack")
    names = {
        f"attn.qkv.{old} | qkv per head(2) | [{4 * n}:{4 * n + 4}]": f"attn.{c}.{new}"
        for n, c in enumerate("qkv")
        for old, new in (("weight", "kernel | rotary(2) | transposed"), ("bias", "bias | rotary(2)"))
    }
    (tmp_path / "names.json").write_text(json.dumps(names))
    return tmp_path, names


def run(capsys, *argv):
    from parity.cli import app

    with pytest.raises(SystemExit) as stop:
        app(["transfer", *map(str, argv)], standalone_mode=True)
    return stop.value.code, capsys.readouterr().out


def test_the_command_line_carries_slices_and_layouts_and_saves_them_to_be_edited(files, capsys):
    folder, names = files
    given = ("--like", folder / "like.msgpack", "--rename", folder / "names.json")
    code, out = run(capsys, folder / "t.safetensors", folder / "f.msgpack", *given, "--plan")
    assert code == 0
    assert "attn.qkv.weight | qkv per head(2) | [4:8]  -> attn.k.kernel  rotary(2) | transposed, (4, 4) float32" in out
    code, out = run(
        capsys,
        folder / "t.safetensors",
        folder / "f.msgpack",
        *given,
        "--save-rename",
        folder / "saved.json",
        "--json",
        "--verify",
    )
    plan = {entry["source"]: (entry["target"], entry["layout"], entry["decided_by"]) for entry in json.loads(out)["plan"]}
    assert plan["attn.qkv.bias | qkv per head(2) | [8:12]"] == ("attn.v.bias", "rotary(2)", "rename")
    saved = json.loads((folder / "saved.json").read_text())
    assert saved == names
    # Edited: only queries and keys are rotated.
    edited = {key: value.replace(" | rotary(2)", "") if ".v." in value else value for key, value in saved.items()}
    (folder / "edited.json").write_text(json.dumps(edited))
    given = (*given[:3], folder / "edited.json", "--overwrite")
    assert run(capsys, folder / "t.safetensors", folder / "f.msgpack", *given)[0] == 0
    found = arrays(parity.transfer(folder / "f.msgpack", tree_like(folder)).value)
    weight = numbered(12, 4).numpy()
    assert bits(found["attn.v.kernel"]) == bits(weight[[4, 5, 10, 11]].T)
    assert bits(found["attn.q.kernel"]) == bits(weight[[0, 1, 6, 7]].T)
    code, _ = run(capsys, folder / "f.msgpack", folder / "b.pt", "--like", folder / "t.safetensors", "--rename", given[3])
    assert code == 0
    assert torch.equal(torch.load(folder / "b.pt")["attn.qkv.weight"], numbered(12, 4))


def tree_like(folder) -> nnx.State:
    flat = {
        (*f"attn.{c}".split("."), end): nnx.Param(jnp.zeros(s))
        for c in "qkv"
        for end, s in (("kernel", (4, 4)), ("bias", (4,)))
    }
    return nnx.from_flat_state(flat)


# ---------------------------------------------------------------- what to pass


@pytest.mark.parametrize("axis", [0, 1])
def test_a_stack_that_nobody_named_is_recognised_and_the_hint_works_in_both_directions(axis):
    source = {f"h.{i}.fc.{end}": numbered(*s) for i in range(11) for end, s in (("weight", (2, 3)), ("bias", (2,)))}
    kernel = (11, 3, 2) if axis == 0 else (3, 11, 2)
    target = nnx.Dict(h=nnx.Dict(fc=nnx.Linear(3, 2, use_bias=False, rngs=rngs())))
    target.h.fc.kernel.set_value(jnp.zeros(kernel))
    only = {name: tensor for name, tensor in source.items() if name.endswith("weight")}
    index = "[{i}]" if axis == 0 else "[:, {i}]"
    for pair in ((only, target), (target, only)):
        with pytest.raises(TransferError) as error:
            parity.transfer(*pair)
        assert error.value.problems[0] == (
            f"h.fc.kernel {kernel} may be the 11 arrays h.0.fc.weight to h.10.fc.weight (2, 3) in a stack; "
            f"if so, pass rename={{'h.{{i}}': 'h{index}'}}"
        )
        parity.transfer(*pair, rename={"h.{i}": f"h{index}"})
    both = nnx.Dict(h=nnx.Dict(fc=nnx.Linear(3, 2, rngs=rngs())))
    both.h.fc.kernel.set_value(jnp.zeros((11, 3, 2)))
    both.h.fc.bias.set_value(jnp.zeros((11, 2)))
    with pytest.raises(TransferError) as error:
        parity.transfer(source, both)
    # One entry for all below the module is said once.
    assert str(error.value).count("in a stack") == 1


def test_between_two_of_one_framework_the_hint_names_the_source_first():
    separate, stacked = {f"h.{i}.w": torch.ones(2) for i in range(3)}, {"h.w": torch.ones(3, 2)}
    for pair, rename in (((separate, stacked), {"h.{i}": "h[{i}]"}), ((stacked, separate), {"h[{i}]": "h.{i}"})):
        with pytest.raises(TransferError, match=re.escape(f"pass rename={rename}")):
            parity.transfer(*pair)
        assert len(parity.transfer(*pair, rename=rename).plan) == 3


@pytest.mark.parametrize("shape", [(4, 2), (3,), (3, 3, 2)])
def test_what_is_no_stack_of_these_gets_no_such_hint(shape):
    with pytest.raises(TransferError) as error:
        parity.transfer({f"h.{i}.w": torch.ones(2) for i in range(3)}, {"h.w": torch.ones(shape)})
    assert "in a stack" not in str(error.value)


ranges = st.builds(
    lambda begin, length, step: range(12)[begin : begin + length : step],
    st.integers(0, 11),
    st.integers(1, 12),
    st.integers(1, 3),
)


@given(st.lists(ranges, min_size=1, max_size=6))
def test_places_that_the_same_ranges_hold_are_one_group(some):
    axis = Alike(some, 12)
    holders = [tuple(places for places in some if place in places) for place in range(12)]
    first = [place for place in range(12) if holders[place] not in holders[:place]]
    assert [run.places.start for run in axis.runs] == first
    for run in axis.runs:
        end = run.places.stop
        assert len({holders[place] for place in run.places}) == 1
        assert end == 12 or holders[end] != holders[end - 1]
    for places in some:
        assert axis.within[places].tolist() == [number for number, place in enumerate(first) if place in places]


def test_a_stack_is_accounted_for_in_the_time_of_going_through_it_once(monkeypatch):
    touched: list[int] = []
    unique = np.unique

    def counted(array, **options):
        touched.append(array.size)
        return unique(array, **options)

    monkeypatch.setattr(np, "unique", counted)
    for count in (100, 200):
        touched.clear()
        Alike([range(number, number + 1) for number in range(count)], count)
        # The groups, and each range once for them and once in them.
        assert sum(touched) == 3 * count
