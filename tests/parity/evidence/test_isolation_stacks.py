"""Layers whose arrays a Flax model stacks and scans over: each turn is run alone, although the scan shows no call of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

import parity
from parity.evidence.calls import Call
from parity.frameworks import load
from parity.frameworks.nnx import isolation as room

WIDTH, HIDDEN, LAYERS = 6, 10, 3
STACK = {"blocks.{i}": "blocks[{i}]"}


class TorchBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class TorchNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([TorchBlock() for _ in range(LAYERS)])
        self.out = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class FlaxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, fault: str = ""):
        epsilon = 1e-3 if fault == "epsilon" else 1e-5
        self.norm = nnx.LayerNorm(WIDTH, epsilon=epsilon, use_fast_variance=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)
        self.dropout, self.fault = nnx.Dropout(0.1, rngs=rngs), fault

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.up(jax.lax.stop_gradient(self.norm(x)) if self.fault == "stopped" else self.norm(x))
        return x + self.dropout(self.down(nnx.gelu(y, approximate=self.fault == "tanh")))


def stack(rngs: nnx.Rngs, fault: str, axis: int = 0) -> Any:
    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap(in_axes=(0,), out_axes=nnx.StateAxes({nnx.Param: axis, ...: 0}))
    def made(rngs: nnx.Rngs) -> FlaxBlock:
        return FlaxBlock(rngs, fault)

    return made(rngs)


class FlaxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, fault: str = "", axis: int = 0):
        self.blocks, self.out = stack(rngs, fault, axis), nnx.Linear(WIDTH, 5, rngs=rngs)
        self.fault, self.axis = fault, axis

    def __call__(self, x: jax.Array) -> jax.Array:
        axes = nnx.StateAxes({nnx.Param: self.axis, ...: 0})

        @nnx.scan(in_axes=(nnx.Carry, axes), out_axes=nnx.Carry, reverse=self.fault == "reverse")
        def run(x: jax.Array, block: FlaxBlock) -> jax.Array:
            return block(x)

        return self.out(run(x, self.blocks))


class BySplitting(FlaxNet):
    """Scans over the arrays themselves."""

    def __call__(self, x: jax.Array) -> jax.Array:
        graphdef, state = nnx.split(self.blocks)
        return self.out(jax.lax.scan(lambda x, arrays: (nnx.merge(graphdef, arrays)(x), None), x, state)[0])


def nets(fault: str = "", kind: type[FlaxNet] = FlaxNet) -> tuple[nn.Module, nnx.Module, torch.Tensor]:
    torch.manual_seed(0)
    mine, theirs = TorchNet().eval(), kind(nnx.Rngs(0), fault)
    with torch.no_grad():
        for parameter in mine.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.eval()
    parity.transfer(mine, theirs, rename=STACK)
    return mine, theirs, torch.randn(2, 4, WIDTH)


def isolated(mine: nn.Module, theirs: nnx.Module, x: torch.Tensor) -> Any:
    return parity.trace(mine, theirs, x, rename=STACK).isolated()


@pytest.mark.parametrize("kind", [FlaxNet, BySplitting])
def test_every_turn_is_run_alone_and_agrees(kind: type[FlaxNet]) -> None:
    mine, theirs, x = nets(kind=kind)
    before = jax.tree.map(np.array, nnx.state(theirs, nnx.Param))
    assert parity.compare(mine, theirs, x, rename=STACK).passed
    found = isolated(mine, theirs, x)
    assert found.passed and not found.unpaired
    pairs = {one.path: (one.flax_path, one.decided_by) for one in found.modules}
    assert pairs["blocks.1"] == ("blocks[1]", "plan")
    assert pairs["blocks.2.norm"] == ("blocks.norm[2]", "plan")
    # Dropout holds no array by which the plan would know it.
    assert len(pairs) == LAYERS * 4 + 2
    jax.tree.map(np.testing.assert_array_equal, nnx.state(theirs, nnx.Param), before)


FAULTS = [("epsilon", FlaxNet, "blocks.{}.norm", "epsilon"), ("tanh", BySplitting, "blocks.{}", "activation")]


@pytest.mark.parametrize(("fault", "kind", "module", "hypothesis"), FAULTS)
def test_a_fault_of_the_code_is_found_in_every_turn(fault: str, kind: type[FlaxNet], module: str, hypothesis: str) -> None:
    diagnosis = parity.diagnose(*nets(fault, kind), rename=STACK)
    paths = [module.format(number) for number in range(LAYERS)]
    assert [one.path for one in diagnosis.isolation.faults] == paths
    for path in paths:
        assert diagnosis.causes_of(path)[0].hypothesis == hypothesis, path


def test_wrong_numbers_of_one_turn_are_found_in_it_alone() -> None:
    mine, theirs, x = nets()
    kernel = theirs.blocks.up.kernel
    kernel[...] = kernel[...].at[1].set(kernel[1].T.reshape(kernel.shape[1:]))
    diagnosis = parity.diagnose(mine, theirs, x, rename=STACK)
    assert [one.path for one in diagnosis.isolation.faults] == ["blocks.1.up"]
    assert "reshape" in str(diagnosis.causes_of("blocks.1.up")[0])


def test_a_scan_in_the_wrong_order_is_the_fault_of_who_scans() -> None:
    found = isolated(*nets("reverse"))
    assert [one.path for one in found.faults] == [""]
    assert {one.status for one in found.modules if one.path} == {"agrees"}


def test_a_gradient_that_a_turn_stops_is_found_in_it() -> None:
    report = parity.compare(*nets("stopped"), rename=STACK)
    assert report.level("identical").status == "passed" and report.level("gradients").status == "failed"
    assert {one.path for one in report.backward.faults} == {f"blocks.{number}" for number in range(LAYERS)}


def test_arrays_that_are_stacked_on_another_axis_are_left_out_and_said_so() -> None:
    torch.manual_seed(0)
    mine, theirs = TorchNet().eval(), FlaxNet(nnx.Rngs(0), "tanh", axis=-1)
    theirs.eval()
    rename = {
        f"blocks.{{i}}.{a}": f"blocks.{b}[..., {{i}}]" for a, b in [("norm.weight", "norm.scale"), ("norm.bias", "norm.bias")]
    }
    rename |= {f"blocks.{{i}}.{n}.weight": f"blocks.{n}.kernel[:, :, {{i}}] | transposed" for n in ("up", "down")}
    rename |= {f"blocks.{{i}}.{n}.bias": f"blocks.{n}.bias[:, {{i}}]" for n in ("up", "down")}
    rename |= {f"blocks.{{i}}.norm.{a}": f"blocks.norm.{b}[:, {{i}}]" for a, b in [("weight", "scale"), ("bias", "bias")]}
    parity.transfer(mine, theirs, rename=rename)
    found = parity.trace(mine, theirs, torch.randn(2, 4, WIDTH), rename=rename).isolated()
    assert [one.path for one in found.faults] == [""]
    assert any(text.startswith("blocks.0.norm") for text in found.unpaired)


class TorchPacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x) @ self.k(x).mT


class Both(nnx.Module):
    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.zeros((2, HIDDEN, WIDTH)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum("bld,khd->kblh", x, self.weight[...])


class FlaxPacked(nnx.Module):
    def __init__(self) -> None:
        self.qk = Both()

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k = self.qk(x)
        return 2 * q @ k.mT


def test_a_layer_that_holds_two_of_torchs_as_one_is_no_stack() -> None:
    torch.manual_seed(0)
    mine, theirs = TorchPacked().eval(), FlaxPacked()
    rename = {"q": "qk[0]", "k": "qk[1]"}
    parity.transfer(mine, theirs, rename=rename)
    found = parity.trace(mine, theirs, torch.randn(2, 4, WIDTH), rename=rename).isolated()
    assert [one.path for one in found.faults] == [""]
    assert {one.path for one in found.modules} == {""}


def test_one_turn_holds_its_arrays_bit_for_bit_and_goes_back_to_its_place() -> None:
    _, theirs, _ = nets()
    for turn in range(LAYERS):
        one = room.one_turn(theirs.blocks, turn)
        for name in ("norm.scale", "up.kernel", "down.bias"):
            layer, _, array = name.partition(".")
            whole = np.asarray(getattr(getattr(theirs.blocks, layer), array)[...])
            mine = np.asarray(getattr(getattr(one, layer), array)[...])
            np.testing.assert_array_equal(mine, whole[turn], strict=True)
            back = room.among(mine, turn, LAYERS)
            np.testing.assert_array_equal(back[turn], mine)
            assert not np.delete(back, turn, 0).any()


def test_what_is_no_stack_of_that_many_is_none() -> None:
    _, theirs, _ = nets()
    assert room.stacked(theirs, "blocks", LAYERS) and not room.stacked(theirs, "blocks", LAYERS + 1)
    assert not room.stacked(theirs, "out", LAYERS)


def test_a_turn_alone_is_what_the_scan_does_with_it() -> None:
    _, theirs, x = nets()
    given = np.asarray(x)
    for turn in range(LAYERS):
        alone = load("nnx").alone(theirs, f"blocks[{turn}]", (given,), {}, dtype=None)
        expected = room.one_turn(theirs.blocks, turn)(jnp.asarray(given))
        np.testing.assert_allclose(alone.outputs[""], np.asarray(expected), rtol=2e-6, atol=2e-6)
        pulled = load("nnx").pulled_back(
            theirs, f"blocks.up[{turn}]", Call((given,)), {"": np.ones((2, 4, HIDDEN), np.float32)}
        )
        gradient = pulled.gradients["blocks.up.kernel"]
        assert gradient.shape == (LAYERS, WIDTH, HIDDEN)
        np.testing.assert_allclose(
            gradient[turn], np.repeat(given.sum((0, 1), dtype=np.float64)[:, None], HIDDEN, 1), rtol=1e-6
        )
        assert not np.delete(gradient, turn, 0).any()
