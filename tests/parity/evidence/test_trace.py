import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from evidence_pairs import (
    FlaxReLU,
    FlaxTwo,
    TorchReLU,
    TorchTwo,
    altered,
    attention,
    attention_inputs,
    normal,
    one_ulp,
    transferred,
    two,
)
from flax import nnx
from torch import nn

import parity


def calls(trace: parity.Trace) -> list[tuple[str, int]]:
    return [(step.path, step.call) for step in trace.steps]


# --------------------------------------------------------------- order and pairing


def test_steps_come_in_the_order_in_which_torch_finished_them():
    trace = parity.trace(*attention(), *attention_inputs())
    # By the alphabet it would be core, k, out, q, v.
    assert calls(trace) == [("q", 0), ("k", 0), ("v", 0), ("core", 0), ("out", 0), ("", 0)]
    assert trace.passed and trace.first_divergence() is None and not trace.unpaired
    trace.raise_for_divergence()
    assert str(trace) == "no divergence in 6 module calls"


@pytest.mark.parametrize(
    ("variable", "path", "last"),
    [("q.kernel", "q", None), ("k.kernel", "k", "q"), ("v.kernel", "v", "k"), ("out.kernel", "out", "core")],
)
def test_the_first_divergence_names_the_module_and_the_last_agreement_before_it(variable, path, last):
    torch_model, flax_model = attention()
    altered(flax_model, variable, one_ulp)
    trace = parity.trace(torch_model, flax_model, *attention_inputs())
    found = trace.first_divergence()
    assert (found.path, found.last_agreement, found.call) == (path, last, 0)
    assert found.ratio > 100
    assert not trace.passed
    with pytest.raises(parity.DivergenceError, match=f"{path}   first divergence"):
        trace.raise_for_divergence()


def test_what_agrees_although_something_before_it_did_not_is_seen_to_agree():
    torch_model, flax_model = attention("key and value swapped")
    trace = parity.trace(torch_model, flax_model, *attention_inputs())
    assert {step.path: step.agrees for step in trace.steps}["q"]
    assert [step.path for step in trace.steps if not step.agrees] == ["k", "v", "core", "out", ""]
    assert trace.first_divergence().last_agreement == "q"


def test_a_parameterless_core_has_a_path_and_its_outputs_have_names():
    found = parity.trace(*attention("scale"), *attention_inputs()).first_divergence()
    assert (found.path, found.output, found.last_agreement) == ("core", "[0]", "v")


def test_each_call_of_a_module_is_a_step():
    torch_model, flax_model = two()
    trace = parity.trace(torch_model, flax_model, normal(3, 4))
    assert calls(trace) == [("b", 0), ("b", 1), ("act", 0), ("a", 0), ("", 0)]

    class Forgetful(FlaxTwo):
        def __call__(self, x):
            # The right weights, but the second call gets what the first one got.
            self.b(x)
            return self.a(self.act(self.b(x)))

    found = parity.trace(*two(Forgetful), normal(3, 4)).first_divergence()
    assert (found.path, found.call, found.last_agreement) == ("b", 1, "b")
    assert "b, call 2   first divergence" in str(parity.trace(*two(Forgetful), normal(3, 4)))


def test_a_module_called_more_often_on_one_side_is_reported_not_blamed():
    class Eager(FlaxTwo):
        def __call__(self, x):
            self.b(2 * x)
            return self.a(self.act(self.b(self.b(x))))

    trace = parity.trace(*two(Eager), normal(3, 4))
    assert trace.passed and calls(trace) == [("act", 0), ("a", 0), ("", 0)]
    assert trace.unpaired == ("b (2 calls in torch, 3 seen in Flax)",)
    assert "not paired, so not looked into: b (2 calls in torch, 3 seen in Flax)" in str(trace)


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.drop, self.skip, self.act, self.b = (
            nn.Linear(4, 6),
            nn.Dropout(),
            nn.Identity(),
            nn.ReLU(),
            nn.Linear(6, 3),
        )

    def forward(self, x):
        return self.b(self.act(self.skip(self.drop(self.a(x)))))


