"""Inside a wrong module the first operation that differs is named, with the line of the user's code on each side."""

import json
import linecache
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from evidence_pairs import block, draw, low_variance, normal
from fault_pairs import FlaxStage, TorchStage, held
from flax import linen, nnx
from torch import nn

import parity
from parity.evidence import operations
from parity.evidence.fingerprints import apart, comparable, fingerprint, same_layout
from parity.evidence.tape import Tape, TooLongError

X, Y = normal(3, 4, 8), normal(3, 4, 8, name="y")
QKV = tuple(normal(3, 2, 5, 4, name=name) for name in "qkv")
HIDDEN = np.zeros((3, 1, 1, 5), bool)
HIDDEN[0, ..., 3:] = HIDDEN[1, ..., 1] = HIDDEN[2, ..., 0] = True
IMAGE, KERNEL = normal(2, 3, 6, 8), normal(4, 3, 3, 3, name="kernel")


# ---------------------------------------------------------------- the two sides, a statement for each operation


def torch_attend(q, k, v, hidden):
    scores = q @ k.transpose(-2, -1)
    scaled = scores / math.sqrt(q.shape[-1])
    masked = scaled.masked_fill(hidden, float("-inf"))
    weights = torch.softmax(masked, -1)
    return weights @ v


def flax_attend(fault):
    def attend(q, k, v, hidden):
        if fault == "query for key":
            k = q + 0 * k
        scores = q @ k.swapaxes(-2, -1)
        scaled = scores
        if fault == "squared":
            scaled = scores / q.shape[-1]
        elif fault != "no scale":
            scaled = scores / math.sqrt(q.shape[-1])
        shown = jnp.roll(~hidden, 1, -1) if fault == "shifted" else hidden if fault == "inverted" else ~hidden
        masked = jnp.where(shown, scaled, -jnp.inf)
        if fault == "added":
            masked = scaled + shown.astype(q.dtype)
        if fault == "axis":
            weights = jax.nn.softmax(masked, -2)
        elif fault == "bfloat16":
            weights = jax.nn.softmax(masked.astype(jnp.bfloat16)).astype(q.dtype)
        else:
            weights = jax.nn.softmax(masked, -1)
        return weights @ v

    return attend


def torch_norm(x):
    mean = x.mean(-1, keepdim=True)
    variance = x.var(-1, keepdim=True, correction=0)
    return (x - mean) / torch.sqrt(variance + 1e-5)


def flax_norm(fault):
    def norm(x):
        mean = x.mean(-1, keepdims=True)
        variance = x.var(-1, keepdims=True, ddof=1 if fault == "unbiased" else 0)
        if fault == "epsilon":
            return (x - mean) / jnp.sqrt(variance + 1e-3)
        return (x - mean) / jnp.sqrt(variance + 1e-5)

    return norm


def torch_turned(x):
    angle = torch.arange(x.shape[1])[:, None] * 100.0 ** (-torch.arange(0, 8, 2) / 8).double()
    a, b = x[..., :4], x[..., 4:]
    return torch.cat([a * angle.cos().to(x.dtype) - b, b + a], -1)


def flax_turned(x):
    angle = jnp.arange(x.shape[1])[:, None] * 100.0 ** (-jnp.arange(0, 8, 2) / 8).astype(x.dtype)
    a, b = x[..., ::2], x[..., 1::2]
    return jnp.concatenate([a * jnp.cos(angle) - b, b + a], -1)


def torch_heads(x):
    heads = x.reshape(3, 4, 2, 4).transpose(1, 2)
    return heads @ heads.transpose(-2, -1)


def flax_heads(x):
    heads = x.reshape(3, 2, 4, 4)
    return heads @ heads.swapaxes(-2, -1)


def torch_in_place(x, y):
    total = x.clone()
    total.add_(y)
    total[:, 0].mul_(2.0)
    return total.tanh()


def flax_in_place(fault):
    def total(x, y):
        total = x - y if fault == "sign" else x + y
        factor = 3.0 if fault == "view" else 2.0
        total = total.at[:, 0].multiply(factor)
        return jnp.tanh(total)

    return total


