"""The proof behind the level `wiring` is sound: what is proved holds in any order of summation."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from evidence_pairs import normal
from flax import nnx
from torch import nn
from torch.nn import functional as F

import parity
from parity.evidence.calls import Call, Evaluation
from parity.evidence.probes import dyadic, sparse
from parity.evidence.wiring import Probe, compare_bits
from parity.frameworks.torch.exactness import NotProvableError, prove

# --------------------------------------------------------------- random models, evaluated twice


def shuffled_sum(terms: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The sum over the last axis in float32, one after another in a random order."""
    total = np.zeros(terms.shape[:-1], np.float32)
    for i in rng.permutation(terms.shape[-1]):
        total = total + terms[..., i]
    return total


def product(a: np.ndarray, b: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """`a @ b^T` in float32 in a random order of summation."""
    return shuffled_sum(a[..., :, None, :] * b[..., None, :, :], rng)


def softmax(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        e = np.exp(x - x.max(-1, keepdims=True))
    return e / shuffled_sum(e, rng)[..., None]


class Step:
    """One operation in torch, and the same in NumPy by other means."""

    def __init__(self, rng: np.random.Generator, width: int):
        self.kind = rng.choice(KINDS)
        self.weight = sparse((width, width), rng) if rng.random() < 0.5 else dyadic((width, width), 2, rng)
        self.bias = dyadic((width,), int(rng.integers(1, 8)), rng)
        self.gain = 2.0 ** int(rng.choice([0, 7, 14]))
        self.mask = rng.random((1, 4, 4)) < 0.4
        self.hidden = rng.choice([-1e20, -math.inf])
        self.number = float(rng.choice([2.0, 3.0, 7.0, 49.0]))

    def torch(self, x, start, names):
        weight, bias = torch.from_numpy(self.weight), torch.from_numpy(self.bias)
        names |= {id(weight): f"parameter w{id(self)}", id(bias): f"parameter b{id(self)}"}
        if self.kind == "linear":
            return F.linear(x, weight, bias)
        if self.kind == "relu":
            return torch.relu(x)
        if self.kind == "residual":
            return x + start
        if self.kind == "maximum":
            return torch.maximum(x, -start)
        if self.kind == "mean":
            return x - x.mean(1, keepdim=True)
        if self.kind == "divide":
            return x * self.number / self.number
        if self.kind == "sum":
            return x.sum(1, keepdim=True) + start
        scores = x @ F.linear(start, weight).transpose(-1, -2) * self.gain
        scores = scores / math.sqrt(x.shape[-1])
        return torch.softmax(scores.masked_fill(torch.from_numpy(self.mask), self.hidden), -1) @ start

    def numpy(self, x, start, rng):
        weight, bias = self.weight.astype(np.float32), self.bias.astype(np.float32)
        if self.kind == "linear":
            return product(x, np.broadcast_to(weight, (len(x), *weight.shape)), rng) + bias
        if self.kind == "relu":
            return np.where(x < 0, np.float32(0), x)
        if self.kind == "residual":
            return start + x
        if self.kind == "maximum":
            return np.maximum(-start, x)
        if self.kind == "mean":
            return x - shuffled_sum(np.swapaxes(x, 1, 2), rng)[:, None] * np.float32(1 / x.shape[1])
        if self.kind == "divide":
            # As XLA does it.
            return x * np.float32(self.number) * np.float32(1 / np.float32(self.number))
        if self.kind == "sum":
            return shuffled_sum(np.swapaxes(x, 1, 2), rng)[:, None] + start
        keys = product(start, np.broadcast_to(weight, (len(x), *weight.shape)), rng)
        scores = product(x, keys, rng) * np.float32(self.gain) * np.float32(1 / np.sqrt(np.float32(x.shape[-1])))
        weights = softmax(np.where(self.mask, np.float32(self.hidden), scores), rng)
        return product(weights, np.swapaxes(start, 1, 2), rng)


KINDS = ("linear", "relu", "residual", "maximum", "mean", "divide", "sum", "attention")


def trial(seed: int) -> tuple[int, int, str]:
    """How many values were proved, of how many, and why not."""
    rng = np.random.default_rng([seed, 77])
    width, bits = int(rng.choice([4, 6])), int(rng.integers(1, 13))
    steps = [Step(rng, width) for _ in range(rng.integers(1, 6))]
    start = dyadic((2, 4, width), bits, rng)
    x = torch.from_numpy(start)
    names = {id(x): "input x"}

    def run():
        y = x
        for step in steps:
            y = step.torch(y, x, names)
        return y

    try:
        with torch.no_grad():
            proof = prove(run, names)[0].numpy()
    except NotProvableError as stop:
        return 0, start.size, str(stop)
    y32 = start.astype(np.float32)
    for step in steps:
        y32 = step.numpy(y32, start.astype(np.float32), rng)
    torch32 = start.astype(np.float32)
    for step in steps:
        torch32 = plain(step, torch32, start)
    # As the level does it: what torch's own float32 does not reproduce is not used.
    exact = proof == torch32
    if not (exact | np.isnan(proof)).all():
        return 0, start.size, "torch's own float32 is not exact"
    wrong = ~np.isnan(proof) & (y32 != proof)
    kinds = [step.kind for step in steps]
    assert not wrong.any(), f"seed {seed}: {kinds}, {proof[wrong][:3]} proved, {y32[wrong][:3]} found"
    return int((~np.isnan(proof)).sum()), start.size, ""


def plain(step: Step, x: np.ndarray, start: np.ndarray) -> np.ndarray:
    narrow = Step.__new__(Step)
    narrow.__dict__ = {
        k: v.astype(np.float32) if isinstance(v, np.ndarray) and v.dtype == float else v for k, v in vars(step).items()
    }
    return step.torch.__func__(narrow, torch.from_numpy(x), torch.from_numpy(start.astype(np.float32)), {}).numpy()


def test_what_is_proved_holds_in_another_order_of_summation():
    found = [trial(seed) for seed in range(600)]
    proved, total = sum(p for p, *_ in found), sum(t for _, t, _ in found)
    models = sum(p > 0 for p, *_ in found)
    print(f"{models} of {len(found)} models, {proved} of {total} values proved and equal")
    assert models > 150 and proved > 5000


# --------------------------------------------------------------- single operations


def proved(run, *arrays):
    """Proof and prover of a function of float64 arrays."""
    tensors = [torch.from_numpy(np.asarray(a, np.float64)) for a in arrays]
    with torch.no_grad():
        value, prover = prove(lambda: run(*tensors), {id(t): f"input {i}" for i, t in enumerate(tensors)})
    return value.numpy(), prover


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([500, 0, -500, 0], [1, 0, 0, 0]),
        ([500, 500, 0, 0], [0.5, 0.5, 0, 0]),
        ([500, 500, 500, 500], [0.25] * 4),
        ([500, 500, 500, 0], [np.nan] * 4),
        ([1, 0, -1, 2], [np.nan] * 4),
        ([500, 480, 0, 0], [np.nan] * 4),
        ([-np.inf] * 4, [np.nan] * 4),
        ([-np.inf, 7, -np.inf, -np.inf], [0, 1, 0, 0]),
    ],
)
def test_softmax_rows_are_exact_only_if_one_hot_or_tied_in_a_power_of_two(scores, expected):
    np.testing.assert_array_equal(proved(lambda x: torch.softmax(x, -1), [scores])[0], [expected])


