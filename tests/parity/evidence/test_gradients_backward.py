"""Gradients that differ though outputs agree: which is nearest the loss, which module is wrong alone, and why."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx
from torch import nn

import parity
from parity.frameworks import load

IDS = np.array([[1, 2, 3, 4], [5, 6, 2, 0]])


class Ours(nn.Module):
    """A table that is used twice, two blocks with a kink, and a parameter that nothing uses."""

    def __init__(self, padding_idx: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6, padding_idx=padding_idx)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 6)) for _ in range(2)])
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return x @ self.embed.weight.T


class Relu(nnx.Module):
    def __init__(self, leak: float):
        self.leak = leak

    def __call__(self, x: Any) -> Any:
        return nnx.relu(x) + self.leak * (x - jax.lax.stop_gradient(x))


class Theirs(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, leak: float = 0.0, use: int = -1, stopped: str = "") -> None:
        self.use, self.stopped = use, stopped
        self.embed, self.idle = nnx.Embed(7, 6, rngs=rngs), nnx.Param(jnp.zeros(3))
        self.blocks = nnx.List(
            nnx.Sequential(nnx.Linear(6, 5, rngs=rngs), Relu(leak * n), nnx.Linear(5, 6, rngs=rngs)) for n in range(2)
        )

    def __call__(self, ids: Any) -> Any:
        tables = [self.embed.embedding[...]] * 2
        if self.use >= 0:
            tables[1 - self.use] = jax.lax.stop_gradient(tables[1 - self.use])
        x = tables[0][ids]
        for number, block in enumerate(self.blocks):
            inside = block(x)
            x = x + (jax.lax.stop_gradient(inside) if self.stopped == str(number) else inside)
        return x @ tables[1].T


def compared(padding_idx: int | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    ours, theirs = Ours(padding_idx).eval(), Theirs(nnx.Rngs(0), **options)
    with torch.no_grad():
        ours.embed.weight.normal_()
    parity.transfer(ours, theirs)
    return parity.compare(ours, theirs, IDS, levels=["identical", "gradients"])


def test_a_module_that_is_wrong_backwards_is_found_alone_and_the_gradient_nearest_the_loss_comes_first():
    report = compared(leak=0.1)
    assert report.level("identical").passed and report.diagnosis.passed
    # Of the second block all but its last layer, which is nearer the loss than the fault; then everything before.
    found = [finding.where for finding in report.level("gradients").findings]
    assert found[:2] == ["gradient of blocks.1.0.bias", "gradient of blocks.1.0.weight"]
    assert {*found[2:]} == {
        f"gradient of {name}"
        for name in ("blocks.0.0.bias", "blocks.0.0.weight", "blocks.0.2.bias", "blocks.0.2.weight", "embed.weight")
    }
    assert [one.path for one in report.backward.faults] == ["blocks.1.1"]
    assert report.backward.faults[0].differences[0].where == "gradient of input args[0]"
    follows = {one.path for one in report.backward.modules if one.status == "follows"}
    assert follows == {"", "blocks.1"}
    assert "blocks.1.1   gradient of input args[0]:" in str(report)


CAUSES: dict[str, tuple[dict[str, Any], str, str]] = {
    "lookup alone": (dict(use=0), "embed.weight", "used 2 times, and Flax's gradient is that of use 1 alone"),
    "projection alone": (dict(use=1), "embed.weight", "used 2 times, and Flax's gradient is that of use 2 alone"),
    "padding row": (dict(padding_idx=2), "embed.weight", "row 2 is torch's padding_idx=2, to which a lookup gives no gradient"),
    "stopped": (dict(stopped="1"), "blocks.1.2.bias", "Flax has a gradient of 0: something stops it"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_gradient_that_differs_tells_why(name):
    options, path, says = CAUSES[name]
    first = compared(**options).level("gradients").findings[0]
    assert first.where == f"gradient of {path}" and says in first.what


def test_what_nothing_uses_and_what_is_tied_agrees():
    report = compared()
    assert report.passed and report.backward is None and report.level("gradients").figures["elements"] == 187


def test_the_uses_of_a_parameter_add_up_to_its_gradient():
    room = load("torch")
    torch.manual_seed(0)
    model, call = Ours().eval(), parity.evidence.calls.Call((IDS[:1],))
    cotangents = {"": np.ones((1, 4, 7), np.float32)}
    uses = room.gradients_by_use(model, call, cotangents, "embed.weight", dtype="float64")
    whole = room.evaluate(model, call, dtype="float64", cotangents=cotangents).gradients["embed.weight"]
    assert len(uses) == 2
    np.testing.assert_allclose(sum(uses), whole, rtol=1e-12)
    # A row that is not looked up has a gradient by the projection alone.
    assert not uses[0].any(axis=1).all() and uses[1].any(axis=1).all()
    assert room.observe_backward(model, call, cotangents, dtype="float64").order[-1] == "embed.weight"


class Wrong(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.relu(x) + 0.1 * (x - jax.lax.stop_gradient(x))


class Small(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(2, name="last")(Wrong(name="act")(linen.Dense(4, name="first")(x)))


def test_linen_modules_run_backwards_alone_too():
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.act, self.last = nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)

        def forward(self, x: Any) -> Any:
            return self.last(self.act(self.first(x)))

    torch.manual_seed(0)
    ours, x = Mine().eval(), np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    theirs = parity.transfer(ours, parity.Linen(Small(), None, x)).value
    report = parity.compare(ours, theirs, x, levels=["gradients"])
    assert [one.path for one in report.backward.faults] == ["act"], str(report)