class FlaxDropping(nnx.Module):
    def __init__(self, *, rngs):
        self.a, self.b = nnx.Linear(4, 6, rngs=rngs), nnx.Linear(6, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.b(nnx.relu(self.dropout(self.a(x))) * 1.5)


def test_modules_that_hand_on_what_they_are_given_are_not_told_as_not_looked_into():
    # Dropout in eval mode and Identity under names of one side alone; what computes something is told.
    pair = two(FlaxDropping, Dropping)
    trace = parity.trace(*pair, normal(3, 4))
    assert trace.unpaired == ("act (torch only)",)
    assert trace.first_divergence().between == ("act",)
    isolation = trace.isolated()
    assert isolation.unpaired == ("act (torch only)",) and [one.path for one in isolation.faults] == [""]


def test_modules_that_only_one_side_has_are_reported():
    class Fused(FlaxTwo):
        def __init__(self, *, rngs):
            super().__init__(rngs=rngs)
            self.act, self.relu = None, FlaxReLU()

        def __call__(self, x):
            return self.a(self.relu(self.b(self.b(x))))

    trace = parity.trace(*two(Fused), normal(3, 4))
    assert trace.passed
    assert trace.unpaired == ("act (torch only)", "relu (flax only)")
    renamed = parity.trace(*two(Fused), normal(3, 4), rename={"act": "relu"})
    assert ("act", 0) in calls(renamed) and not renamed.unpaired


class TorchShared(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.last = self.layers[0]

    def forward(self, x, *, gain=1.0):
        for layer in self.layers:
            x = layer(x)
        return {"y": self.last(x) * gain, "none": None}


class FlaxShared(nnx.Module):
    def __init__(self, *, rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)])
        self.last = self.layers[0]

    def __call__(self, x, *, gain=1.0):
        for layer in self.layers:
            x = layer(x)
        return {"y": self.last(x) * gain, "none": None}


def test_lists_and_shared_modules_go_by_their_first_path():
    torch_model, flax_model = transferred(TorchShared(), FlaxShared(rngs=nnx.Rngs(0)), "shared")
    trace = parity.trace(torch_model, flax_model, normal(3, 4), kwargs={"gain": 2.0})
    assert calls(trace) == [("layers.0", 0), ("layers.1", 0), ("layers.0", 1), ("", 0)]
    assert trace.passed and not trace.unpaired
    altered(flax_model, "layers.1.kernel", one_ulp)
    found = parity.trace(torch_model, flax_model, normal(3, 4), kwargs={"gain": 2.0}).first_divergence()
    assert (found.path, found.last_agreement) == ("layers.1", "layers.0")


class TorchGain(TorchTwo):
    def forward(self, x, *, gain=1.0):
        return {"y": super().forward(x) * gain, "none": None}


def test_keyword_arguments_reach_both_sides():
    class Gain(FlaxTwo):
        def __call__(self, x, *, gain=1.0):
            return {"y": super().__call__(x) * gain, "none": None}

    class Deaf(Gain):
        def __call__(self, x, *, gain=1.0):
            return super().__call__(x)

    assert parity.trace(*two(Gain, TorchGain), kwargs={"x": normal(3, 4), "gain": 3.0}).passed
    found = parity.trace(*two(Deaf, TorchGain), normal(3, 4), kwargs={"gain": 3.0}).first_divergence()
    assert (found.path, found.output) == ("", "['y']")