def test_rows_that_are_not_saturated_say_what_to_scale():
    for scores, named in (([[1.0, 0.0]], {"input 0"}), ([[500.0, 0.0]], set()), ([[-np.inf, -np.inf]], set())):
        assert proved(lambda x: torch.softmax(x, -1), scores)[1].unsaturated == named


EXACT = {
    "whole numbers are summed": (lambda x: x / (x > 0).sum().clamp(min=1), [[2.0, -1.0]]),
    "mean over a power of two": (lambda x: x.mean(-1), [[1.0, 2.0, 3.0, 4.0]]),
    "a row that is hidden whole, put right": (lambda x: torch.where(x.isnan(), 0.0, x), [[np.nan, 2.0]]),
    "divided by two": (lambda x: (x / 2) @ x.T, [[3.0, 5.0]]),
    "divided by as many numbers": (lambda x: (x / (x * 0 + 3.0)) @ x.T, [[3.0, 6.0]]),
}
INEXACT = {
    "sum of more than 24 bits": (lambda x: x.sum(-1), [[2.0**24, 1.0]], "sum: its sums need"),
    "mean of more than 24 bits": (lambda x: x.mean(-1), [[2.0**24 - 1, 2.0**24 - 1]], "mean: its sums need"),
    "mean over three": (lambda x: x.mean(-1), [[1.0, 2.0, 3.0]], "mean: .*power of two"),
    "product of more than 24 bits": (lambda x: x @ x.T, [[4097.0, 4095.0]], "mm: its sums need"),
    "a third, summed": (lambda x: (x / 3) @ x.T, [[3.0, 6.0]], "mm: "),
    "a third, added": (lambda x: x / 3 + x, [[3.0, 6.0]], "add: "),
    "in place too": (lambda x: x.clone().div_(3) @ x.T, [[3.0, 6.0]], "mm: "),
    "decided by what is not proved": (
        lambda x: torch.where(torch.softmax(x, -1) > 0.5, x, -x),
        [[1.0, 0.0]],
        "gt: it decides by numbers that are not proved",
    ),
    "what is not proved, called NaN": (
        lambda x: torch.where(torch.softmax(x, -1).isnan(), 0.0, x),
        [[1.0, 0.0]],
        "(isnan|ne|eq): it decides by numbers that are not proved",
    ),
    "scaled inside a product": (lambda x: torch.addmm(x, x, x, alpha=0.1), [[3.0]], "addmm: it scales what it sums"),
    "too large for float32": (lambda x: x @ x.T, [[2.0**70, 2.0**70]], "mm: its sums do not fit float32"),
    "exp": (torch.exp, [[1.0]], "exp: its result is rounded"),
    "sum of an attention that is not saturated": (lambda x: x.exp().sum(-1), [[1.0, 2.0]], "exp: "),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact_operations_are_proved(name):
    run, x = EXACT[name]
    value, _ = proved(run, x)
    assert not np.isnan(value).any()
    plain32 = run(torch.tensor(x, dtype=torch.float32)).numpy()
    np.testing.assert_array_equal(value, plain32)


@pytest.mark.parametrize("name", INEXACT)
def test_inexact_operations_end_the_proof_with_their_name(name):
    run, x, says = INEXACT[name]
    with pytest.raises(NotProvableError, match=f"^{says}"):
        proved(run, x)


def test_what_is_not_proved_taints_all_that_depends_on_it_and_nothing_else():
    def run(x):
        weights = torch.softmax(x, -1)
        return torch.cat([weights @ x, x], -1)

    value, _ = proved(run, [[1.0, 0.0], [500.0, 0.0]])
    assert np.isnan(value).tolist() == [[True, True, False, False], [False] * 4]


# --------------------------------------------------------------- the level


class Echo(nnx.Module):
    def __call__(self, x):
        return x


def model(run) -> nn.Module:
    class Model(nn.Module):
        def forward(self, x):
            return run(x)

    return Model().eval()


@pytest.mark.parametrize(
    ("run", "operation"),
    [
        (lambda x: F.layer_norm(x, (4,)), "native_layer_norm"),
        (F.gelu, "gelu"),
        (torch.exp, "exp"),
        (torch.tanh, "tanh"),
        (torch.sigmoid, "sigmoid"),
        (F.silu, "silu"),
        (torch.erf, "erf"),
        (lambda x: torch.log_softmax(x, -1), "_log_softmax"),
        (lambda x: x.std(-1, keepdim=True) * x, "std"),
        (lambda x: F.relu(F.gelu(x)), "gelu"),
        (lambda x: x + 0 * torch.exp(x), "exp"),
    ],
)
def test_a_model_that_cannot_be_exact_is_not_applicable_and_the_operation_named(run, operation):
    result = parity.compare(model(run), Echo(), normal(3, 4), levels="wiring").level("wiring")
    assert result.status == "not applicable" and not result.passed
    assert result.summary.startswith(f"{operation}: ")
    assert result.figures["operation"] == operation


def test_softmax_alone_is_saturated_and_proved():
    class Soft(nnx.Module):
        def __call__(self, x):
            return nnx.softmax(x, axis=-1)

    report = parity.compare(model(lambda x: torch.softmax(x, -1)), Soft(), normal(3, 4), levels="wiring")
    assert report.passed and report.level("wiring").figures["proved"] >= 6


def test_a_mask_that_is_summed_does_not_stop_the_probe():
    class TorchPool(nn.Module):
        def forward(self, x, mask):
            return (x * mask[..., None]).sum(1) / 2 ** mask.sum(1, keepdim=True).clamp(max=0)

    class FlaxPool(nnx.Module):
        def __call__(self, x, mask):
            return (x * mask[..., None]).sum(1) / jnp.exp2(jnp.clip(mask.sum(1, keepdims=True), max=0)).astype(x.dtype)

    mask = np.array([[True, True, False], [True, False, False]])
    result = parity.compare(TorchPool().eval(), FlaxPool(), normal(2, 3, 4), mask, levels="wiring").level("wiring")
    assert result.status in ("passed", "not applicable"), result


def probed(proof, torch32) -> Probe:
    return Probe({}, Call(()), {"": np.array(proof)}, Evaluation({"": np.array(torch32, np.float32)}), 3)


NAN = math.nan


@pytest.mark.parametrize(
    ("proof", "torch32", "flax32", "status"),
    [
        ([1.0, 2.0], [1.0, 2.0], [1.0, 2.0], "passed"),
        ([1.0, 2.0], [1.0, 2.0], [1.0, np.nextafter(np.float32(2), np.float32(3))], "failed"),
        ([1.0, NAN], [1.0, 0.3], [1.0, 0.31], "passed"),
        ([1.0, NAN], [1.0, 0.3], [1.0, NAN], "failed"),
        ([1.0, NAN], [1.0, 0.3], [NAN, 0.3], "failed"),
        ([1.0, NAN], [1.0, NAN], [1.0, NAN], "passed"),
        ([1.0, NAN], [1.0, NAN], [1.0, 0.3], "failed"),
        ([1.0, 2.5], [1.0, 2.0], [1.0, 2.0], "not applicable"),
        ([1.0, 2.0], [1.0, NAN], [1.0, NAN], "not applicable"),
        ([0.0, 2.0], [0.0, 2.0], [-0.0, 2.0], "passed"),
    ],
)
def test_nan_marks_what_is_not_proved_and_hides_no_real_nan(proof, torch32, flax32, status):
    assert compare_bits(probed(proof, torch32), Evaluation({"": np.array(flax32, np.float32)})).status == status


@pytest.mark.parametrize("flax32", [{}, {"": np.zeros((2, 1), np.float32)}, {"": "text"}])
def test_an_output_without_counterpart_fails(flax32):
    assert compare_bits(probed([1.0, 2.0], [1.0, 2.0]), Evaluation(flax32)).status == "failed"
