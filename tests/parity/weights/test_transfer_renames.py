"""Names: their order, their renames in both directions, and likeness."""

import re

import jax.numpy as jnp
import pytest
import torch
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transfer_helpers import FlaxHolder, rngs, scramble, snapshot, transposed

import parity
from parity import InputError, TransferError
from parity.weights.paths import Rename, join, natural, nearest, split


def plan(source, target, **options):
    return {entry.source: entry.target for entry in parity.transfer(source, target, **options).plan}


# ---------------------------------------------------------------- the mapping

APPLIED = {
    "leaf": ({"a.w": "b.k"}, "a.w", "b.k"),
    "module": ({"a": "b.c"}, "a.w", "b.c.w"),
    "not-a-prefix-of-a-word": ({"a": "b"}, "ab.w", "ab.w"),
    "anchored": ({"a": "b"}, "x.a.w", "x.a.w"),
    "number": ({"layers.{i}": "blocks.{i}"}, "layers.12.w", "blocks.12.w"),
    "number-joined": ({"h{i}": "h.{i}"}, "h3.w", "h.3.w"),
    "number-only": ({"layers.{i}": "blocks.{i}"}, "layers.last.w", "layers.last.w"),
    "word": ({"{part}.self": "{part}.attention"}, "encoder.self.w", "encoder.attention.w"),
    "two-holes": ({"{a}.{b}": "x{b}.y{a}"}, "3.4.w", "x4.y3.w"),
    "digit-as-hole": ({"layers.{0}": "blocks.{0}"}, "layers.2.w", "blocks.2.w"),
    "longest-wins": ({"a": "b", "a.c": "d"}, "a.c.w", "d.w"),
    "prefix-added": ({"": "model"}, "a.w", "model.a.w"),
    "prefix-removed": ({"model": ""}, "model.a.w", "a.w"),
    "characters-of-patterns": ({"a.b": "c"}, "axb.w", "axb.w"),
}


@pytest.mark.parametrize("name", APPLIED)
def test_a_rename_is_applied_and_undone(name):
    mapping, path, expected = APPLIED[name]
    rename = Rename(mapping)
    found, key = rename.apply(path)
    assert found == expected
    assert (key is None) == (path == expected)
    if key is not None:
        assert rename.inverse().apply(found)[0] == path