def test_lists_are_numbered():
    class TorchListed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())])

        def forward(self, x):
            return self.layers[1](self.layers[0](x))

    class FlaxListed(nnx.Module):
        def __init__(self, *, rngs):
            first, second = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
            self.layers = nnx.List([first, nnx.Sequential(second, FlaxReLU())])

        def __call__(self, x):
            return self.layers[1](self.layers[0](x))

    torch_model, flax_model = transferred(TorchListed(), FlaxListed(rngs=nnx.Rngs(0)), "listed")
    trace = parity.trace(torch_model, flax_model, normal(3, 4))
    assert calls(trace) == [("layers.0", 0), ("layers.1.0", 0), ("layers.1.1", 0), ("layers.1", 0), ("", 0)]
    flax_model.layers[1].layers[0].bias.set_value(flax_model.layers[1].layers[0].bias[...] + 1)
    found = parity.trace(torch_model, flax_model, normal(3, 4)).first_divergence()
    assert (found.path, found.last_agreement) == ("layers.1.0", "layers.0")


class TorchNested(TorchTwo):
    def forward(self, x):
        y = super().forward(x)
        return {"y": (y, [y.argmax(-1), "text"]), "n": 3}


@pytest.mark.parametrize(
    ("returns", "output", "says"),
    [
        (lambda y: {"y": (y, [y.argmax(-1), "text"]), "n": 3}, None, ""),
        (lambda y: {"y": (y + 1, [y.argmax(-1), "text"]), "n": 3}, "['y'][0]", ""),
        (lambda y: {"y": (y, [y.argmin(-1), "text"]), "n": 3}, "['y'][1][0]", ""),
        (lambda y: {"y": (y, [y.argmax(-1), "other"]), "n": 3}, "['y'][1][1]", "'text'.*'other'"),
        (lambda y: {"y": (y, [y.argmax(-1), "text"]), "n": 4}, "['n']", "3.*4"),
        (lambda y: {"y": (y, [y.argmax(-1), "text"])}, "['n']", "torch returns .* flax does not"),
        (lambda y: {"y": (y, [y.argmax(-1), "text"]), "n": 3, "m": y}, "['m']", "flax returns .* torch does not"),
        (lambda y: {"y": (y[:, None], [y.argmax(-1), "text"]), "n": 3}, "['y'][0]", r"shape \(3, 4\).*\(3, 1, 4\)"),
        (lambda y: {"y": (y.at[1, 2].set(jnp.nan), [y.argmax(-1), "text"]), "n": 3}, "['y'][0]", r"NaN .*first at \(1, 2\)"),
    ],
)
def test_any_tree_of_outputs_is_compared_leaf_by_leaf(returns, output, says):
    class Nested(FlaxTwo):
        def __call__(self, x):
            return returns(super().__call__(x))

    found = parity.trace(*two(Nested, TorchNested), normal(3, 4)).first_divergence()
    if output is None:
        assert found is None
        return
    assert (found.path, found.output, found.last_agreement) == ("", output, "a")

    assert re.search(says, found.reason)


# --------------------------------------------------------------- transformations of jax


def lifted(run: Any) -> type:
    class Lifted(FlaxTwo):
        def __call__(self, x):
            return self.a(self.act(run(self, x)))

    return Lifted


def scanned(self, x):
    return jax.lax.scan(lambda c, _: (self.b(c), None), x, None, length=2)[0]