def torch_loop(x):
    state = torch.zeros_like(x[:, 0])
    for i in range(x.shape[1]):
        state = torch.tanh(state + x[:, i])
    return state


def flax_loop(x):
    def turn(state, row):
        return jnp.sin(state + row), None

    return jax.lax.scan(turn, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[0]


def flax_branch(x):
    def wrong(y):
        return jnp.sin(y)

    return jax.lax.cond(x.sum() > 1e9, jnp.tanh, wrong, x)


@jax.jit
def jitted(x):
    return jax.nn.gelu(x, approximate=True)


@jax.checkpoint
def remade(x):
    return jnp.cos(x) * 2


def torch_gelu(x):
    return F.gelu(x)


def torch_fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


@dataclass(frozen=True)
class Planted:
    """A pair with one wrong operation.

    Attributes:
        name: of the fault.
        torch: a function or a module, and `flax`.
        inputs: of both.
        expected: torch's operation, and a part of the line that asks for it.
        actual: Flax's likewise.
        note: a part of it.
    """

    name: str
    torch: Any
    flax: Any
    inputs: tuple[Any, ...]
    expected: tuple[str, str]
    actual: tuple[str, str]
    note: str = ""


def attending(fault: str, expected: tuple[str, str], actual: tuple[str, str], note: str = "") -> Planted:
    return Planted(fault, torch_attend, flax_attend(fault), (*QKV, HIDDEN), expected, actual, note)


MASK, SOFTMAX = ("masked_fill", "masked = scaled.masked_fill"), ("softmax", "weights = torch.softmax")
CALLED = "return self.core("
FAULTS = [
    attending("squared", ("div", "scaled = scores / math.sqrt"), ("div", "scaled = scores / q.shape[-1]")),
    attending("no scale", ("div", "scaled = scores"), ("select_n", "jnp.where(shown"), "Flax has no div there"),
    attending("inverted", MASK, ("select_n", "masked = jnp.where(shown")),
    attending("shifted", MASK, ("", "jnp.roll(~hidden"), "in another arrangement"),
    attending("added", MASK, ("", "masked = scaled + shown")),
    attending("axis", SOFTMAX, ("reduce_max", "jax.nn.softmax(masked, -2)")),
    attending("bfloat16", SOFTMAX, ("convert_element_type", "masked.astype(jnp.bfloat16)")),
    Planted("by hand epsilon", torch_norm, flax_norm("epsilon"), (X,), ("add", "variance + 1e-5"), ("add", "variance + 1e-3")),
    Planted("unbiased", torch_norm, flax_norm("unbiased"), (X,), ("var", "correction=0"), ("", "ddof=1")),
    Planted("halves", torch_turned, flax_turned, (X,), ("slice", "x[..., :4]"), ("", "x[..., ::2]")),
    Planted("heads", torch_heads, flax_heads, (X,), ("view", ".transpose(1, 2)"), ("reshape", "(3, 2, 4, 4)"), "arrangement"),
    Planted("add_", torch_in_place, flax_in_place("sign"), (X, Y), ("add", "total.add_(y)"), ("sub", "x - y")),
    Planted("view", torch_in_place, flax_in_place("view"), (X, Y), ("mul", "[:, 0].mul_(2.0)"), ("", "multiply(factor)")),
    Planted("scan", torch_loop, flax_loop, (X,), ("tanh", "torch.tanh(state"), ("sin", "jnp.sin(state + row)")),
    Planted("cond", torch.tanh, flax_branch, (X,), ("tanh", "self.function("), ("sin", "jnp.sin(y)")),
    Planted("jit", torch_gelu, jitted, (X,), ("gelu", "F.gelu(x)"), ("integer_pow", "jax.nn.gelu(x, approximate=True)")),
    Planted("remat", lambda x: x.cos() * 3, remade, (X,), ("mul", "x.cos() * 3"), ("mul", "jnp.cos(x) * 2")),
    Planted(
        "residual",
        lambda x, y: torch.relu(x + y),
        lambda x, y: jax.nn.relu(x),
        (X, Y),
        ("add", "x + y"),
        ("max", "jax.nn.relu(x)"),
        "Flax has no add there",
    ),
    Planted(
        "quick gelu",
        torch_gelu,
        lambda x: x * jax.nn.sigmoid(1.702 * x),
        (X,),
        ("gelu", "F.gelu(x)"),
        ("mul", "1.702 * x"),
    ),
    Planted(
        "fused attention",
        torch_fused,
        lambda q, k, v: jax.nn.dot_product_attention(*(x.swapaxes(1, 2) for x in (q, k, v)), scale=0.25).swapaxes(1, 2),
        QKV,
        ("mul", "F.scaled_dot_product_attention"),
        ("mul", "jax.nn.dot_product_attention"),
    ),
    Planted(
        "SAME padding",
        lambda x: F.conv2d(x, torch.from_numpy(KERNEL).to(x.dtype), stride=2, padding=1),
        lambda x: jax.lax.conv_general_dilated(x, KERNEL.astype(x.dtype), (2, 2), "SAME"),
        (IMAGE,),
        ("convolution", "F.conv2d"),
        ("conv_general_dilated", '"SAME"'),
    ),
    Planted(
        "counted padding",
        lambda x: F.avg_pool2d(x, 2, 2, 1),
        lambda x: nnx.avg_pool(x.transpose(0, 2, 3, 1), (2, 2), (2, 2), [(1, 1)] * 2, False).transpose(0, 3, 1, 2),
        (IMAGE,),
        ("avg_pool2d", "F.avg_pool2d"),
        ("", "nnx.avg_pool"),
    ),
]
LAYERS = [
    Planted(
        "LayerNorm epsilon",
        lambda: nn.LayerNorm(8),
        lambda rngs: nnx.LayerNorm(8, epsilon=1e-3, use_fast_variance=False, rngs=rngs),
        (X,),
        ("native_layer_norm", CALLED),
        ("add", CALLED),
    ),
]


def spots(planted: Planted, pair: tuple[Any, Any]) -> Any:
    (fault,) = parity.trace(*pair, *planted.inputs).isolated().faults
    return fault.operation


def check(planted: Planted, found: Any) -> None:
    """Operations, lines as they stand in the file, and the note."""
    assert found.torch is not None and found.flax is not None, found.note
    for spot, (name, text) in ((found.torch, planted.expected), (found.flax, planted.actual)):
        line = linecache.getline(spot.source.file, spot.source.line).strip()
        assert (spot.operation == name or not name) and text in line and spot.source.text == line, (spot, planted.name)
    assert planted.note in found.note and bool(planted.note) == bool(found.note), found.note


@pytest.mark.parametrize("planted", FAULTS, ids=lambda planted: planted.name)
def test_the_first_operation_that_differs_is_named_with_its_line_on_both_sides(planted):
    check(planted, spots(planted, held(planted.torch, planted.flax, planted.name)))


@pytest.mark.parametrize("planted", LAYERS, ids=lambda planted: planted.name)
def test_a_layer_of_a_framework_is_named_by_the_line_that_calls_it(planted):
    check(planted, spots(planted, held(planted.torch(), planted.flax(nnx.Rngs(0)), planted.name)))


def test_planted_faults_are_at_least_thirteen():
    assert len(FAULTS) + len(LAYERS) >= 13


def test_clean_functions_agree_and_nothing_is_named():
    attend = held(torch_attend, flax_attend(""), "clean")
    assert parity.trace(*attend, *QKV, HIDDEN).isolated().faults == ()


# ---------------------------------------------------------------- whole models


class TorchCalledTwice(nn.Module):
    """A shared stage under two names, called twice under one of them."""

    def __init__(self):
        super().__init__()
        self.first = TorchStage(lambda x, power: x.tanh() * power)
        self.other = self.first

    def forward(self, x):
        return self.other(self.first(x, 1.0), 3.0)


class FlaxCalledTwice(nnx.Module):
    def __init__(self):
        self.first = FlaxStage(lambda x, power: jnp.tanh(x) * min(power, 2.0))
        self.other = self.first

    def __call__(self, x):
        return self.other(self.first(x, 1.0), 3.0)


class LinenMLP(linen.Module):
    @linen.compact
    def __call__(self, x):
        y = linen.Dense(12, name="up")(x)
        y = jax.nn.gelu(y, approximate=True)
        return linen.Dense(8, name="down")(y)


class JittedMLP(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 12, rngs=rngs), nnx.Linear(12, 8, rngs=rngs)

    def __call__(self, x):
        return run(self, x)


@nnx.jit
def run(module, x):
    y = module.up(x)
    y = jax.nn.gelu(y, approximate=True)
    return module.down(y)


class TorchMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


@pytest.mark.parametrize("room", ["linen", "nnx.jit"])
def test_linen_and_models_that_compile_themselves(room):
    ours = draw(TorchMLP(), "mlp")
    theirs = parity.Linen(LinenMLP(), None, X) if room == "linen" else JittedMLP(nnx.Rngs(0))
    filled = parity.transfer(ours, theirs).value
    (fault,) = parity.trace(ours, filled, X).isolated().faults
    assert (fault.operation.torch.operation, fault.operation.torch.source.text) == (
        "gelu",
        "return self.down(F.gelu(self.up(x)))",
    )
    assert fault.operation.flax.source.text == "y = jax.nn.gelu(y, approximate=True)"


def test_a_shared_module_of_which_the_second_call_is_wrong():
    (fault,) = parity.trace(TorchCalledTwice().eval(), FlaxCalledTwice(), X).isolated().faults
    assert fault.call == 1
    assert (fault.operation.torch.operation, fault.operation.flax.operation) == ("mul", "mul")
    assert "x.tanh() * power" in fault.operation.torch.source.text
    assert "jnp.tanh(x) * min(power, 2.0)" in fault.operation.flax.source.text


class ByNumPy(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return torch.from_numpy(np.tanh(x.numpy()))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


def test_what_comes_from_numpy_is_no_operation_and_says_so():
    found = spots(FAULTS[0], held(lambda q, *_: ByNumPy.apply(q), lambda q, *_: jnp.sin(q), "numpy"))
    assert found.torch.operation == ""
    assert found.flax.operation == "sin"
    assert "torch hands on" in found.note


def test_a_callback_is_one_operation():
    def called(x):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    pair = held(torch.tanh, called, "callback")
    (fault,) = parity.trace(*pair, X).isolated().faults
    assert fault.operation.flax is None or fault.operation.flax.operation == "pure_callback"


def test_random_numbers_are_named():
    pair = held(torch.tanh, lambda x: x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), "drawn")
    (fault,) = parity.trace(*pair, X).isolated().faults
    assert "random numbers" in fault.operation.note


@pytest.mark.parametrize("side", ["torch", "jax"])
def test_too_many_operations_are_not_compared_and_it_is_said(side, monkeypatch):
    monkeypatch.setattr(f"parity.frameworks.{side}.recording.LIMIT" if side == "jax" else "parity.evidence.tape.LIMIT", 2)
    (fault,) = parity.trace(*held(torch_norm, flax_norm("epsilon"), "long"), X).isolated().faults
    assert fault.operation.torch is None
    assert fault.operation.note == "the module computes more than 2 operations: they were not compared one by one"


def test_an_error_on_the_way_leaves_the_rest_as_it_is(monkeypatch):
    def broken(*_):
        raise ValueError("no tape")

    pair = held(torch_norm, flax_norm("epsilon"), "broken")
    before = parity.trace(*pair, X).isolated()
    monkeypatch.setattr(operations, "tapes", broken)
    after = parity.trace(*pair, X).isolated()
    assert after.faults[0].operation.note == "its operations could not be compared: ValueError: no tape"
    assert [(m.path, m.status, m.ratio) for m in after.modules] == [(m.path, m.status, m.ratio) for m in before.modules]
    assert "  no operation is named: its operations could not be compared: ValueError: no tape" in str(after)


def test_the_report_tells_both_lines_and_json_holds_them():
    report = parity.compare(*block("tanh gelu"), low_variance(3, 4, 8), modes=("compiled",), levels=("identical",))
    lines = str(report).splitlines()
    at = lines.index("    first operation that differs")
    assert lines[at + 1].startswith("      expected (torch) gelu, ")
    assert lines[at + 1].endswith("return x + self.down(self.act(self.up(self.norm(x))))")
    assert lines[at + 2].startswith("      actual (flax)    integer_pow in gelu, ")
    assert lines[at + 2].endswith("return jax.nn.gelu(x, approximate=self.approximate)")
    (one,) = [m for m in report.to_dict()["diagnosis"]["isolation"]["modules"] if m["status"] == "differs"]
    assert one["operation"]["flax"]["source"]["text"] == "return jax.nn.gelu(x, approximate=self.approximate)"
    json.dumps(one)


def test_agreement_costs_nothing(monkeypatch):
    def never(*_):
        raise AssertionError("a tape was made")

    monkeypatch.setattr(operations, "tapes", never)
    assert parity.compare(*block(""), low_variance(3, 4, 8), levels=("identical",)).passed
    assert parity.trace(*block(""), low_variance(3, 4, 8)).isolated().passed


# ---------------------------------------------------------------- fingerprints


def test_fingerprints_are_those_of_all_arrangements_and_of_no_other_numbers():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 4, 5))
    one = fingerprint(x)
    for same in (x.transpose(2, 0, 1), x.reshape(12, 5), np.repeat(x, 2, axis=1), x.astype(np.float64)[::-1]):
        assert apart(one, fingerprint(same)) < 1e-14
    for other in (-x, x * (1 + 1e-6), x + 1e-6, x[1:], np.where(x > 1, -np.inf, x)):
        assert apart(one, fingerprint(other)) > 1e-9
    assert same_layout(one, fingerprint(x.transpose(2, 0, 1)[None]), 1e-12)
    assert comparable(one, fingerprint(x.reshape(5, 4, 3)))
    assert not same_layout(one, fingerprint(x.reshape(5, 4, 3)), 1e-12)
    assert not comparable(one, fingerprint(x.reshape(12, 5)))


