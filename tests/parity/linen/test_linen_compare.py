"""Linen models on every level, in the trace and in the check of rows; faults are found where they are planted."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from evidence_pairs import normal, one_ulp
from flax import linen as nn
from linen_pairs import RENAMES, STYLES, LinenConv, SetupEncoder, altered, convolutions, encoder, images, x
from rule_cases import levels
from transfer_helpers import snapshot

import parity

WIRING = "not applicable"


# ---------------------------------------------------------------- agreement


@pytest.mark.parametrize("style", STYLES)
def test_a_mirror_in_either_style_is_the_same_function(style):
    ours, theirs = encoder(style)
    before = snapshot(ours), jax.tree.map(np.array, theirs.variables)
    report = parity.compare(ours, theirs, x(), rename=RENAMES[style])
    assert report.passed, str(report)
    # LayerNorm rounds, so that nothing behind it can be proved exact.
    assert {name: status for name, status in levels(report).items() if status != "passed"} == {"wiring": WIRING}
    assert snapshot(ours) == before[0]
    assert jax.tree.all(jax.tree.map(np.array_equal, theirs.variables, before[1]))


def test_convolutions_and_running_statistics_are_the_same_function_in_evaluation():
    report = parity.compare(*convolutions(), images())
    assert report.passed, str(report)
    assert any("BatchNorm" in note for level in report.levels for note in level.notes)


class Two(nn.Module):
    @nn.compact
    def __call__(self, x, *, scale=None):
        y = nn.Dense(8, name="b")(nn.relu(nn.Dense(6, name="a")(x)))
        return {"y": y if scale is None else y * scale, "count": 3}


class TorchTwo(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 6), torch.nn.Linear(6, 8)

    def forward(self, x, *, scale=None):
        y = self.b(torch.relu(self.a(x)))
        return {"y": y if scale is None else y * scale, "count": 3}


def two(**options: Any) -> tuple[torch.nn.Module, parity.Linen]:
    torch.manual_seed(0)
    ours = TorchTwo().eval()
    return ours, parity.transfer(ours, parity.Linen(Two(), None, x(), **options)).value


def test_wiring_is_proved_on_linen_too_and_keyword_arguments_reach_both_sides():
    report = parity.compare(*two(), x(), kwargs={"scale": normal(8, name="scale")})
    assert levels(report) == dict.fromkeys(parity.LEVELS, "passed"), str(report)


def test_a_model_may_be_another_method():
    class Encoder(nn.Module):
        def setup(self):
            self.a, self.b = nn.Dense(6), nn.Dense(8)

        def encode(self, x):
            return {"y": self.b(nn.relu(self.a(x))), "count": 3}

    ours, theirs = two()
    for method in ("encode", Encoder.encode):
        assert parity.compare(ours, parity.Linen(Encoder(), theirs.variables, method=method), x()).passed


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype):
    ours = TorchTwo().to(getattr(torch, dtype)).eval()
    given = torch.from_numpy(x()).to(getattr(torch, dtype))
    theirs = parity.transfer(ours, parity.Linen(Two(), None, given), cast="source").value
    report = parity.compare(ours, theirs, given, levels=["weights", "structure", "identical", "native"])
    assert report.passed, str(report)


class Pinned(nn.Module):
    """Normalises in float32 because it says so, as many published models do; all of it if told so."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm(epsilon=1e-5, use_fast_variance=False, dtype=jnp.float32, name="norm")(x)
        return nn.Dense(8, dtype=self.dtype, param_dtype=jnp.float32, name="dense")(x)