TRANSFORMED = {
    "nnx.jit of a function": lambda self, x: nnx.jit(lambda m, x: m(m(x)))(self.b, x),
    "nnx.jit of one call": lambda self, x: self.b(nnx.jit(lambda m, x: m(x))(self.b, x)),
    "nnx.remat": lambda self, x: nnx.remat(lambda m, x: m(m(x)))(self.b, x),
    "nnx.vmap": lambda self, x: nnx.vmap(lambda m, x: m(m(x)), in_axes=(None, 0))(self.b, x),
    "jax.jit": lambda self, x: jax.jit(lambda x: self.b(self.b(x)))(x),
    "jax.checkpoint": lambda self, x: jax.checkpoint(lambda x: self.b(self.b(x)))(x),
    "jax.vmap": lambda self, x: jax.vmap(lambda x: self.b(self.b(x)))(x),
    "jax.lax.scan": scanned,
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_what_runs_inside_a_transformation_is_left_out_and_blames_nobody(name):
    trace = parity.trace(*two(lifted(TRANSFORMED[name])), normal(3, 4))
    assert trace.passed, str(trace)
    assert ("", 0) in calls(trace)
    assert any(entry.startswith("b (") for entry in trace.unpaired)


@pytest.mark.parametrize("name", ["nnx.jit of one call", "jax.lax.scan"])
def test_a_fault_behind_a_transformation_is_still_seen(name):
    torch_model, flax_model = two(lifted(TRANSFORMED[name]))
    altered(flax_model, "a.bias", one_ulp)
    trace = parity.trace(torch_model, flax_model, normal(3, 4))
    assert trace.first_divergence().path in ("a", "")


def test_a_compiled_call_of_the_whole_model():
    class Compiled(FlaxTwo):
        @nnx.jit
        def __call__(self, x):
            return self.a(self.act(self.b(self.b(x))))

    class Outer(Compiled):
        def __call__(self, x):
            return super().__call__(x)

    for flax_class in (Compiled, Outer):
        trace = parity.trace(*two(flax_class), normal(3, 4))
        assert trace.passed and calls(trace) == [("", 0)]


class TorchRecurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.i, self.h, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h, states = x[:, 0] * 0, []
        for step in x.unbind(1):
            h = torch.tanh(self.i(step) + self.h(h))
            states.append(h)
        return self.out(torch.stack(states, 1))


class FlaxCell(nnx.RNNCellBase):
    def __init__(self, i, h):
        self.i, self.h = i, h

    def __call__(self, carry, x):
        new = jnp.tanh(self.i(x) + self.h(carry))
        return new, new

    def initialize_carry(self, input_shape, rngs=None):
        return jnp.zeros((*input_shape[:-1], 4))

    @property
    def num_feature_axes(self):
        return 1


class FlaxRecurrent(nnx.Module):
    def __init__(self, *, rngs):
        self.i, self.h, self.out = (nnx.Linear(4, 4, rngs=rngs) for _ in range(3))
        self.rnn = nnx.RNN(FlaxCell(self.i, self.h))

    def __call__(self, x):
        return self.out(self.rnn(x, initial_carry=x[:, 0] * 0))


def test_a_scanned_recurrent_network_does_not_crash():
    torch_model, flax_model = transferred(TorchRecurrent(), FlaxRecurrent(rngs=nnx.Rngs(0)), "recurrent")
    trace = parity.trace(torch_model, flax_model, normal(3, 5, 4))
    assert trace.passed and calls(trace) == [("out", 0), ("", 0)]
    assert parity.compare(torch_model, flax_model, normal(3, 5, 4), modes="compiled").passed
    altered(flax_model, "h.kernel", one_ulp)
    assert parity.trace(torch_model, flax_model, normal(3, 5, 4)).first_divergence().path == "out"


# --------------------------------------------------------------- user code stays as it is


class Inheriting(FlaxTwo):
    def __call__(self, x):
        return super().__call__(x)


class Raising(FlaxTwo):
    def __call__(self, x):
        self.b(x)
        raise RuntimeError("half way")


def state_of(model: nnx.Module) -> dict[str, Any]:
    return {"/".join(map(str, path)): (id(leaf), id(leaf.get_value())) for path, leaf in nnx.to_flat_state(nnx.state(model))}


@pytest.mark.parametrize("flax_class", [FlaxTwo, Inheriting, Raising, lifted(scanned)])
def test_classes_hooks_and_state_are_as_before(flax_class):
    torch_model, flax_model = two(flax_class)
    classes = (flax_class, *flax_class.__mro__, nnx.Linear, FlaxReLU)
    before = [vars(cls).get("__call__") for cls in classes]
    attributes, state = {**vars(flax_model)}, state_of(flax_model)
    trace = parity.trace(torch_model, flax_model, normal(3, 4))
    assert trace.passed == (flax_class is not Raising)
    assert all(vars(cls).get("__call__") is call for cls, call in zip(classes, before, strict=True))
    assert "__call__" not in vars(Inheriting.__mro__[2])
    assert vars(flax_model).keys() == attributes.keys() and state_of(flax_model) == state
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in torch_model.modules())


