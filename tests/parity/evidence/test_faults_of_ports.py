"""Faults of ports of image models, recurrent nets and whole models: the module exactly, and the cause first."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from evidence_pairs import draw, normal
from fault_pairs import held
from flax import nnx
from other_port_pairs import NEVER_OTHERS, OTHERS, QUICK_OTHERS
from port_fault_pairs import NEVER, PORTS, QUICK, STRANGERS
from torch import nn

import parity

EVERY, OFTEN, UNSAID = [*PORTS, *OTHERS], (*QUICK, *QUICK_OTHERS), {**NEVER, **NEVER_OTHERS}


@pytest.mark.parametrize(
    "planted",
    [pytest.param(one, id=one.name, marks=[] if one.name in OFTEN else [pytest.mark.slow]) for one in EVERY],
)
def test_the_planted_cause_is_named_first_and_no_neighbour(planted):
    found = parity.diagnose(*planted.pair(), *planted.inputs, **dict(planted.options))
    assert [fault.path for fault in found.isolation.faults] == [planted.path], str(found)
    assert found.causes, str(found)
    first = found.causes[0]
    assert (first.hypothesis, first.path) == (planted.cause, planted.path), str(found)
    assert planted.says in f"{first.what}; {first.change}", str(found)
    assert not {cause.hypothesis for cause in found.causes} & set(UNSAID.get(planted.name, ())), str(found)
    assert not found.notes and not found.unexplained, str(found)


@pytest.mark.slow
@pytest.mark.parametrize(("planted", "never"), STRANGERS, ids=lambda one: getattr(one, "name", one))
def test_a_fault_beside_it_gets_its_own_name(planted, never):
    found = parity.diagnose(*planted.pair(), *planted.inputs)
    assert found.causes[0].hypothesis == planted.cause, str(found)
    assert never not in {cause.hypothesis for cause in found.causes}, str(found)


def test_every_name_that_must_not_be_given_belongs_to_a_pair():
    assert UNSAID.keys() | set(OFTEN) <= {one.name for one in EVERY}


# --------------------------------------------------------------- modules that cannot answer as torch's did


class TorchSlid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slide, self.out = nn.Conv1d(4, 4, 3, dilation=2, padding=2), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.slide(x)[:, :, -5:].transpose(1, 2))


class FlaxSlid(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        # Without the dilation its output is longer by two.
        self.slide, self.out = nnx.Conv(4, 4, (3,), padding=2, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.slide(x.swapaxes(1, 2))[:, -5:])


def test_a_module_is_not_blamed_for_an_answer_of_another_shape():
    theirs, mine = draw(TorchSlid(), "slid"), FlaxSlid(nnx.Rngs(0))
    parity.transfer(theirs, mine)
    found = parity.diagnose(theirs, mine, normal(2, 4, 7))
    assert [fault.path for fault in found.isolation.faults] == ["slide"], str(found)
    assert found.causes[0].hypothesis == "convolution" and "dilation of 1" in found.causes[0].what, str(found)


# --------------------------------------------------------------- numbers of Python's in a float64 run


def angles(x: Any) -> Any:
    """Flax's side asks for float32, and meets numbers of Python's that have no dtype of their own."""
    return jnp.cos(x * (jnp.arange(8, dtype=jnp.float32) + 0.5) / 8)


@pytest.mark.parametrize(
    ("right", "same", "shape"),
    [
        (lambda x: (x * (torch.arange(8) + 0.5) / 8).cos(), angles, (3, 4, 8)),
        (
            lambda x: F.interpolate(x, size=(12, 10), mode="nearest"),
            lambda x: jax.image.resize(x, (2, 4, 12, 10), "nearest"),
            (2, 4, 6, 5),
        ),
    ],
    ids=["angles", "resize"],
)
def test_a_model_that_asks_for_float32_runs_in_float64(right, same, shape):
    found = parity.diagnose(*held(right, same, "asks"), normal(*shape))
    assert found.passed and not found.isolation.unpaired, str(found)
