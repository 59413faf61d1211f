"""Every row of the ledger, every form of source and target, every dtype: bit for bit, by an oracle of their own."""

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from helpers import numpy_dtype
from rule_cases import CASES
from torch import nn
from transfer_helpers import (
    FlaxHolder,
    FlaxNet,
    Holder,
    TorchNet,
    any_bits,
    arrays_only,
    bits,
    flax_net,
    in_flax,
    in_torch,
    rngs,
    scramble,
    snapshot,
    to_tensor,
    transposed,
)

import jax_impl
import parity
import torch_impl
from parity.weights import rules
from parity.weights.layouts import AS_IS, TRANSPOSED, Layout
from parity.weights.rules import RULES, LeafRule, Rule

# ---------------------------------------------------------------- rules


@dataclass(frozen=True)
class Row:
    """A leaf layer in both frameworks; `names` leads from torch's arrays to Flax's, with a star where transposed."""

    rule: str
    torch: Callable[[], nn.Module]
    flax: Callable[[nnx.Rngs], nnx.Module]
    names: str


EXACT = dict(epsilon=1e-5, use_fast_variance=False)
ROWS = {
    "linear": Row("torch.nn.Linear", lambda: nn.Linear(5, 3), lambda r: nnx.Linear(5, 3, rngs=r), "weight:kernel* bias:bias"),
    "linear-square": Row(
        "torch.nn.Linear", lambda: nn.Linear(4, 4), lambda r: nnx.Linear(4, 4, rngs=r), "weight:kernel* bias:bias"
    ),
    "linear-row": Row(
        "torch.nn.Linear", lambda: nn.Linear(6, 1), lambda r: nnx.Linear(6, 1, rngs=r), "weight:kernel* bias:bias"
    ),
    "linear-no-bias": Row(
        "torch.nn.Linear", lambda: nn.Linear(1, 6, False), lambda r: nnx.Linear(1, 6, use_bias=False, rngs=r), "weight:kernel*"
    ),
    "layer-norm": Row(
        "torch.nn.LayerNorm", lambda: nn.LayerNorm(5), lambda r: nnx.LayerNorm(5, **EXACT, rngs=r), "weight:scale bias:bias"
    ),
    "layer-norm-no-bias": Row(
        "torch.nn.LayerNorm",
        lambda: nn.LayerNorm(5, bias=False),
        lambda r: nnx.LayerNorm(5, use_bias=False, **EXACT, rngs=r),
        "weight:scale",
    ),
    "layer-norm-plain": Row(
        "torch.nn.LayerNorm",
        lambda: nn.LayerNorm(5, elementwise_affine=False),
        lambda r: nnx.LayerNorm(5, use_bias=False, use_scale=False, **EXACT, rngs=r),
        "",
    ),
    "embedding": Row("torch.nn.Embedding", lambda: nn.Embedding(7, 3), lambda r: nnx.Embed(7, 3, rngs=r), "weight:embedding"),
    "embedding-square": Row(
        "torch.nn.Embedding", lambda: nn.Embedding(4, 4), lambda r: nnx.Embed(4, 4, rngs=r), "weight:embedding"
    ),
    "dropout": Row("torch.nn.Dropout", lambda: nn.Dropout(0.5), lambda r: nnx.Dropout(0.5, rngs=r), ""),
}