def test_an_inherited_call_that_calls_super_is_one_step():
    assert calls(parity.trace(*two(Inheriting), normal(3, 4))) == [("b", 0), ("b", 1), ("act", 0), ("a", 0), ("", 0)]


def test_a_flax_model_that_raises_is_a_divergence_with_its_words():
    found = parity.trace(*two(Raising), normal(3, 4)).first_divergence()
    assert (found.path, found.reason) == ("", "Flax raises RuntimeError: half way")


def test_a_torch_model_that_raises_leaves_no_hook():
    class Broken(TorchTwo):
        def forward(self, x):
            self.b(x)
            raise RuntimeError("half way")

    torch_model, flax_model = two(torch_class=Broken)
    with pytest.raises(parity.InputError, match="the torch model refuses these inputs: RuntimeError: half way"):
        parity.trace(torch_model, flax_model, normal(3, 4))
    assert not any(module._forward_hooks for module in torch_model.modules())


# --------------------------------------------------------------- what else a reader must know


def test_a_module_that_pins_a_dtype_is_named_with_the_reason():
    class Pinned(FlaxTwo):
        def __init__(self, *, rngs):
            super().__init__(rngs=rngs)
            self.a = nnx.Linear(4, 4, dtype=jnp.bfloat16, rngs=rngs)

    found = parity.trace(*two(Pinned), normal(3, 4)).first_divergence()
    assert found.path == "a"
    assert "Flax returns bfloat16 in a float64 run" in found.reason


def test_complex_numbers_are_compared_in_both_parts():
    class TorchFourier(TorchTwo):
        def forward(self, x):
            return torch.fft.fft(super().forward(x))

    class FlaxFourier(FlaxTwo):
        def __call__(self, x):
            return jnp.fft.fft(super().__call__(x))

    class Conjugated(FlaxTwo):
        def __call__(self, x):
            return jnp.conj(jnp.fft.fft(super().__call__(x)))

    class Real(FlaxTwo):
        def __call__(self, x):
            return jnp.fft.fft(super().__call__(x)).real

    assert parity.trace(*two(FlaxFourier, TorchFourier), normal(3, 4)).passed
    found = parity.trace(*two(Conjugated, TorchFourier), normal(3, 4)).first_divergence()
    assert (found.path, found.last_agreement, found.worst[-1]) == ("", "a", 1)
    found = parity.trace(*two(Real, TorchFourier), normal(3, 4)).first_divergence()
    assert found.reason == "expected (torch) complex128, actual (flax) float64"


def test_a_trace_is_plain_data():
    torch_model, flax_model = two()
    altered(flax_model, "b.bias", lambda bias: bias * np.float32(np.nan))
    trace = parity.trace(torch_model, flax_model, normal(3, 4))
    data = json.loads(json.dumps(trace.to_dict(), allow_nan=False))
    assert data["passed"] is False
    assert data["steps"][0]["divergence"]["path"] == "b"
    assert "NaN or infinity on one side only" in str(trace)


def test_the_models_come_in_order_and_are_checked_first():
    torch_model, flax_model = two()
    with pytest.raises(parity.InputError, match="the torch model comes first, the Flax model second"):
        parity.trace(flax_model, torch_model, normal(3, 4))
    with pytest.raises(parity.InputError, match=r"args\[0\] is float64 and the torch model computes in float32"):
        parity.trace(torch_model, flax_model, normal(3, 4, dtype=np.float64))


