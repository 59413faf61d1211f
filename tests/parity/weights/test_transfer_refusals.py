"""What transfer refuses, in which words, and that nothing has been written then."""

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn
from transfer_helpers import FlaxHolder, Holder, TorchNet, flax_net, rngs, scramble, snapshot

import parity
from parity import InputError, MissingFrameworkError, TransferError


def flax_linear(rows: int = 3, columns: int = 5, **options: Any) -> nnx.Linear:
    return nnx.Linear(rows, columns, rngs=rngs(), **options)


def abstract_linear() -> nnx.Linear:
    return nnx.eval_shape(lambda: nnx.Linear(3, 5, rngs=nnx.Rngs(0)))


def meta_linear() -> nn.Linear:
    return nn.Linear(3, 5, device="meta")


def parametrized() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(3, 5))


def inference_linear() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(3, 5)


def wide(value: Any = 1.0) -> torch.Tensor:
    return torch.full((2,), value, dtype=torch.float64)


def no_values() -> FlaxHolder:
    return FlaxHolder(b=nnx.Variable({"inner": jnp.zeros(2)}))


def shared_flax() -> FlaxHolder:
    model = FlaxHolder(a=jnp.ones(2))
    model.b = model.a
    return model


# source, target, options, every sentence that must stand in the one error.
REFUSALS: dict[str, tuple[Callable[[], Any], Callable[[], Any], dict[str, Any], tuple[str, ...]]] = {
    "missing": (
        lambda: nn.Linear(3, 5, bias=False),
        flax_linear,
        {},
        ("bias (5,) of the target gets nothing from the source",),
    ),
    "missing-back": (
        lambda: flax_linear(use_bias=False),
        lambda: nn.Linear(3, 5),
        {},
        ("bias (5,) of the target gets nothing from the source",),
    ),
    "unexpected": (
        lambda: nn.Linear(3, 5),
        lambda: flax_linear(use_bias=False),
        {},
        ("bias (5,) of the source has no counterpart in the target",),
    ),
    "unexpected-back": (
        flax_linear,
        lambda: nn.Linear(3, 5, bias=False),
        {},
        ("bias (5,) of the source has no counterpart in the target",),
    ),
    "shape": (
        lambda: nn.Linear(3, 5),
        lambda: flax_linear(4, 5),
        {},
        ("weight has shape (5, 3), so kernel must have (3, 5), but it has (4, 5)",),
    ),
    "shape-transposed": (
        lambda: nn.Linear(5, 3),
        flax_linear,
        {},
        ("weight has shape (3, 5), so kernel must have (5, 3), but it has (3, 5); Flax stores it transposed",),
    ),
    "shape-back": (
        lambda: flax_linear(4, 5),
        lambda: nn.Linear(3, 5),
        {},
        ("weight has shape (5, 3), so kernel must have (3, 5), but it has (4, 5)",),
    ),
    "shape-of-another-rank": (
        lambda: {"weight": torch.ones(2, 3, 4)},
        lambda: flax_linear(use_bias=False),
        {},
        ("weight has shape (2, 3, 4), so kernel must have 2 axes, but it has (3, 5)",),
    ),
    "shape-reversed-without-rule": (
        lambda: Holder(w=torch.ones(2, 3)),
        lambda: FlaxHolder(w=jnp.ones((3, 2))),
        {},
        ("the shapes are each other's reverse, but no rule says that this array is transposed",),
    ),
    "shape-same-framework": (
        lambda: nn.Linear(3, 5),
        lambda: nn.Linear(4, 5),
        {},
        ("weight has shape (5, 3), weight has (5, 4)",),
    ),
    "another-layer": (
        lambda: nn.ModuleDict({"a": nn.LayerNorm(5, bias=False)}),
        lambda: nnx.Dict(a=nnx.Embed(5, 1, rngs=rngs())),
        {},
        ("a.weight belongs to a torch.nn.LayerNorm and a.embedding to a flax.nnx.Embed", "is flax.nnx.LayerNorm"),
    ),
    "dtype": (
        lambda: nn.Linear(3, 5).to(torch.bfloat16),
        flax_linear,
        {},
        ('weight is bfloat16 and kernel float32; pass cast="target" to round, or cast="source"', "bias is bfloat16"),
    ),
    "kind-of-dtype": (
        lambda: Holder(n=torch.ones(2)),
        lambda: FlaxHolder(n=jnp.ones(2, jnp.int32)),
        {"cast": "target"},
        ("n is float32 and n int32; no cast leads from one to the other",),
    ),
    "kind-of-dtype-bool": (
        lambda: Holder(n=torch.ones(2, dtype=torch.bool)),
        lambda: FlaxHolder(n=jnp.ones(2, jnp.int8)),
        {"cast": "source"},
        ("n is bool and n int8; no cast leads",),
    ),
    "64-bit": (
        lambda: Holder(a=wide(), b=wide()),
        lambda: FlaxHolder(a=jnp.ones(2), b=jnp.ones(2)),
        {"cast": "source"},
        ("a, b would be cut from float64 to 32 bits, because jax runs without 64-bit types", 'cast="target"'),
    ),
    "64-bit-shared": (
        lambda: Holder(a=torch.ones(2), b=wide()),
        lambda: FlaxHolder(a=jnp.ones(2), b=jnp.ones(2)),
        {"cast": "source", "copy": False},
        ("b would be cut from float64",),
    ),
    "64-bit-many": (
        lambda: {f"p{i}": wide() for i in range(6)},
        lambda: FlaxHolder(**{f"p{i}": jnp.ones(2) for i in range(6)}),
        {"cast": "source"},
        ("p0, p1, p2, p3 and others would be cut",),
    ),
    "64-bit-integers": (
        lambda: Holder(n=torch.ones(2, dtype=torch.int64)),
        lambda: FlaxHolder(n=jnp.ones(2, jnp.int32)),
        {"cast": "float32"},
        ("n would be cut from int64",),
    ),
    "64-bit-complex": (
        lambda: Holder(z=torch.ones(2, dtype=torch.complex128)),
        lambda: FlaxHolder(z=jnp.ones(2, jnp.complex64)),
        {"cast": "source"},
        ("z would be cut from complex128",),
    ),
    "overflow": (
        lambda: Holder(a=torch.tensor([1.0, 7e4, -7e4, float("inf")])),
        lambda: FlaxHolder(a=jnp.ones(4)),
        {"cast": "float16"},
        ("2 values of a overflow float16",),
    ),
    "overflow-without-infinity": (
        lambda: Holder(a=torch.tensor([1.0, 1e6])),
        lambda: FlaxHolder(a=jnp.ones(2)),
        {"cast": "float8_e4m3fn"},
        ("1 values of a overflow float8_e4m3fn and would become infinite or NaN",),
    ),
    "overflow-transposed": (
        lambda: Holder(weight=torch.tensor([[1.0, 7e4], [2.0, 3.0], [4.0, 5.0]])),
        lambda: FlaxHolder(weight=jnp.ones((3, 2))),
        {"cast": "float16"},
        ("1 values of weight overflow float16",),
    ),
    "overflow-integers": (
        lambda: Holder(n=torch.tensor([1, 300])),
        lambda: FlaxHolder(n=jnp.ones(2, jnp.int8)),
        {"cast": "target"},
        ("1 values of n do not fit int8",),
    ),
    "meta-source": (meta_linear, flax_linear, {}, ("weight is on the meta device and holds no values", "bias is on the meta")),
    "meta-target": (
        flax_linear,
        meta_linear,
        {},
        ('weight of the target is on the meta device; call .to_empty(device="cpu")',),
    ),
    "abstract-source": (
        abstract_linear,
        lambda: nn.Linear(3, 5),
        {},
        ("kernel is abstract and holds no values; it can be a target of transfer, not a source", "bias is abstract"),
    ),
    "sparse-source": (
        lambda: Holder(buffers=("b",), b=torch.eye(3).to_sparse()),
        lambda: FlaxHolder(b=jnp.zeros((3, 3))),
        {},
        ("b is not dense, it has layout torch.sparse_coo",),
    ),
    "sparse-target": (
        lambda: FlaxHolder(b=jnp.zeros((3, 3))),
        lambda: Holder(buffers=("b",), b=torch.eye(3).to_sparse()),
        {},
        ("b of the target is not dense",),
    ),
    "expanded-target": (
        lambda: FlaxHolder(b=jnp.zeros((3, 4))),
        lambda: Holder(buffers=("b",), b=torch.ones(1, 4).expand(3, 4)),
        {},
        ("b of the target holds one element for several",),
    ),
    "inference-target": (flax_linear, inference_linear, {}, ("weight of the target was made in inference mode",)),
    "no-array-in-a-variable": (
        no_values,
        lambda: Holder(b=torch.ones(())),
        {},
        ("b holds a dict, not an array; leave it out with ignore",),
    ),
    "nothing-to-do": (nn.ReLU, nnx.Dict, {}, ("neither side has parameters that could travel",)),
    "both-lead-there": (
        lambda: {"a": torch.ones(2), "b": torch.zeros(2)},
        lambda: FlaxHolder(b=jnp.ones(2)),
        {"rename": {"a": "b"}},
        ("b and a both lead to b; rename one of them",),
    ),
    "ambiguous": (
        lambda: {"a.weight": torch.ones(2)},
        lambda: nnx.State({"a": {"kernel": jnp.ones(2), "scale": jnp.ones(2)}}),
        {},
        ("a.weight of the source fits several leaves of the target: a.kernel, a.scale; say which with rename",),
    ),
    "unused-rename": (
        lambda: nn.Linear(3, 5),
        flax_linear,
        {"rename": {"encoder.{i}": "blocks.{i}"}},
        ("rename key 'encoder.{i}' fits no name of the source",),
    ),
    "rename-to-nowhere": (
        lambda: nn.Linear(3, 5),
        flax_linear,
        {"rename": {"weight": "kernels"}},
        ("weight (5, 3) of the source has no counterpart in the target; nearest name: kernel",),
    ),
    "unused-ignore": (
        lambda: nn.Linear(3, 5),
        flax_linear,
        {"ignore": ("bais", "b*")},
        ("ignore pattern 'bais' fits no leaf of either side",),
    ),
    "parametrized": (
        parametrized,
        flax_linear,
        {},
        ("torch computes weight from parametrizations.weight.original0 and parametrizations", "remove_parametrizations"),
    ),
    "separate-into-tied": (
        lambda: {"a": torch.ones(2), "b": torch.zeros(2)},
        shared_flax,
        {},
        ("a and b are separate arrays in the source, but a and b are one array in the target",),
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_says_why_and_writes_nothing(name):
    make_source, make_target, options, sentences = REFUSALS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source, target = make_source(), make_target()
    readable = not any(word in name for word in ("sparse", "meta", "abstract", "no-array"))
    before = (snapshot(source), snapshot(target)) if readable else None
    with pytest.raises(TransferError) as error:
        parity.transfer(source, target, **options)
    for sentence in sentences:
        assert sentence in str(error.value)
    assert str(error.value).startswith("transfer refused, nothing was written")
    assert before is None or (snapshot(source), snapshot(target)) == before


def test_to_empty_makes_a_meta_target_fillable():
    target = meta_linear().to_empty(device="cpu")
    source = flax_linear()
    parity.transfer(source, target)
    assert np.array_equal(target.weight.detach().numpy(), np.asarray(source.kernel[...]).T)


def test_all_problems_come_in_one_error():
    source = nn.ModuleDict(
        {
            "shape": nn.Linear(2, 3, bias=False),
            "dtype": nn.Linear(2, 3, bias=False).double(),
            "stray": nn.Linear(1, 1, bias=False),
            "meta": nn.Linear(2, 2, bias=False, device="meta"),
        }
    )
    target = nnx.Dict(
        shape=nnx.Linear(4, 3, use_bias=False, rngs=rngs()),
        dtype=nnx.Linear(2, 3, use_bias=False, rngs=rngs()),
        lonely=nnx.Embed(9, 2, rngs=rngs()),
        meta=nnx.Linear(2, 2, use_bias=False, rngs=rngs()),
    )
    before = snapshot(target)
    with pytest.raises(TransferError) as error:
        parity.transfer(source, target, rename={"nowhere": "x"}, ignore=["nothing*"])
    starts = ("ignore pattern 'nothing*'", "shape.weight has", "stray.weight", "lonely.embedding", "rename key 'nowhere'")
    starts += ("dtype.weight is float64", "meta.weight is on the meta device", "dtype.kernel would be cut")
    assert len(error.value.problems) == len(starts)
    for start in starts:
        assert any(problem.startswith(start) for problem in error.value.problems), start
    assert "8 problems\n  - " in str(error.value)
    assert snapshot(target) == before


@pytest.mark.parametrize("cast", ["float16", "target"])
def test_one_overflow_among_many_leaves_leaves_all(cast):
    source, target = scramble(TorchNet(), "many"), scramble(flax_net(), "many", dtype="float16")
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.fill_(1.0)
        source.heads["right"].weight[3, 2] = 1e6
    before = snapshot(target)
    with pytest.raises(TransferError, match=r"1 values of heads\.right\.weight overflow float16"):
        parity.transfer(source, target, cast=cast)
    assert snapshot(target) == before


LAZY = r"0\.weight, 0\.bias of a lazy module has no shape yet; run the model once on an example first"


def test_a_lazy_module_is_refused_on_either_side():
    lazy, flax = nn.Sequential(nn.LazyLinear(5)), nnx.Sequential(flax_linear())
    for pair in ((lazy, flax), (flax, lazy)):
        with pytest.raises(InputError, match=LAZY):
            parity.transfer(*pair)
    lazy(torch.ones(1, 3))
    assert parity.transfer(lazy, flax).passed


# ---------------------------------------------------------------- nearest names


def test_the_nearest_names_are_the_likely_ones():
    source = nn.ModuleDict({"attention": nn.ModuleDict({k: nn.Linear(2, 2, bias=False) for k in ("query", "key", "value")})})
    target = nnx.Dict(
        attention=nnx.Dict(
            query=nnx.Linear(2, 2, use_bias=False, rngs=rngs()),
            keys=nnx.Linear(2, 2, use_bias=False, rngs=rngs()),
            values=nnx.Linear(2, 2, use_bias=False, rngs=rngs()),
        )
    )
    with pytest.raises(TransferError) as error:
        parity.transfer(source, target)
    for one, other in (("key.weight", "keys.kernel"), ("value.weight", "values.kernel")):
        assert f"attention.{one} (2, 2) of the source has no counterpart in the target; nearest name: attention.{other}" in str(
            error.value
        )
        assert f"attention.{other} (2, 2) of the target gets nothing from the source; nearest name: attention.{one}" in str(
            error.value
        )


def test_nothing_alike_gives_no_suggestion():
    with pytest.raises(TransferError) as error:
        parity.transfer({"alpha": torch.ones(2)}, FlaxHolder(zz=jnp.ones(2)))
    assert "nearest" not in str(error.value)


# ---------------------------------------------------------------- wrong arguments

ARGUMENTS = {
    "class": (nn.Linear, "the class torch.nn.modules.linear.Linear itself; make an instance of it"),
    "flax-class": (nnx.Linear, "the class flax.nnx"),
    "none": (None, "got None"),
    "list": ([torch.ones(2)], "got list"),
    "tensor": (torch.ones(2), "got torch.Tensor"),
    "number": (3, "got int"),
    "empty-dict": ({}, "got dict"),
    "checkpoint": ({"model": {"w": torch.ones(2)}, "epoch": 3}, "got a dict with 'model': "),
    "no-variables": ({"params": {"kernel": "text"}}, "got a dict with 'params': "),
    "numpy": ({"w": np.ones(2)}, "got a dict with 'w': numpy.ndarray first"),
    "optimizer": (torch.optim.SGD([torch.ones(1)], 0.1), "got torch.optim.sgd.SGD"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("role", ["source", "target"])
def test_a_wrong_kind_of_argument_is_named(name, role):
    value, words = ARGUMENTS[name]
    with pytest.raises(InputError) as error:
        parity.transfer(*((value, flax_linear()) if role == "source" else (flax_linear(), value)))
    assert str(error.value).startswith(f"{role} must be a torch.nn.Module, a state_dict, a flax.nnx.Module or an nnx.State")
    assert words in str(error.value)


@pytest.mark.parametrize("cast", ["int32", "floating", "float", "float128", "half", "", torch.float16, jnp.float32])
def test_a_cast_that_is_no_dtype_is_refused(cast):
    with pytest.raises(InputError, match=r'cast must be None, "target", "source" or the name of a floating point dtype, got'):
        parity.transfer(nn.Linear(3, 5), flax_linear(), cast=cast)


def test_transfer_inside_jit_is_refused():
    @jax.jit
    def run(kernel):
        parity.transfer(nnx.State({"w": kernel}), {"w": torch.ones(2)})

    with pytest.raises(TransferError, match="w is being traced and holds no values; call outside jit"):
        run(jnp.ones(2))


# ---------------------------------------------------------------- ignore


def test_ignored_leaves_stay_on_both_sides():
    source, target = scramble(nn.Linear(3, 5), "ignored"), flax_linear()
    before = snapshot(target)
    done = parity.transfer(source, target, ignore="bias")
    assert snapshot(target)["bias"] == before["bias"]
    assert snapshot(target)["kernel"] != before["kernel"]
    assert done.ignored == ("bias", "bias")


def test_ignore_takes_patterns_and_generators():
    source, target = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), nnx.Sequential(flax_linear())
    done = parity.transfer(source, target, ignore=(pattern for pattern in ["1.*"]))
    assert done.ignored == ("1.weight", "1.bias")
    assert [entry.source for entry in done.plan] == ["0.weight", "0.bias"]


# ---------------------------------------------------------------- a framework that is not installed


@pytest.mark.parametrize(("package", "extra"), [("torch", "torch"), ("flax", "flax")])
def test_a_missing_framework_is_named_with_the_way_to_get_it(monkeypatch, package, extra):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else found(name, *rest))
    with pytest.raises(MissingFrameworkError, match=rf"{package} is not installed; install it with: pip install .*\[{extra}\]"):
        parity.transfer(nn.Linear(3, 5), flax_linear())
