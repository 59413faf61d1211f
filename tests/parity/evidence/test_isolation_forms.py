"""Modules that answer in another form than torch's, which whoever calls them knows how to take, are no faults."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

import parity
from parity.evidence.trial import regrouped

HEADS, HEAD, WIDTH = 3, 4, 12


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-5)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.norm(q * k.tanh() + v + self.value(x))


class Ported(nnx.Module):
    """The fused projection is cut into three, and the values keep their heads apart."""

    def __init__(self, *, epsilon=1e-5, joined=True, rngs):
        self.query, self.key, self.third = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3))
        self.value = nnx.LinearGeneral(WIDTH, (HEADS, HEAD), rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, epsilon=epsilon, use_fast_variance=False, rngs=rngs)
        self.joined = joined

    def __call__(self, x):
        heads = self.value(x)
        heads = heads if self.joined else heads.swapaxes(-1, -2)
        return self.norm(self.query(x) * jnp.tanh(self.key(x)) + self.third(x) + heads.reshape(x.shape))


RENAME = {
    f"qkv.{name}[{start}:{start + WIDTH}]": f"{part}.{'kernel' if name == 'weight' else name}"
    for start, part in ((0, "query"), (WIDTH, "key"), (2 * WIDTH, "third"))
    for name in ("weight", "bias")
}


def isolated(**settings):
    torch.manual_seed(0)
    ours, theirs = Attention().eval(), Ported(**settings, rngs=nnx.Rngs(0))
    parity.transfer(ours, theirs, rename=RENAME)
    x = np.random.default_rng(0).standard_normal((2, 5, WIDTH), dtype=np.float32)
    return parity.trace(ours, theirs, x, rename=RENAME).isolated()


def test_heads_apart_and_a_projection_in_three_parts_are_no_faults():
    found = isolated()
    assert found.passed, str(found)


def test_beside_another_fault_they_are_not_blamed():
    assert [one.path for one in isolated(epsilon=1e-6).faults] == ["norm"]


def test_the_module_that_takes_the_form_wrongly_is_blamed():
    assert [one.path for one in isolated(joined=False).faults] == [""]


@pytest.mark.parametrize(
    ("mine", "theirs", "same"),
    [
        ((2, 5, 12), (2, 5, 3, 4), True),
        ((10, 12), (2, 5, 12), True),
        ((2, 5, 12), (2, 3, 5, 4), False),
        ((2, 5), (2, 1, 5), False),
        ((2, 6), (3, 2, 2), False),
        ((2, 5, 12), (2, 5, 12), False),
        ((4,), (), False),
    ],
)
def test_axes_are_joined_in_order_alone(mine, theirs, same):
    assert regrouped(np.zeros(mine), np.zeros(theirs)) is same
    assert regrouped(np.zeros(theirs), np.zeros(mine)) is same