REFUSED = {
    "hole-on-one-side": ({"a.{i}": "b"}, "'a.{i}' -> 'b': both sides need the same holes, each once"),
    "other-hole": ({"a.{i}": "b.{j}"}, "both sides need the same holes"),
    "hole-twice": ({"a.{i}.{i}": "b.{i}.{i}"}, "each once"),
    "two-to-one": ({"a": "x", "b": "x"}, "several names lead to 'x'; a rename must be invertible"),
    "no-mapping": ("abc", "rename must be a mapping from names to names, got 'abc'"),
    "pairs": ([("a", "b")], "rename must be a mapping"),
    "no-names": ({"a": None}, "rename must be a mapping from names to names, got {'a': None}"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_rename_that_cannot_be_undone_is_refused(name):
    mapping, words = REFUSED[name]
    with pytest.raises(InputError, match=re.escape(words)):
        parity.transfer({"a": torch.ones(1)}, FlaxHolder(a=jnp.ones(1)), rename=mapping)


def test_all_faults_of_a_rename_come_together():
    with pytest.raises(InputError) as error:
        Rename({"a.{i}": "b", "c": "x", "d": "x"})
    assert "'a.{i}'" in str(error.value)
    assert "'x'" in str(error.value)


words = st.text("abcxyz_", min_size=1, max_size=4)
parts = st.one_of(words, st.integers(0, 120).map(str))
paths = st.lists(parts, min_size=1, max_size=5).map(".".join)


@st.composite
def rules(draw):
    """One pattern of a few parts, some of them holes, to another with the same holes in any order."""
    holes = draw(st.lists(st.sampled_from(["{i}", "{j}", "{name}"]), unique=True, max_size=3))
    key = draw(st.permutations([*holes, *draw(st.lists(words, min_size=1, max_size=2))]))
    value = draw(st.permutations([*holes, *draw(st.lists(words, min_size=1, max_size=2))]))
    filled = {hole: draw(parts if hole == "{name}" else st.integers(0, 120).map(str)) for hole in holes}
    rest = draw(st.lists(parts, max_size=2))
    path = ".".join([filled.get(part, part) for part in key] + rest)
    return {".".join(key): ".".join(value)}, path, [filled.get(part, part) for part in value] + rest


@given(rules())
def test_a_rename_fills_its_holes_and_comes_back(rule):
    mapping, path, expected = rule
    rename = Rename(mapping)
    assert rename.apply(path) == (".".join(expected), next(iter(mapping)))
    assert rename.inverse().apply(".".join(expected))[0] == path
    assert rename.inverse().inverse().mapping == rename.mapping


@given(st.lists(paths, min_size=1, max_size=6, unique=True), st.data())
def test_any_invertible_renaming_of_whole_models_travels_there_and_back(names, data):
    # Leaves at the ends: no name may be the owner of another.
    names = [n for n in names if not any(m.startswith(f"{n}.") for m in names)]
    new = data.draw(st.permutations([f"leaf{i}" for i in range(len(names))]))
    rename = dict(zip(names, new))
    tensors = {name: torch.full((2,), float(index)) for index, name in enumerate(names)}
    there = parity.transfer(tensors, nnx.State({n: jnp.zeros(2) for n in new}), rename=rename).value
    assert {n: float(there[n][0]) for n in new} == {rename[n]: float(t[0]) for n, t in tensors.items()}
    back = parity.transfer(there, {n: torch.zeros(2) for n in names}, rename=rename).value
    assert all(torch.equal(back[n], tensors[n]) for n in names)


# ---------------------------------------------------------------- whole models


def torch_stack(count: int) -> nn.Module:
    return nn.ModuleDict({"encoder": nn.ModuleDict({"layer": nn.ModuleList(nn.Linear(2, 3) for _ in range(count))})})


def flax_stack(count: int) -> nnx.Module:
    return nnx.Dict(blocks=nnx.List([nnx.Linear(2, 3, rngs=rngs()) for _ in range(count)]))


def test_one_mapping_serves_both_directions():
    source, target, rename = scramble(torch_stack(3), "stack"), flax_stack(3), {"encoder.layer.{i}": "blocks.{i}"}
    there = plan(source, target, rename=rename)
    assert there["encoder.layer.2.weight"] == "blocks.2.kernel"
    assert snapshot(target)["blocks.1.kernel"] == transposed(snapshot(source)["encoder.layer.1.weight"])
    back = torch_stack(3)
    assert plan(target, back, rename=rename) == {value: key for key, value in there.items()}
    assert snapshot(back) == snapshot(source)


@pytest.mark.parametrize("key", ["encoder.layer.{i}.weight", "encoder.layer.{i}"])
def test_leaf_and_module_keys_work_with_every_form(key):
    rename = {key: "blocks.{i}.kernel" if key.endswith("weight") else "blocks.{i}"}
    rename |= {"encoder.layer.{i}.bias": "blocks.{i}.bias"} if key.endswith("weight") else {}
    for torch_form in (lambda m: m, lambda m: m.state_dict()):
        for flax_form in (lambda m: m, nnx.state):
            source = scramble(torch_stack(2), key)
            target = flax_form(flax_stack(2))
            value = parity.transfer(torch_form(source), target, rename=rename).value
            assert snapshot(value)["blocks.1.kernel"] == transposed(snapshot(source)["encoder.layer.1.weight"])
            back = parity.transfer(value, torch_form(torch_stack(2)), rename=rename).value
            assert snapshot(back) == snapshot(source)


def test_a_swap_is_followed_in_both_directions():
    rename = {"a.weight": "b.kernel", "b.weight": "a.kernel"}

    def torch_model():
        return nn.ModuleDict({k: nn.Linear(3, 3, bias=False) for k in "ab"})

    target = nnx.Dict(**{k: nnx.Linear(3, 3, use_bias=False, rngs=rngs()) for k in "ab"})
    source = scramble(torch_model(), "swap")
    assert plan(source, target, rename=rename) == {"a.weight": "b.kernel", "b.weight": "a.kernel"}
    back = torch_model()
    assert plan(target, back, rename=rename) == {"a.kernel": "b.weight", "b.kernel": "a.weight"}
    assert snapshot(back) == snapshot(source)


def test_a_name_that_was_given_is_not_replaced_by_one_that_fits():
    with pytest.raises(
        TransferError, match=r"weight \(5, 3\) of the source has no counterpart in the target; nearest name: kernel"
    ):
        parity.transfer(nn.Linear(3, 5), nnx.Linear(3, 5, rngs=rngs()), rename={"weight": "kernl"})


def test_the_layers_of_a_sequential_may_be_named_in_either_way():
    for value in ("body.{i}", "body.layers.{i}"):
        source = nn.ModuleDict({"net": nn.Sequential(nn.LayerNorm(4))})
        target = nnx.Dict(body=nnx.Sequential(nnx.LayerNorm(4, rngs=rngs())))
        for one, other in ((source, target), (target, source)):
            done = parity.transfer(one, other, rename={"net.{i}": value})
            assert len(done.plan) == 2
            assert any("eps=1e-05 in torch, epsilon=1e-06 in Flax" in sentence for sentence in done.settings)


def test_between_two_of_one_framework_the_source_comes_first():
    assert plan({"a": torch.ones(1)}, {"b": torch.zeros(1)}, rename={"a": "b"}) == {"a": "b"}
    assert plan(FlaxHolder(a=jnp.ones(1)), FlaxHolder(b=jnp.zeros(1)), rename={"a": "b"}) == {"a": "b"}


# ---------------------------------------------------------------- order and likeness


def test_ten_stands_behind_two():
    ordered = ["h2", "h10", "layers.2.w", "layers.10.w", "layers.10.x", "norm"]
    assert sorted(sorted(ordered), key=natural) == ordered


def test_a_long_stack_keeps_its_order():
    source = torch_stack(12)
    done = parity.transfer(source, flax_stack(12), rename={"encoder.layer": "blocks"})
    assert [entry.source for entry in done.plan] == list(source.state_dict())
    assert all(entry.source.split(".")[2] == entry.target.split(".")[1] for entry in done.plan)


@given(st.lists(paths, max_size=5))
def test_natural_order_is_total(names):
    assert sorted(sorted(names), key=natural) == sorted(sorted(names, reverse=True), key=natural)


@given(paths)
def test_split_and_join_undo_each_other(path):
    assert join(*split(path)) == path


def test_a_shared_last_name_weighs_more_than_letters():
    assert nearest("encoder.q.weight", ["encoder.k.weights", "q.weight"]) == ["q.weight"]
    assert nearest("encoder.q.weight", []) == []
    assert nearest("a", ["zzz"]) == []