def test_masks_are_alike_whichever_of_both_hides_and_hidden_scores_whatever_hides_them():
    mask = np.arange(12).reshape(3, 4) > 4
    assert apart(fingerprint(mask), fingerprint(~mask)) < 1e-15
    scores = np.random.default_rng(1).standard_normal((3, 4))
    low, lower = np.where(mask, -1e20, scores), np.where(mask, -np.inf, scores)
    assert apart(fingerprint(low), fingerprint(lower)) == 0
    assert fingerprint(low).infinite != fingerprint(lower).infinite
    assert fingerprint(np.full(3, -np.inf)).uniform
    assert not fingerprint(np.array([np.nan, 1.0])).uniform


def test_a_tape_is_no_longer_than_its_limit(monkeypatch):
    monkeypatch.setattr("parity.evidence.tape.LIMIT", 0)
    with pytest.raises(TooLongError, match="more than 0 operations"):
        Tape().begin()


# ---------------------------------------------------------------- what is written, not computed


class TorchShifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.core = TorchShift()

    def forward(self, x):
        return self.core(x, 1)


class TorchShift(nn.Module):
    def forward(self, x, by):
        return x.roll(by, 0)


class FlaxShifted(nnx.Module):
    def __init__(self):
        self.core = FlaxShift()

    def __call__(self, x):
        return self.core(x, 2)


class FlaxShift(nnx.Module):
    def __call__(self, x, by):
        return jnp.roll(x, by, 0)


def test_another_number_handed_on_is_told_by_the_lines_that_hand_it_on():
    found = parity.trace(TorchShifted().eval(), FlaxShifted(), X).isolated()
    (fault,) = found.faults
    told = fault.operation
    assert (fault.path, told.note, told.where) == ("", "another setting is handed on", "what it gives core: args[1]")
    assert (told.torch.source.text, told.flax.source.text) == ("return self.core(x, 1)", "return self.core(x, 2)")
