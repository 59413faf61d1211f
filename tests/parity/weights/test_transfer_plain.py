"""What a module holds besides parameters: plain arrays, lists and dicts of parameters, what runs leave behind, counts."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from helpers import random
from rule_cases import agree, rngs
from safetensors.torch import load_file
from torch import nn
from transfer_helpers import bits, snapshot

import parity


class Table(nn.Module):
    """A module of the user's own with a parameter and a table of constants."""

    def __init__(self, persistent: bool = True):
        super().__init__()
        self.w = nn.Parameter(torch.from_numpy(random("plain w").standard_normal(3).astype(np.float32)))
        self.register_buffer("table", torch.arange(6.0).reshape(2, 3) / 7, persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w + self.table


class FlaxTable(nnx.Module):
    def __init__(self, table: Any):
        self.w, self.table = nnx.Param(jnp.zeros(3)), table

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.w[...] + (self.table[...] if isinstance(self.table, nnx.Variable) else self.table)


@pytest.mark.parametrize("kind", [jnp.asarray, np.asarray, nnx.Variable, nnx.Param])
def test_a_buffer_travels_to_a_plain_array_too_and_back(kind):
    source, target = Table().eval(), FlaxTable(kind(jnp.zeros((2, 3))))
    done = parity.transfer(source, target)
    assert {entry.target for entry in done.plan} == {"w", "table"}
    assert bits(np.asarray(target.table[...])) == bits(source.table)
    agree(source, target, torch.ones(2, 3))
    back = Table()
    with torch.no_grad():
        back.table.zero_()
    parity.transfer(target, back)
    assert snapshot(back) == snapshot(source)
    with torch.no_grad():
        source.table.zero_()
    # A later write stays on its side.
    assert bits(np.asarray(target.table[...])) != bits(source.table)


def test_a_plain_array_of_another_shape_is_refused():
    with pytest.raises(
        parity.TransferError, match=r"table has shape \(2, 3\), so table must have \(2, 3\), but it has \(3, 2\)"
    ):
        parity.transfer(Table(), FlaxTable(jnp.zeros((3, 2))))


def test_a_plain_array_without_counterpart_stays_and_is_told_of():
    source, target = Table(persistent=False), FlaxTable(jnp.ones((2, 3)))
    for pair in ((source, target), (target, source)):
        done = parity.transfer(*pair)
        assert done.alone == (
            "table is an array in Flax but no nnx.Variable, and has no counterpart: it stays as it is; "
            "make it an nnx.Param or nnx.Variable if it is to travel",
        )
    assert float(target.table.sum()) == 6
    # A variable is never left out so.
    with pytest.raises(parity.TransferError, match=r"table \(2, 3\) of the target gets nothing from the source"):
        parity.transfer(source, FlaxTable(nnx.Variable(jnp.ones((2, 3)))))


def test_a_buffer_that_is_not_saved_is_named():
    with pytest.raises(parity.TransferError, match=r"torch has a buffer of that name that is not persistent"):
        parity.transfer(Table(persistent=False), FlaxTable(nnx.Variable(jnp.ones((2, 3)))))


def test_an_array_in_a_tuple_cannot_be_replaced():
    class Torch(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ParameterList([torch.ones(2), torch.ones(3)])

    class Flax(nnx.Module):
        def __init__(self):
            self.parts = nnx.data((jnp.zeros(2), jnp.zeros(3)))

    with pytest.raises(parity.TransferError, match=r"parts.0 of the target stands in a tuple, .* keep it in an nnx.List"):
        parity.transfer(Torch(), Flax())


LISTS = {
    "nnx.List": lambda: nnx.List([nnx.Param(jnp.zeros(2)), nnx.Param(jnp.zeros(3))]),
    "nnx.data": lambda: nnx.data([nnx.Param(jnp.zeros(2)), nnx.Param(jnp.zeros(3))]),
    "plain": lambda: nnx.data([jnp.zeros(2), jnp.zeros(3)]),
    "nnx.List of plain": lambda: nnx.List([jnp.zeros(2), jnp.zeros(3)]),
}
DICTS = {
    "nnx.Dict": lambda: nnx.Dict(a=nnx.Param(jnp.zeros(2)), b=nnx.Param(jnp.zeros(3))),
    "nnx.data": lambda: nnx.data({"a": nnx.Param(jnp.zeros(2)), "b": nnx.Param(jnp.zeros(3))}),
    "plain": lambda: nnx.data({"a": jnp.zeros(2), "b": jnp.zeros(3)}),
}


class TorchHolder(nn.Module):
    def __init__(self, parts: nn.Module):
        super().__init__()
        self.parts = parts


class FlaxHolder(nnx.Module):
    def __init__(self, parts: Any):
        self.parts = parts


@pytest.mark.parametrize(
    ("torch_parts", "make"),
    [
        *((lambda: nn.ParameterList([torch.arange(2.0), torch.arange(3.0)]), make) for make in LISTS.values()),
        *((lambda: nn.ParameterDict({"a": torch.arange(2.0), "b": torch.arange(3.0)}), make) for make in DICTS.values()),
    ],
    ids=[*LISTS, *(f"dict {name}" for name in DICTS)],
)
def test_lists_and_dicts_of_parameters_travel(torch_parts, make):
    source, target = TorchHolder(torch_parts()), FlaxHolder(make())
    parity.transfer(source, target)
    back = TorchHolder(torch_parts())
    with torch.no_grad():
        for p in back.parameters():
            p.zero_()
    parity.transfer(target, back)
    assert snapshot(back) == snapshot(source)
    first = target.parts[0] if "ParameterList" in type(source.parts).__name__ else target.parts["a"]
    assert np.asarray(first[...]).tolist() == [0, 1]


def test_a_key_is_no_array_of_the_model():
    class Keyed(nnx.Module):
        def __init__(self):
            self.w, self.key = nnx.Param(jnp.zeros(3)), jax.random.key(0)

    source = nn.Module()
    source.w = nn.Parameter(torch.ones(3))
    done = parity.transfer(source, Keyed())
    assert done.random == ("key",)
    assert done.alone == ()


@pytest.mark.parametrize("kind", [nnx.Intermediate, nnx.Perturbation])
def test_what_a_run_leaves_behind_never_travels(kind):
    source, target = Table(), FlaxTable(nnx.Variable(jnp.zeros((2, 3))))
    target.seen = kind(jnp.ones(3))
    for pair in ((source, target), (target, source), (target, FlaxTable(nnx.Variable(jnp.zeros((2, 3)))))):
        done = parity.transfer(*pair)
        assert done.random == ("seen",)
        assert "random state, and what runs leave behind, stays: 1 arrays" in str(done)


def test_metrics_never_travel():
    source, target = Table(), FlaxTable(nnx.Variable(jnp.zeros((2, 3))))
    target.loss = nnx.metrics.Average()
    assert parity.transfer(source, target).random == ("loss.total", "loss.count")


# ---------------------------------------------------------------- torch's count of batches


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.line = nn.BatchNorm2d(4), nn.Linear(4, 3)


class FlaxNormed(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(4, use_fast_variance=False, momentum=0.9, epsilon=1e-5, rngs=rngs())
        self.line = nnx.Linear(4, 3, rngs=rngs())


def safetensors_names(path: Path) -> list[str]:
    return list(load_file(path))


@pytest.mark.parametrize("like", [False, True])
@pytest.mark.parametrize("end", ["pt", "safetensors"])
def test_a_file_for_torch_can_be_loaded_strictly(tmp_path: Path, like, end):
    path = tmp_path / f"model.{end}"
    counted = Normed()
    counted.norm.num_batches_tracked.fill_(5)
    if end == "safetensors" and not like:
        # Without names of torch's the file has Flax's.
        parity.transfer(FlaxNormed(), path)
        assert "norm.num_batches_tracked" not in {
            entry.target for entry in parity.transfer(path, tmp_path / "copy.pt", like=Normed()).plan
        }
        return
    done = parity.transfer(FlaxNormed(), path, like=counted if like else None, verify=True)
    told = [sentence for sentence in done.alone if "num_batches_tracked" in sentence]
    assert told == [
        "norm.num_batches_tracked is filled with zeros: nnx.BatchNorm counts no batches; "
        "torch uses the count only where momentum is None"
    ]
    state = torch.load(path) if end == "pt" else load_file(path)
    assert state["norm.num_batches_tracked"].dtype == torch.int64
    assert state["norm.num_batches_tracked"].shape == ()
    assert int(state["norm.num_batches_tracked"]) == 0
    assert Normed().load_state_dict(state, strict=True).missing_keys == []


def test_a_rename_reaches_the_count(tmp_path: Path):
    parity.transfer(FlaxNormed(), tmp_path / "model.pt", rename={"bn": "norm"})
    assert "bn.num_batches_tracked" in torch.load(tmp_path / "model.pt")


def test_a_module_keeps_the_count_that_it_has():
    target = Normed()
    target.norm.num_batches_tracked.fill_(5)
    done = parity.transfer(FlaxNormed(), target)
    assert any(sentence.startswith("norm.num_batches_tracked stays as it is") for sentence in done.alone)
    assert int(target.norm.num_batches_tracked) == 5