class TorchPair(nn.Module):
    """The layer, and one more so that a layer without arrays has company."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.other = layer, nn.Linear(3, 2)


class FlaxPair(nnx.Module):
    def __init__(self, layer: nnx.Module):
        self.layer, self.other = layer, nnx.Linear(3, 2, rngs=rngs())


def pair_of(row: Row) -> tuple[nn.Module, nnx.Module, list[tuple[str, str, bool]]]:
    entries = [entry.split(":") for entry in f"{row.names}".split()]
    names = [(f"layer.{t}", f"layer.{f.rstrip('*')}", f.endswith("*")) for t, f in entries]
    names += [("other.weight", "other.kernel", True), ("other.bias", "other.bias", False)]
    return TorchPair(row.torch()), FlaxPair(row.flax(rngs())), names


def test_every_rule_has_a_row_here_or_in_a_file_of_its_own():
    known = {row.rule for row in ROWS.values()} | {case.rule for case in CASES}
    assert {(rule.torch, rule.flax) for rule in RULES if rule.torch not in known} == set()


def test_every_layer_of_a_rule_is_what_its_row_builds():
    for row in ROWS.values():
        rule = next(rule for rule in RULES if rule.torch == row.rule)
        assert type(row.torch()).__name__ == rule.torch.removeprefix("torch.nn.")
        assert type(row.flax(rngs())).__name__ == rule.flax.removeprefix("flax.nnx.")


def test_every_array_of_a_rule_stands_in_a_row():
    for rule in {row.rule: next(rule for rule in RULES if rule.torch == row.rule) for row in ROWS.values()}.values():
        named = {entry for row in ROWS.values() if row.rule == rule.torch for entry in row.names.split()}
        assert named == {f"{leaf.torch}:{leaf.flax}{'*' * (leaf.layout is TRANSPOSED)}" for leaf in rule.leaves}


@pytest.mark.parametrize("name", ROWS)
def test_a_rule_carries_every_array_there_and_back(name):
    torch_model, flax_model, names = pair_of(ROWS[name])
    scramble(torch_model, name, "torch")
    before = snapshot(torch_model)
    there = parity.transfer(torch_model, scramble(flax_model, name, "flax"))
    arrived = snapshot(flax_model)
    assert {f: arrived[f] for _, f, _ in names} == {f: transposed(before[t]) if flips else before[t] for t, f, flips in names}
    assert [(e.source, e.target, e.layout == "transposed") for e in there.plan] == names
    assert {e.decided_by for e in there.plan} == {"rule"}
    assert there.passed, there.settings
    back = parity.transfer(flax_model, scramble(pair_of(ROWS[name])[0], name, "fresh"))
    assert snapshot(back.value) == before
    assert back.passed, back.settings


@pytest.mark.parametrize("layout", [AS_IS, TRANSPOSED, Layout("rolled", (2, 0, 1)), Layout("rolled", (1, 2, 0))], ids=str)
def test_a_layout_and_its_inverse_give_the_array_back(layout):
    shape = tuple(range(2, 2 + len(layout.axes or (0,) * 3)))
    array = np.arange(np.prod(shape)).reshape(shape)
    there = layout.apply(array)
    assert there.shape == layout.shape(shape)
    np.testing.assert_array_equal(layout.inverse().apply(there), array)
    np.testing.assert_array_equal(layout.apply(layout.inverse().apply(array)), array)
    assert np.shares_memory(there, array)


def test_a_layout_refuses_another_number_of_axes():
    assert not TRANSPOSED.fits(1)
    assert TRANSPOSED.fits(2)
    with pytest.raises(ValueError, match="layout transposed is for 2 axes, got 3"):
        TRANSPOSED.permutation(3)


def test_a_subclass_follows_the_rule_of_its_base():
    class MyLinear(nn.Linear):
        pass

    class MyFlaxLinear(nnx.Linear):
        pass

    source = scramble(MyLinear(5, 3), "subclass")
    target = MyFlaxLinear(5, 3, rngs=rngs())
    assert {e.decided_by for e in parity.transfer(source, target).plan} == {"rule"}
    assert snapshot(target)["kernel"] == transposed(snapshot(source)["weight"])


class TorchConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3, 4))


class FlaxConv(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.zeros((4, 2, 3)))


def test_a_new_row_serves_both_directions_also_where_its_layout_is_not_its_own_inverse(monkeypatch):
    row = Rule(f"{__name__}.TorchConv", f"{__name__}.FlaxConv", (LeafRule("weight", "kernel", Layout("rolled", (2, 0, 1))),))
    monkeypatch.setattr(rules, "RULES", [*RULES, row])
    source, target = scramble(TorchConv(), "conv"), FlaxConv()
    assert parity.transfer(source, target).plan[0].layout == "rolled"
    assert bits(target.kernel[...]) == bits(source.weight.permute(2, 0, 1))
    assert snapshot(parity.transfer(target, TorchConv()).value) == snapshot(source)


# ---------------------------------------------------------------- the two wings

WINGS = {
    "MultiHeadAttention": dict(d_model=12, n_heads=3, d_q=5, d_k=5, d_v=2, bias=True, output_bias=True),
    "MultiHeadAttention-square": dict(d_model=8, n_heads=2, d_q=4, d_k=4, d_v=4),
    "Multi_Head_Self_Attention": dict(embed_size=12, heads=3),
    "SelfAttention": dict(embed_size=12, heads=3),
    "SelfAttention-square": dict(embed_size=6, heads=1),
    "FeedForwardNetwork": dict(d_model=6, d_ff=10),
    "Linear": dict(in_features=5, out_features=3),
}


@pytest.mark.parametrize("case", WINGS)
def test_the_wings_travel_both_ways(case):
    name = case.removesuffix("-square")
    source = scramble(getattr(torch_impl, name)(**WINGS[case]), case)
    before = snapshot(source)
    target = nnx.eval_shape(lambda: getattr(jax_impl, name)(**WINGS[case], rngs=nnx.Rngs(0)))
    there = parity.transfer(source, target)
    assert there.passed, there.settings
    arrived = arrays_only(snapshot(target))
    assert len(arrived) == len(before) == len(there.plan)
    for path, leaf in before.items():
        in_words = path.replace("weight", "kernel")
        in_words = in_words.replace("model.", "model.layers.") if name == "FeedForwardNetwork" else in_words
        assert arrived[in_words] == (transposed(leaf) if path.endswith("weight") else leaf)
    back = getattr(torch_impl, name)(**WINGS[case])
    parity.transfer(target, back)
    assert snapshot(back) == before


# ---------------------------------------------------------------- every form of source and target

FORMS: dict[str, Callable[[Any], Any]] = {
    "torch": lambda made: made,
    "state_dict": lambda made: made.state_dict(),
    "flax": lambda made: made,
    "state": nnx.state,
}
ABSTRACT = {"abstract": lambda made: made, "abstract state": nnx.state}


def make(form: str, *name: str, dtype: str | None = None) -> Any:
    if form in ABSTRACT:
        return ABSTRACT[form](nnx.eval_shape(lambda: FlaxNet(nnx.Rngs(0))))
    model = TorchNet() if form in ("torch", "state_dict") else flax_net()
    return FORMS[form](scramble(model, form, *name, dtype=dtype))


def side(form: str) -> str:
    return "torch" if form in ("torch", "state_dict") else "flax"


def expected(source: Any, source_form: str, target_form: str) -> dict[str, Any]:
    leaves = arrays_only(snapshot(source))
    if side(source_form) == side(target_form):
        return leaves
    return in_flax(leaves) if side(source_form) == "torch" else in_torch(leaves)


@pytest.mark.parametrize(("source_form", "target_form"), list(itertools.product(FORMS, [*FORMS, *ABSTRACT])))
def test_every_form_travels_to_every_form(source_form, target_form):
    source, target = make(source_form, "source"), make(target_form, "target")
    wanted, source_before, target_before = expected(source, source_form, target_form), snapshot(source), snapshot(target)
    assert wanted != arrays_only(target_before)
    done = parity.transfer(source, target)
    assert arrays_only(snapshot(done.value)) == wanted
    assert snapshot(source) == source_before
    assert len(done.plan) == len(wanted)
    if target_form in ("torch", "flax", "abstract"):
        assert done.value is target
    else:
        assert done.value is not target
        assert snapshot(target) == target_before
    assert done.passed, str(done)


@pytest.mark.parametrize("target_form", ABSTRACT)
def test_an_abstract_target_gets_random_state_of_its_own(target_form):
    value = parity.transfer(make("torch", "source"), make(target_form)).value
    state = snapshot(value)
    keys = [leaf for path, leaf in state.items() if path.endswith("rngs.key")]
    assert len(keys) == 2
    assert keys[0] != keys[1], "both dropout layers would draw the same mask"
    assert all(data != b"abstract" for _, _, data in state.values())


def test_a_filled_abstract_dropout_runs():
    model = nnx.eval_shape(lambda: FlaxNet(nnx.Rngs(0)))
    parity.transfer(make("torch", "source"), model)
    dropped = model.layers[0].model.layers[2](jnp.ones((64,)))
    assert 0 < int((dropped == 0).sum()) < 64


@pytest.mark.parametrize("source_form", FORMS)
def test_random_state_of_the_target_stays(source_form):
    target = make("flax", "target")
    before = {p: leaf for p, leaf in snapshot(target).items() if ".rngs." in p}
    done = parity.transfer(make(source_form, "source"), target)
    assert {p: leaf for p, leaf in snapshot(target).items() if ".rngs." in p} == before
    assert set(before) <= set(done.random)


def test_a_tree_of_parameters_alone_is_enough():
    target = nnx.state(FlaxHolder(a=jnp.zeros(3), b=nnx.BatchStat(jnp.zeros(2))), nnx.Param)
    value = parity.transfer({"a": torch.arange(3.0)}, target).value
    assert snapshot(value) == {"a": bits(torch.arange(3.0))}


def test_the_state_of_plain_arrays_travels():
    value = parity.transfer({"a.weight": torch.arange(6.0).view(2, 3)}, nnx.State({"a": {"kernel": jnp.zeros((3, 2))}})).value
    assert snapshot(value)["a.kernel"] == bits(torch.arange(6.0).view(2, 3).T)


def test_a_parameter_that_stays_behind_in_a_tree_is_a_copy():
    model = FlaxHolder(a=jnp.zeros(3), b=jnp.ones(2))
    value = parity.transfer({"a": torch.arange(3.0)}, nnx.state(model), ignore="b").value
    value["b"].set_value(jnp.full(2, 9.0))
    assert model.b[...].tolist() == [1, 1]


def test_a_kernel_of_a_layer_without_rule_keeps_its_layout_in_every_form():
    tensor = torch.arange(9.0).view(3, 3)
    for source in (Holder(kernel=tensor), {"kernel": tensor}):
        for target in (FlaxHolder(kernel=jnp.zeros((3, 3))), nnx.state(FlaxHolder(kernel=jnp.zeros((3, 3))))):
            assert snapshot(parity.transfer(source, target).value)["kernel"] == bits(tensor)


def test_a_renamed_square_weight_has_one_layout_from_module_and_tree():
    tensor = torch.arange(9.0).view(3, 3)
    found = [
        parity.transfer(source, nnx.Linear(3, 3, use_bias=False, rngs=rngs()), rename={"w": "kernel"}).plan[0].layout
        for source in (Holder(w=tensor), {"w": tensor})
    ]
    assert found == ["transposed", "transposed"]


@pytest.mark.parametrize("kind", [nnx.Variable, nnx.BatchStat, nnx.Cache])
def test_a_buffer_travels_to_any_kind_of_variable(kind):
    source, target = Holder(buffers=("b",), b=torch.arange(3.0)), FlaxHolder(b=kind(jnp.zeros(3)))
    parity.transfer(source, target)
    assert type(target.b) is kind
    back = Holder(buffers=("b",), b=torch.zeros(3))
    parity.transfer(target, back)
    assert snapshot(back) == snapshot(source)


def test_a_python_number_in_a_variable_is_an_array():
    target = FlaxHolder(n=nnx.Variable(3))
    parity.transfer(Holder(n=torch.tensor(5, dtype=torch.int32)), target)
    assert int(target.n[...]) == 5
    back = Holder(n=torch.tensor(0, dtype=torch.int32))
    parity.transfer(FlaxHolder(n=nnx.Variable(7)), back)
    assert int(back.n) == 7


def test_a_cyclic_flax_module_travels():
    target = flax_net()
    target.parent = target
    source = make("torch", "source")
    parity.transfer(source, target)
    assert bits(target.embed.embedding[...]) == snapshot(source)["embed.weight"]


def test_names_that_end_in_digits_and_layers_inside_layers():
    source = nn.ModuleDict({"layer1": nn.Linear(2, 3), "layers": nn.Sequential(nn.Linear(3, 2))})
    target = nnx.Dict(layer1=nnx.Linear(2, 3, rngs=rngs()), layers=nnx.Sequential(nnx.Linear(3, 2, rngs=rngs())))
    for one in (target, nnx.state(target)):
        done = parity.transfer(scramble(source, "digits"), one)
        assert {e.source: e.target for e in done.plan}["layers.0.weight"] == "layers.layers.0.kernel"
        assert snapshot(done.value)["layers.layers.0.kernel"] == transposed(snapshot(source)["layers.0.weight"])


def test_a_parametrization_that_was_removed_leaves_no_trace():
    source = nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))
    nn.utils.parametrize.remove_parametrizations(source, "weight")
    assert parity.transfer(source, nnx.Linear(5, 3, rngs=rngs())).passed


@pytest.mark.parametrize("stored", ["transposed", "every second column", "offset by one", "expanded"])
@pytest.mark.parametrize("copy", [True, False])
def test_a_source_may_lie_in_memory_as_it_likes(stored, copy):
    whole = to_tensor(any_bits(np.random.default_rng(1), (8, 8), "float32"), "float32")
    tensor = {
        "transposed": whole[:5, :3].clone().T,
        "every second column": whole[:3, :5:2].T[:, ::2],
        "offset by one": whole.reshape(-1)[1:16].view(3, 5),
        "expanded": whole[:1, :5].expand(3, 5),
    }[stored]
    source = Holder(weight=tensor)
    target = FlaxHolder(weight=jnp.zeros(tuple(tensor.shape)))
    parity.transfer(source, target, copy=copy)
    assert bits(target.weight[...]) == bits(tensor)


# ---------------------------------------------------------------- dtypes


def wide(dtype: str) -> Any:
    return jax.enable_x64(True) if "64" in dtype or dtype == "complex128" else contextlib.nullcontext()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("copy", [True, False])
def test_every_bit_of_a_model_survives(dtype, copy):
    with wide(dtype):
        source, target = make("torch", "dtypes", dtype=dtype), make("flax", "dtypes", dtype=dtype)
        before = snapshot(source)
        parity.transfer(source, target, copy=copy)
        assert arrays_only(snapshot(target)) == in_flax(before)
        back = make("torch", "dtypes back", dtype=dtype)
        parity.transfer(target, back, copy=copy)
        assert snapshot(back) == before


OTHERS = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
EIGHTS = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]


@pytest.mark.parametrize("dtype", OTHERS)
def test_integers_and_booleans_survive(dtype):
    with wide(dtype):
        array = any_bits(np.random.default_rng(2), (3, 5), dtype)
        tensor = torch.from_numpy(array.copy())
        target = FlaxHolder(a=nnx.Variable(jnp.zeros((3, 5), dtype)))
        parity.transfer(Holder(a=tensor), target)
        assert bits(target.a[...]) == bits(tensor)
        back = Holder(a=torch.zeros_like(tensor))
        parity.transfer(target, back)
        assert bits(back.a) == bits(tensor)


@pytest.mark.parametrize("dtype", EIGHTS)
def test_eight_bit_floats_survive(dtype):
    tensor = torch.arange(15, dtype=torch.uint8).view(3, 5).view(getattr(torch, dtype))
    target = FlaxHolder(a=nnx.Variable(jnp.zeros((3, 5), dtype)))
    parity.transfer({"a": tensor}, target)
    assert np.asarray(target.a[...]).view(np.uint8).tolist() == tensor.view(torch.uint8).tolist()
    back = {"a": torch.zeros(3, 5, dtype=torch.uint8).view(getattr(torch, dtype))}
    assert torch.equal(parity.transfer(target, back).value["a"].view(torch.uint8), tensor.view(torch.uint8))


class Twice(nnx.Param):
    """Holds twice what it is given."""

    def set_value(self, value, **options):
        super().set_value(value * 2, **options)

    def get_value(self, **options):
        return super().get_value(**options) / 2


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("make", [Twice, lambda array: nnx.Param(array, ref=True)], ids=["own", "reference"])
def test_a_variable_takes_and_gives_its_array_through_its_own_methods(make, copy):
    tensor, variable = torch.arange(1.0, 7.0).view(2, 3), make(jnp.zeros((2, 3)))
    held = variable.get_raw_value()
    target = FlaxHolder(a=variable)
    parity.transfer({"a": tensor}, target, copy=copy)
    factor = 2 if make is Twice else 1
    assert np.array_equal(np.asarray(variable.get_raw_value()[...]), factor * tensor.numpy())
    # A reference is written into, an array is replaced.
    assert (variable.get_raw_value() is held) is not isinstance(held, jax.Array)
    assert torch.equal(parity.transfer(target, {"a": torch.zeros(2, 3)}, copy=copy).value["a"], tensor)


def test_complex_numbers_survive_conjugated_or_not():
    tensor = torch.complex(torch.arange(6.0), -torch.arange(6.0)).view(2, 3)
    for source, copy in itertools.product((tensor, tensor.conj()), (True, False)):
        target = FlaxHolder(a=jnp.zeros((2, 3), jnp.complex64))
        parity.transfer({"a": source}, target, copy=copy)
        assert np.array_equal(np.asarray(target.a[...]), source.resolve_conj().numpy())


@pytest.mark.parametrize(
    ("cast", "dtype"), [("target", "bfloat16"), ("source", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16")]
)
def test_a_cast_rounds_once_to_nearest(cast, dtype):
    tensor = torch.from_numpy(np.random.default_rng(3).standard_normal((3, 5)).astype(np.float32))
    target = FlaxHolder(a=jnp.zeros((3, 5), jnp.bfloat16))
    done = parity.transfer(Holder(a=tensor), target, cast=cast)
    assert bits(target.a[...]) == bits(tensor.to(getattr(torch, dtype)))
    assert (done.plan[0].dtype, done.plan[0].target_dtype) == ("float32", dtype)
    assert done.plan[0].bytes == 15 * numpy_dtype(dtype).itemsize


@pytest.mark.parametrize(("cast", "dtype"), [("target", "float32"), ("source", "bfloat16"), ("float16", "float16")])
def test_a_cast_on_the_way_to_torch_keeps_the_parameter(cast, dtype):
    array = jnp.asarray(np.random.default_rng(4).standard_normal((3, 5)), jnp.bfloat16)
    target = Holder(a=torch.zeros(3, 5))
    parameter = target.a
    parity.transfer(FlaxHolder(a=array), target, cast=cast)
    assert target.a is parameter
    assert bits(target.a) == bits(array.astype(dtype))


def test_nan_and_infinity_pass_through_a_cast():
    tensor = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1.5])
    target = FlaxHolder(a=jnp.zeros(5, jnp.bfloat16))
    parity.transfer(Holder(a=tensor), target, cast="target")
    got = np.asarray(target.a[...]).astype(np.float32)
    np.testing.assert_array_equal(got, tensor.numpy())
    assert np.signbit(got[3])


def test_integers_follow_a_cast_to_the_target_only():
    source = Holder(n=torch.tensor([1, -5]), w=torch.tensor([1.5], dtype=torch.float64))
    target = FlaxHolder(n=nnx.Variable(jnp.zeros(2, jnp.int32)), w=jnp.zeros(1))
    parity.transfer(source, target, cast="target")
    assert bits(target.n[...]) == bits(torch.tensor([1, -5], dtype=torch.int32))
    assert bits(target.w[...]) == bits(torch.tensor([1.5]))