def test_both_kinds_of_container_without_parameters():
    class TorchEmpty(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = TorchReLU()

        def forward(self, x):
            return self.act(x)

    class FlaxEmpty(nnx.Module):
        def __init__(self):
            self.act = FlaxReLU()

        def __call__(self, x):
            return self.act(x)

    assert calls(parity.trace(TorchEmpty().eval(), FlaxEmpty(), normal(3, 4))) == [("act", 0), ("", 0)]


class TorchPlaces(nn.Module):
    """Adds positions looked up for a batch of one, as most encoders do."""

    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(7, 6)
        self.out = nn.Linear(6, 4)

    def forward(self, x):
        return self.out(x + self.places(torch.arange(x.shape[1])[None]))


class FlaxPlaces(nnx.Module):
    def __init__(self, *, rngs, shift=0):
        self.places, self.shift = nnx.Embed(7, 6, rngs=rngs), shift
        self.out = nnx.Linear(6, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(x + self.places(jnp.arange(x.shape[1]) + self.shift))


def test_an_axis_of_one_that_the_sum_broadcasts_away_is_no_divergence():
    trace = parity.trace(*transferred(TorchPlaces(), FlaxPlaces(rngs=nnx.Rngs(0))), normal(3, 5, 6))
    assert trace.passed and trace.isolated().passed
    assert trace.steps[0].note == "output has shape (1, 5, 6) in torch, (5, 6) in flax"
    found = parity.trace(*transferred(TorchPlaces(), FlaxPlaces(rngs=nnx.Rngs(0), shift=1)), normal(3, 5, 6)).first_divergence()
    assert (found.path, found.reason) == ("places", "") and found.differing == 30


# --------------------------------------------------------------- several modules of Flax with one array


class TorchTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.out = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.a(torch.tanh(self.a(x))))


class FlaxTied(nnx.Module):
    """What torch calls twice is two modules with one kernel."""

    def __init__(self, *, rngs, factor=1.0):
        self.a, self.again, self.out = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)
        self.again.kernel, self.again.bias = self.a.kernel, self.a.bias
        self.factor = factor

    def __call__(self, x):
        return self.out(self.again(jnp.tanh(self.a(x)) * self.factor))


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_modules_with_one_array_are_the_calls_of_torchs_one(factor):
    pair = transferred(TorchTwice(), FlaxTied(rngs=nnx.Rngs(0), factor=factor), "twice")
    trace = parity.trace(*pair, normal(3, 4))
    assert calls(trace) == [("a", 0), ("a", 1), ("out", 0), ("", 0)] and not trace.unpaired
    assert trace.passed is (factor == 1.0), str(trace)
    if not trace.passed:
        found = trace.first_divergence()
        assert (found.path, found.call, found.inputs) == ("a", 1, "differ")


class TorchTiedHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.line = nn.Embedding(7, 4), nn.Linear(4, 4)

    def forward(self, ids):
        return self.line(self.table(ids)) @ self.table.weight.T


class FlaxHead(nnx.Module):
    def __init__(self, table):
        self.embedding = table

    def __call__(self, x):
        return x @ self.embedding[...].T


class FlaxTiedHead(nnx.Module):
    def __init__(self, *, rngs):
        self.table, self.line = nnx.Embed(7, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
        self.head = FlaxHead(self.table.embedding)

    def __call__(self, ids):
        return self.head(self.line(self.table(ids)))


def test_a_module_for_what_is_code_in_torch_leaves_the_one_that_it_shares_an_array_with_paired():
    pair = transferred(TorchTiedHead(), FlaxTiedHead(rngs=nnx.Rngs(0)), "tied head")
    trace = parity.trace(*pair, np.array([[0, 3, 6], [2, 5, 1]]))
    assert trace.passed and calls(trace) == [("table", 0), ("line", 0), ("", 0)]
    assert trace.unpaired == ("head (flax only)",)