class TorchPinned(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.dense = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.dense(self.norm(x))


def test_a_pinned_dtype_is_the_one_in_which_the_model_is_deployed():
    torch.manual_seed(0)
    ours = TorchPinned().eval()
    theirs = parity.transfer(ours, parity.Linen(Pinned(), None, x())).value
    chosen = ["weights", "structure", "identical"]
    assert parity.compare(ours, theirs, x(), levels=chosen).passed
    # As for NNX: what a model asks for that is deployed in float32 is no other function, in its outputs neither.
    assert parity.compare(ours, parity.Linen(Pinned(jnp.float32), theirs.variables), x(), levels=chosen).passed
    report = parity.compare(ours, parity.Linen(Pinned(jnp.bfloat16), theirs.variables), x(), levels=chosen)
    assert levels(report) == {"weights": "failed", "structure": "failed", "identical": "not run"}
    assert "the Flax model pins a dtype: output of the model is bfloat16 in a float64 run" in str(report)


class Scanned(nn.Module):
    """A recurrent layer, whose cell makes its own first state in float32."""

    @nn.compact
    def __call__(self, x):
        return nn.RNN(nn.GRUCell(6), name="gru")(x)


class TorchScanned(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = torch.nn.GRU(8, 6, batch_first=True)
        with torch.no_grad():
            # What Linen has one bias for.
            self.gru.bias_hh_l0[:12] = 0

    def forward(self, x):
        return self.gru(x)[0]


def test_a_recurrent_layer_in_a_compact_module_runs_in_float64_and_keeps_b_hn():
    torch.manual_seed(0)
    ours = TorchScanned().eval()
    assert ours.gru.bias_hh_l0[12:].abs().min() > 0
    done = parity.transfer(ours, parity.Linen(Scanned(), None, x()))
    assert done.rename["gru.bias_hh_l0[n]"] == "params.GRUCell_0.hn.bias"
    report = parity.compare(ours, done.value, x(), levels=["weights", "identical"])
    assert report.passed, str(report)
    ours.gru.bias_hh_l0.data[3] = 1
    with pytest.raises(parity.TransferError, match=r"gru.bias_hh_l0\[r\] has no counterpart: Flax has one bias in this gate"):
        parity.transfer(ours, done.value)


# ---------------------------------------------------------------- planted faults

FAULTS = {
    "epsilon": ("layers.1.norm1", "layers.0", {"identical", "gradients", "weights"}),
    "tanh gelu": ("layers.1.ffn.1", "layers.1.ffn.0", {"identical", "gradients", "native"}),
    "query and key swapped": ("layers.1.core", "layers.1.v", {"identical", "gradients", "native"}),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("style", STYLES)
def test_a_fault_in_the_code_is_found_in_its_module(style, fault):
    path, last, failing = FAULTS[fault]
    ours, theirs = encoder(style, fault)
    found = parity.trace(ours, theirs, x(), rename=RENAMES[style]).first_divergence()
    assert (found.path, found.last_agreement, found.inputs) == (path, last, "agree")
    if style is SetupEncoder:
        report = parity.compare(ours, theirs, x())
        assert {name for name, status in levels(report).items() if status == "failed"} >= failing
        assert levels(report)["structure"] == "passed"
        assert f"{path}   first divergence" in str(report)


ARRAYS = {
    "params.layers_1.out.kernel": (np.transpose, "layers.1.out"),
    "params.layers_0.q.kernel": (one_ulp, "layers.0.q"),
    "params.layers_1.norm2.scale": (lambda a: a[::-1], "layers.1.norm2"),
}


@pytest.mark.parametrize("path", ARRAYS)
def test_a_fault_in_an_array_fails_the_weights_and_is_traced_to_its_layer(path):
    change, place = ARRAYS[path]
    ours, theirs = encoder(SetupEncoder)
    wrong = altered(theirs, path, change)
    assert parity.trace(ours, wrong, x()).first_divergence().path == place
    report = parity.compare(ours, wrong, x(), levels=["weights", "identical"])
    assert levels(report) == {"weights": "failed", "identical": "failed"}
    assert any(path in finding.what for finding in report.levels[0].findings)


def test_wrong_running_statistics_are_found():
    ours, theirs = convolutions()
    wrong = altered(theirs, "batch_stats.bn_2.var", lambda a: a * 1.001)
    report = parity.compare(ours, wrong, images(), levels=["weights", "identical"])
    assert levels(report) == {"weights": "failed", "identical": "failed"}
    assert "batch_stats.bn_2.var" in report.levels[0].findings[0].what


def test_a_setting_that_differs_is_told():
    ours, theirs = convolutions()
    ours.bn_1.eps, ours.bn_2.momentum = 1e-3, 0.2
    report = parity.compare(ours, theirs, images(), levels=["weights"])
    told = " ".join(finding.what for finding in report.levels[0].findings)
    assert "bn_1: eps=0.001 in torch, epsilon=1e-05 in Flax; set epsilon=0.001" in told
    assert "bn_2: momentum=0.2 in torch, momentum=0.9 in Flax; set momentum=0.8" in told


def test_a_stopped_gradient_is_found():
    class Stopped(Two):
        @nn.compact
        def __call__(self, x, *, scale=None):
            y = nn.Dense(8, name="b")(jax.lax.stop_gradient(nn.relu(nn.Dense(6, name="a")(x))))
            return {"y": y, "count": 3}

    ours, theirs = two()
    report = parity.compare(ours, parity.Linen(Stopped(), theirs.variables), x(), levels=["identical", "gradients"])
    assert levels(report) == {"identical": "passed", "gradients": "failed"}


# ---------------------------------------------------------------- trace


@pytest.mark.parametrize("style", STYLES)
def test_the_trace_pairs_every_module_in_either_style(style):
    ours, theirs = encoder(style)
    trace = parity.trace(ours, theirs, x(), rename=RENAMES[style])
    assert trace.passed and not trace.unpaired
    wanted = [path for path, _ in ours.named_modules() if path not in ("layers", "heads")]
    assert sorted(step.path for step in trace.steps) == sorted(wanted)
    assert [step.path for step in trace.steps][-3:] == ["heads.left", "heads.right", ""]


def test_each_call_is_a_step_and_a_class_that_calls_its_base_is_one_module():
    class Doubled(nn.Dense):
        @nn.compact
        def __call__(self, x):
            return super().__call__(x)

    class Shared(nn.Module):
        def setup(self):
            self.a = Doubled(8)

        def __call__(self, x):
            return self.a(self.a(x))

    class TorchShared(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(8, 8)

        def forward(self, x):
            return self.a(self.a(x))

    ours = TorchShared().eval()
    theirs = parity.transfer(ours, parity.Linen(Shared(), None, x())).value
    assert [(s.path, s.call) for s in parity.trace(ours, theirs, x()).steps] == [("a", 0), ("a", 1), ("", 0)]


def test_a_scanned_module_is_traced_as_one_and_flax_is_left_as_it_was():
    class Steps(nn.Module):
        @nn.compact
        def __call__(self, x):
            cell = nn.scan(nn.SimpleCell, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1)
            return cell(6, name="rnn")(jnp.zeros((x.shape[0], 6), x.dtype), x)[1]

    model = parity.Linen(Steps(), None, x())
    model = model.replaced(variables=jax.tree.map(lambda a: jnp.ones(a.shape), model.variables))
    make, call = nn.transforms.module_class_lift_transform, nn.Dense.__call__
    room = parity.frameworks.load("linen")
    captured = room.capture(model, parity.evidence.calls.Call((x(),)))[1]
    assert [c.path for c in captured] == ["rnn", ""]
    assert captured[0].outputs["[1]"].shape == captured[1].outputs[""].shape == (3, 4, 6)
    assert (nn.transforms.module_class_lift_transform, nn.Dense.__call__) == (make, call)


# ---------------------------------------------------------------- what cannot be compared


def test_train_mode_is_told_with_what_to_pass():
    ours, theirs = convolutions()
    training = parity.Linen(LinenConv(), theirs.variables)
    with pytest.raises(parity.InputError, match=r"writes into its variables, so it is in train mode .*such as train=False"):
        parity.compare(ours, training, images())
    # In the call it can be told to both sides, or to Flax alone in parity.Linen; the call wins.
    assert parity.Linen(LinenConv(), theirs.variables, train=True).replaced(kwargs={"train": False}).kwargs == {"train": False}


class Dropped(nn.Module):
    rate: float = 0.5

    @nn.compact
    def __call__(self, x, deterministic=False):
        return nn.Dense(8, name="a")(nn.Dropout(self.rate, deterministic=deterministic)(x))


def test_dropout_without_keys_and_with_keys():
    torch.manual_seed(0)
    ours = torch.nn.Sequential()
    ours.add_module("a", torch.nn.Linear(8, 8))
    ours.eval()
    theirs = parity.transfer(ours, parity.Linen(Dropped(), None, x(), deterministic=True)).value
    assert parity.compare(ours, theirs, x()).passed
    message = r"draws random numbers and is given none, so it is in train mode .* deterministic=True, or rngs="
    with pytest.raises(parity.InputError, match=message):
        parity.compare(ours, parity.Linen(Dropped(), theirs.variables), x())
    with pytest.raises(parity.InputError, match="returns other numbers with other random keys"):
        parity.compare(ours, parity.Linen(Dropped(), theirs.variables, rngs={"dropout": jax.random.key(0)}), x())
    # A rate of 0 draws nothing.
    assert parity.compare(ours, parity.Linen(Dropped(0.0), theirs.variables), x()).passed


@pytest.mark.parametrize(
    ("first", "second", "sentence"),
    [
        (
            lambda: two()[0],
            lambda: parity.Linen(Two(), None, x()),
            r"holds no values at params.a.bias, params.a.kernel, .* transfer into it first",
        ),
        (lambda: two()[0], lambda: two()[1].variables, "which holds arrays but computes nothing"),
        (lambda: two()[0], Two, "the second model must be a flax.nnx.Module or a parity.Linen, got the Linen module"),
        (lambda: two()[1], lambda: two()[0], "the torch model comes first, the Flax model second"),
    ],
)
def test_what_is_no_pair_is_refused(first, second, sentence):
    with pytest.raises(parity.InputError, match=sentence):
        parity.compare(first(), second(), x())


def test_inside_jit_nothing_can_be_compared():
    ours, theirs = two()

    def run(_: Any) -> int:
        with pytest.raises(parity.InputError, match=re.escape("this runs inside jax.jit")):
            parity.compare(ours, theirs, x())
        return 0

    jax.jit(run)(0)


def test_an_error_of_the_model_is_the_structures_finding():
    class Refuses(Two):
        @nn.compact
        def __call__(self, x, *, scale=None):
            raise ValueError("no such axis")

    ours, theirs = two()
    report = parity.compare(ours, parity.Linen(Refuses(), theirs.variables), x(), levels=["structure"])
    assert "actual (flax) raises ValueError: no such axis" in str(report)


# ---------------------------------------------------------------- rows


def test_a_row_is_checked_on_a_linen_layer():
    found = parity.check_rule(torch.nn.Linear(8, 3).eval(), parity.Linen(nn.Dense(3), None, x()), x())
    assert found.passed, str(found)
    assert parity.check_rule(torch.nn.LayerNorm(8).eval(), parity.Linen(nn.LayerNorm(), None, x())).problems


def test_a_row_of_the_users_own_for_a_linen_class(monkeypatch):
    from parity.weights import ledger, rules

    class Scale(nn.Module):
        power: int = 1

        @nn.compact
        def __call__(self, x):
            return x**self.power * self.param("factor", nn.initializers.ones, (8,))

    class TorchScale(torch.nn.Module):
        def __init__(self, power=1):
            super().__init__()
            self.gain, self.power = torch.nn.Parameter(torch.rand(8)), power

        def forward(self, x):
            return x**self.power * self.gain

    mine = list(rules.RULES)
    monkeypatch.setattr(rules, "RULES", mine)
    monkeypatch.setattr(ledger, "RULES", mine)
    parity.add_rule(TorchScale, Scale, parity.LeafRule("gain", "factor"), parity.Agree("power", "power"))
    assert parity.check_rule(TorchScale(2).eval(), parity.Linen(Scale(2), None, x()), x()).passed
    assert parity.check_rule(TorchScale(2).eval(), parity.Linen(Scale(3), None, x())).problems == (
        "the model: power=2 in torch, power=3 in Flax; set power=2",
    )
    with pytest.raises(parity.InputError, match=r"there is a row for torch.nn.Linear and flax.linen.Dense already"):
        parity.add_rule(torch.nn.Linear, nn.Dense)
