"""Kinds of faults beside those of the catalogue: the right port passes, of the wrong one the cause comes first."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from evidence_pairs import draw, normal
from fault_pairs import FlaxHolder, TorchHolder
from flax import linen, nnx
from torch import nn

import parity

X = normal(3, 4, 8)
FAST = {"modes": ("compiled",)}


def functions(torch_function, flax_function, *inputs, **options):
    return parity.compare(TorchHolder(torch_function).eval(), FlaxHolder(flax_function), *inputs, **{**FAST, **options})


# ---------------------------------------------------------------- right ports that must not be refused

SCORES = normal(3, 5, 5)
HIDDEN = np.where(np.triu(np.ones((5, 5), bool), 1), -np.inf, 0).astype(np.float32)


def torch_added(q, k, mask):
    # As nn.MultiheadAttention adds it: torch wants one dtype for all three.
    return torch.softmax(torch.baddbmm(mask.expand(3, 4, 4), q, k.transpose(1, 2)), -1)


def test_a_mask_of_numbers_is_added_in_float64_too():
    mask = normal(4, 4, name="mask")
    right = lambda q, k, mask: jax.nn.softmax(q @ k.swapaxes(1, 2) + mask, -1)  # noqa: E731
    levels = ("identical", "gradients")
    report = functions(torch_added, right, X, normal(3, 4, 8, name="k"), kwargs={"mask": mask}, levels=levels)
    assert report.passed, str(report)
    # A mask gets no gradient.
    assert report.level("gradients").figures["elements"] == 2 * X.size


def test_a_mask_of_numbers_taken_for_a_switch_is_the_cause():
    switch = (normal(4, 4, name="switch") > 0).astype(np.float32)
    wrong = lambda q, k, mask: jax.nn.softmax(jnp.where(mask == 0, -jnp.inf, q @ k.swapaxes(1, 2)), -1)  # noqa: E731
    pair = TorchHolder(torch_added).eval(), FlaxHolder(wrong)
    found = parity.diagnose(*pair, X, normal(3, 4, 8, name="k"), kwargs={"mask": switch})
    assert "a mask of 0 and 1 is a switch in Flax, 1 shows; torch adds its numbers" in found.causes[0].what, str(found)


def test_what_flax_alone_refuses_though_it_is_not_given_is_a_note():
    q, k, v = (normal(2, 3, 4, 8, name=name) for name in "qkv")

    def flax(*given):
        return jax.nn.dot_product_attention(*(x.swapaxes(1, 2) for x in given)).swapaxes(1, 2)

    report = functions(F.scaled_dot_product_attention, flax, q, k, v, levels="structure")
    assert report.passed, str(report)
    assert any("args[2] one wider than it should be" in note for note in report.level("structure").notes)
    strict = functions(F.scaled_dot_product_attention, flax, q, k, v, levels="structure", strict=True)
    assert "actual (flax) raises ValueError: value shape should be" in str(strict)


def test_the_gradient_of_hardsigmoid_is_that_of_the_formula():
    x, levels = 3 * normal(3, 8, name="wide"), ("identical", "gradients")
    assert functions(F.hardsigmoid, jax.nn.hard_sigmoid, x, levels=levels).passed
    slope = functions(F.hardsigmoid, lambda x: jnp.clip(x / 5 + 0.5, 0, 1), x, levels=levels)
    assert slope.level("gradients").status == "failed"


def test_float32_that_holds_the_digits_of_bfloat16_was_rounded():
    scores = normal(2, 3, 16, 16).astype(ml_dtypes.bfloat16)
    levels = ("structure", "identical", "native")
    torch_function = lambda s: torch.softmax(s.float(), -1)  # noqa: E731
    right = functions(torch_function, lambda s: jax.nn.softmax(s.astype(jnp.float32), -1), scores, levels=levels)
    assert right.passed, str(right)
    wrong = functions(
        torch_function,
        lambda s: jax.nn.softmax(s, -1).astype(jnp.float32),
        scores,
        levels=levels,
        modes="eager",
        diagnose=False,
    )
    assert [level.status for level in wrong.levels] == ["passed", "passed", "failed"]
    assert "float32 that holds numbers of bfloat16 alone, torch's has more digits" in str(wrong)


def test_where_nothing_is_a_floating_point_number_nothing_runs_in_float64():
    lengths = np.array([[1, 3], [2, 0]], np.int32)
    levels = ("structure", "identical", "native", "gradients")
    right = functions(lambda n: n / 2, lambda n: n / 2, lengths, levels=levels)
    assert [level.status for level in right.levels] == ["passed", "not applicable", "passed", "not applicable"]
    assert right.passed
    assert not functions(lambda n: n / 2, lambda n: (n // 2).astype(jnp.float32), lengths, levels=levels).passed


# ---------------------------------------------------------------- settings that the code around a layer makes good


class Padded(nnx.Module):
    def __init__(self):
        self.core = nnx.Embed(7, 4, rngs=nnx.Rngs(0))

    def __call__(self, ids):
        rows = self.core(ids)
        return jnp.where((ids == 0)[..., None], jax.lax.stop_gradient(rows), rows)


def test_a_padding_row_whose_gradient_is_stopped_is_made_good_if_it_is_looked_up():
    pair = draw(TorchHolder(nn.Embedding(7, 4, padding_idx=0)), "rows"), Padded()
    told = parity.transfer(*pair).settings
    assert "padding_idx=0" in told[0]
    levels = ("weights", "gradients")
    report = parity.compare(*pair, np.array([[0, 1, 6], [2, 0, 3]]), levels=levels)
    assert report.passed, str(report)
    assert "made good by the code around it, as gradients shows: core: padding_idx=0" in str(report)
    unseen = parity.compare(*pair, np.array([[5, 1, 6], [2, 4, 3]]), levels=levels, diagnose=False)
    assert unseen.level("weights").status == "failed"
    assert parity.compare(*pair, np.array([[0, 1], [2, 0]]), levels="weights", diagnose=False).passed is False


class LengthFirst(nnx.Module):
    def __init__(self, swap: bool):
        self.core, self.swap = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0)), swap

    def __call__(self, x):
        return self.core(x.swapaxes(0, 1)).swapaxes(0, 1) if self.swap else self.core(x)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.core = nn.MultiheadAttention(8, 2)

    def forward(self, x):
        return self.core(x, x, x, need_weights=False)[0]


def length_first(swap: bool):
    pair = draw(Attending(), "length first").eval(), LengthFirst(swap)
    parity.transfer(*pair)
    return pair


def test_batch_and_length_are_exchanged_where_torchs_layer_takes_the_length_first():
    report = parity.compare(*length_first(True), X, levels=("weights", "identical"))
    assert report.passed, str(report)
    assert "made good by the code around it, as identical shows: core: batch_first=False" in str(report)
    assert not parity.compare(*length_first(True), X[:1], levels=("weights", "identical"), diagnose=False).passed
    found = parity.diagnose(*length_first(False), X)
    assert [fault.path for fault in found.isolation.faults] == [""], str(found)
    assert found.causes[0].what == "what it gives core has its first two axes, batch and length, in the other order"
    # The lengths alike do not hide it.
    square = parity.diagnose(*length_first(False), normal(4, 4, 8))
    assert square.causes[0].what == found.causes[0].what, str(square)


# ---------------------------------------------------------------- a GRU of Linen's, whose bias inside the gate has a place


class LinenCell(linen.Module):
    @linen.compact
    def __call__(self, x, h):
        return linen.GRUCell(4, name="core")(h, x)[0]


def test_the_biases_of_a_gru_are_merged_but_for_the_one_inside_the_gate():
    x, h = normal(2, 3), normal(2, 4, name="h")
    source, empty = draw(TorchHolder(nn.GRUCell(3, 4)), "gru"), parity.Linen(LinenCell(), None, x, h)
    with pytest.raises(parity.TransferError, match=r'bias_hh\[r\] has no counterpart.* pass merge="recurrent biases"'):
        parity.transfer(source, empty)
    done = parity.transfer(source, empty, merge="recurrent biases")
    assert "b_hn, the last third of core.bias_hh, stays apart inside the reset gate" in done.notes[0]
    core = done.value.variables["params"]["core"]
    assert np.array_equal(core["hn"]["bias"], source.core.bias_hh[8:].detach())
    assert np.array_equal(core["in"]["bias"], source.core.bias_ih[8:].detach())
    assert np.array_equal(core["ir"]["bias"], (source.core.bias_ih + source.core.bias_hh)[:4].detach())
    report = parity.compare(source, done.value, x, h, levels=("native",), **FAST)
    assert report.passed, str(report)


def test_a_layer_that_torch_quantised_is_refused_as_such():
    numbers = {"0.scale": torch.tensor(0.5), "0.zero_point": torch.tensor(3)}
    with pytest.raises(parity.TransferError, match=r"0\.scale, 0\.zero_point: the weight was quantised by torch"):
        parity.transfer(numbers, nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0))))


# ---------------------------------------------------------------- causes

WIDE, IMAGE, ODD = 3 * normal(3, 24, name="wide"), normal(2, 4, 6, 5, name="image"), normal(2, 4, 7, 5, name="odd")
Q, K = normal(3, 2, 1, 4, name="q"), normal(3, 2, 5, 4, name="k")
BAND = np.abs(np.arange(5)[:, None] - np.arange(5)) > 1


def flat(function):
    """A function of an image with its channels last."""
    return lambda x: function(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


def attended(q, k, hidden=None):
    scores = q @ k.swapaxes(-2, -1)
    return jax.nn.softmax(scores if hidden is None else jnp.where(hidden, -jnp.inf, scores), -1)


CAUSES = {
    "beta": (lambda x: F.softplus(x, beta=2.0), jax.nn.softplus, WIDE, "Flax's softplus has beta=1 where torch has 2"),
    "threshold": (lambda x: F.softplus(x, threshold=3.0), jax.nn.softplus, WIDE, "threshold=20 where torch has 3"),
    "alpha": (lambda x: F.elu(x, 0.5), lambda x: jax.nn.elu(x, 0.3), WIDE, "alpha=0.3 where torch has 0.5"),
    "scale of selu": (F.selu, jax.nn.elu, WIDE, "computes elu where torch computes selu"),
    "bounds": (lambda x: F.hardtanh(x, -2, 3), lambda x: jnp.clip(x, -2, 2), WIDE, "max_val=2 where torch has 3"),
    "slope of hardsigmoid": (F.hardsigmoid, lambda x: jnp.clip(0.2 * x + 0.5, 0, 1), WIDE, "hard sigmoid of slope 0.2"),
    "logarithm": (F.logsigmoid, jax.nn.sigmoid, WIDE, "computes sigmoid where torch computes log sigmoid"),
    "soft sign": (F.softsign, jnp.tanh, WIDE, "Flax computes tanh where torch computes softsign"),
    "left out": (lambda x: torch.tanh(x / 9) * 2, lambda x: x / 9 * 2, WIDE, "leaves the function out"),
    "bound added": (
        *(lambda x: F.normalize(x, dim=-1, eps=1e-2), lambda x: x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-2)),
        *(WIDE, "0.01 is added in Flax where torch takes no less than it"),
    ),
    "mirrored": (
        *(lambda x: F.pad(x, (1, 2), mode="reflect").sin(), lambda x: jnp.sin(jnp.pad(x, ((0, 0), (1, 2)), "symmetric"))),
        *(WIDE, "Flax pads with 'symmetric', torch with 'reflect'"),
    ),
    "padded with zeros": (
        *(lambda x: F.pad(x, (1, 1), value=-1.0).sin(), lambda x: jnp.sin(jnp.pad(x, ((0, 0), (1, 1))))),
        *(WIDE, "Flax pads with 0, torch with -1"),
    ),
    "over the edge": (
        *(lambda x: F.max_pool2d(x, 2, ceil_mode=True), flat(lambda x: nnx.max_pool(x, (2, 2), (2, 2)))),
        *(ODD, "ceil_mode=True in torch"),
    ),
    "divisor": (
        *(lambda x: F.avg_pool2d(x, 2, divisor_override=3), flat(lambda x: nnx.avg_pool(x, (2, 2), (2, 2)))),
        *(ODD, "the mean is taken where torch divides by 3"),
    ),
}


# What is tried in every run; the rest stands in the slow one.
QUICK = ("beta", "alpha", "bounds", "soft sign", "bound added", "mirrored", "over the edge")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CAUSES])
def test_the_cause_comes_first(name):
    torch_function, wrong, x, says = CAUSES[name]
    found = parity.diagnose(TorchHolder(torch_function).eval(), FlaxHolder(wrong), x)
    assert [fault.path for fault in found.isolation.faults] == ["core"]
    assert found.causes, str(found)
    assert says in f"{found.causes[0].what}; {found.causes[0].change}", str(found)


def test_a_mask_that_torch_has_not_and_one_that_reaches_too_far():
    top_left = lambda q, k: attended(q, k, ~jnp.tril(jnp.ones((1, 5), bool)))  # noqa: E731
    one = TorchHolder(lambda q, k: torch.softmax(q @ k.transpose(-2, -1), -1)).eval(), FlaxHolder(top_left)
    assert "lined up at the top left, hides what torch shows" in parity.diagnose(*one, Q, K).causes[0].what

    def banded(q, k):
        return torch.softmax((q @ k.transpose(-2, -1)).masked_fill(torch.from_numpy(BAND), float("-inf")), -1)

    wider = lambda q, k: attended(q, k, jnp.abs(jnp.arange(5)[:, None] - jnp.arange(5)) > 2)  # noqa: E731
    found = parity.diagnose(TorchHolder(banded).eval(), FlaxHolder(wider), normal(3, 2, 5, 4, name="more"), K)
    assert found.causes[0].what == "the mask shows one key more at both ends", str(found)


def test_a_padding_mask_without_its_axes_is_named_where_it_is_given():
    class Masked(nnx.Module):
        def __init__(self):
            self.core = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))

        def __call__(self, x, padding):
            return self.core(x, mask=~padding)

    class Theirs(nn.Module):
        def __init__(self):
            super().__init__()
            self.core = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x, padding):
            return self.core(x, x, x, key_padding_mask=padding)[0]

    pair, padding = (draw(Theirs(), "masked").eval(), Masked()), np.arange(4) >= np.array([[4], [1], [3], [2]])
    parity.transfer(*pair)
    first = parity.diagnose(*pair, normal(4, 4, 8), padding).causes[0]
    assert first.what == "what it gives core: kwargs['mask']: a mask (batch, keys) is read as (queries, keys)"


# ---------------------------------------------------------------- what agreement does not show is told beside it


def test_a_bound_that_no_value_reaches_is_told():
    levels = ("identical", "gradients")
    report = functions(F.relu6, jax.nn.relu, np.clip(X, -2, 2), levels=levels)
    assert report.passed
    assert "no value goes beyond the bound 6 of hardtanh: whether Flax has it does not show" in str(report)
    assert "bound-unreached" not in [note.code for note in functions(F.relu6, jax.nn.relu6, 6 * X, levels=levels).notes]


def test_a_tie_that_was_gone_round_is_told_beside_agreement():
    x = np.array([[1.0, 3, 3, 2], [5, 1, 2, 4]], np.float32)
    report = functions(lambda x: x.max(-1).values, lambda x: x.max(-1), x, levels=("identical", "gradients"))
    assert report.passed
    assert "1 values tie for a maximum, where frameworks choose other gradients" in str(report)
