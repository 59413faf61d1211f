"""Every wrong module is found in one run, and none is blamed for its neighbour."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from evidence_pairs import (
    FlaxCore,
    FlaxTwo,
    TorchTwo,
    altered,
    attention,
    attention_inputs,
    block,
    draw,
    normal,
    one_ulp,
    transferred,
    two,
)
from flax import nnx
from torch import nn

import parity
from parity.evidence.conventions import MASK, one_mask
from parity.evidence.operations import isolated as isolate
from parity.evidence.subject import Subject


def isolated(pair: tuple[Any, Any], *inputs: Any, **options: Any) -> parity.Isolation:
    return parity.trace(*pair, *inputs, **options).isolated()


def faults(isolation: parity.Isolation) -> dict[str, list[str]]:
    """The places that differ, by the path of each wrong module."""
    return {one.path: [d.where for d in one.differences] for one in isolation.faults}


# --------------------------------------------------------------- one fault, and where it is


@pytest.mark.parametrize(
    ("fault", "path", "where"),
    [
        ("scale", "core", {"output [0]", "output [1]"}),
        ("mask off by one", "core", {"output [0]", "output [1]"}),
        ("nan", "core", {"output [0]", "output [1]"}),
        ("no bias", "out", {"output"}),
        ("merged by reshape", "", {"what it gives out: args[0]"}),
        ("split by reshape", "", {f"what it gives core: args[{i}]" for i in range(3)}),
        ("key and value swapped", "", {"what it gives k: args[0]", "what it gives v: args[0]"}),
        ("kernel transposed in code", "", {"output [0]"}),
        ("output missing", "", {"output [0]", "output [1]", "output"}),
        ("output extra", "", {"output [2]"}),
        ("shape", "", {"output [0]"}),
        ("raises", "", {"output"}),
    ],
)
def test_one_module_is_blamed_for_what_it_computes_itself(fault, path, where):
    isolation = isolated(attention(fault), *attention_inputs(), ignore=("out.bias",) if fault == "no bias" else ())
    assert not isolation.passed
    assert {name: set(places) for name, places in faults(isolation).items()} == {path: where}
    with pytest.raises(parity.DivergenceError, match="1 wrong module of 6 modules"):
        isolation.raise_for_divergence()


def test_a_composite_is_told_from_the_modules_that_it_calls():
    text = str(isolated(attention("merged by reshape"), *attention_inputs()))
    assert "the model   differs, alone: the fault is in its own code, between the modules that it calls" in text
    assert "what it gives out: args[0]: 72 of 96 values differ" in text


@pytest.mark.parametrize("pair", [attention, block])
def test_clean_pairs_have_no_wrong_module(pair):
    isolation = isolated(pair(), *(attention_inputs() if pair is attention else (normal(3, 4, 8),)))
    assert isolation.passed and not isolation.faults and not isolation.unpaired
    assert all(one.status == "agrees" for one in isolation.modules)
    assert str(isolation).startswith("0 wrong modules of ")
    isolation.raise_for_divergence()


# --------------------------------------------------------------- several faults


def test_every_wrong_module_is_found_however_many_there_are():
    torch_model, flax_model = attention("key and value swapped")
    flax_model.core = FlaxCore("scale")
    altered(flax_model, "q.kernel", one_ulp)
    altered(flax_model, "out.bias", one_ulp)
    found = faults(isolated((torch_model, flax_model), *attention_inputs()))
    assert set(found) == {"q", "core", "out", ""}
    # What the model returns is made by `out`, which answers as torch's does.
    assert set(found[""]) == {"what it gives k: args[0]", "what it gives v: args[0]"}


class Cancelling(FlaxTwo):
    def __call__(self, x):
        return self.a(self.act(self.b(self.b(x)))) - 1


def test_faults_that_cancel_are_both_found():
    torch_model, flax_model = two(Cancelling)
    altered(flax_model, "a.bias", lambda bias: bias + 1)
    trace = parity.trace(torch_model, flax_model, normal(3, 4))
    assert trace.steps[-1].ratio < 1e9, "they cancel but for the rounding of the bias"
    assert set(faults(trace.isolated())) == {"a", ""}


# --------------------------------------------------------------- calls


def test_each_call_of_a_module_gets_what_torchs_call_got():
    class Forgetful(FlaxTwo):
        def __call__(self, x):
            self.b(x)
            return self.a(self.act(self.b(x)))

    isolation = isolated(two(Forgetful), normal(3, 4))
    assert faults(isolation) == {"": ["what it gives b, call 2: args[0]"]}
    assert [(one.path, one.call) for one in isolation.modules] == [("b", 0), ("b", 1), ("act", 0), ("a", 0), ("", 0)]


def test_a_module_that_flax_calls_more_often_runs_for_itself():
    class Eager(FlaxTwo):
        def __call__(self, x):
            self.b(2 * x)
            return self.a(self.act(self.b(self.b(x))))

    assert isolated(two(Eager), normal(3, 4)).passed
    torch_model, flax_model = two(Eager)
    altered(flax_model, "b.bias", lambda bias: bias + 1)
    isolation = isolated((torch_model, flax_model), normal(3, 4))
    # Only its own code could be told from `b`: it gets the wrong answers of `b`.
    assert set(faults(isolation)) == {"b"}
    (model,) = [one for one in isolation.modules if one.path == ""]
    assert (model.status, "could not be told from b" in model.note) == ("follows", True)


class TorchTree(nn.Module):
    """Tuples, mappings and keywords, in and out."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = TorchTreeInner(), nn.Linear(4, 4)

    def forward(self, x):
        found = self.inner({"x": x, "pair": (x + 1, x * 2)}, gain=torch.ones(4) * 3, power=2)
        return self.last(found["sum"] + found["parts"][1])


class TorchTreeInner(nn.Module):
    def forward(self, tree, *, gain, power, text="kept"):
        a, b = tree["pair"]
        return {"sum": tree["x"] * gain + a**power, "parts": (a, b * gain), "text": text}


class FlaxTreeInner(nnx.Module):
    def __init__(self, fault: bool):
        self.fault = fault

    def __call__(self, tree, *, gain, power, text="kept"):
        a, b = tree["pair"]
        return {"sum": tree["x"] * gain + a**power, "parts": (a, b * gain * (1.5 if self.fault else 1)), "text": text}


class FlaxTree(nnx.Module):
    def __init__(self, fault: str = "", *, rngs: nnx.Rngs):
        self.inner, self.last, self.fault = FlaxTreeInner(fault == "inner"), nnx.Linear(4, 4, rngs=rngs), fault

    def __call__(self, x):
        pair = (x * 2, x + 1) if self.fault == "pair" else (x + 1, x * 2)
        gain, power = jnp.ones(4) * (2 if self.fault == "gain" else 3), 3 if self.fault == "power" else 2
        found = self.inner({"x": x, "pair": pair}, gain=gain, power=power)
        return self.last(found["sum"] + found["parts"][0 if self.fault == "part" else 1])


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("", {}),
        ("inner", {"inner": ["output ['parts'][1]"]}),
        ("pair", {"": ["what it gives inner: args[0]['pair'][0]", "what it gives inner: args[0]['pair'][1]"]}),
        ("gain", {"": ["what it gives inner: kwargs['gain']"]}),
        ("power", {"": ["what it gives inner: kwargs['power']"]}),
        ("part", {"": ["what it gives last: args[0]"]}),
    ],
)
def test_trees_and_keywords_are_taken_apart(fault, found):
    pair = transferred(TorchTree(), FlaxTree(fault, rngs=nnx.Rngs(0)), "tree")
    assert {path: sorted(places) for path, places in faults(isolated(pair, normal(3, 4))).items()} == found
    if fault == "power":
        (cause,) = parity.diagnose(*pair, normal(3, 4)).causes
        assert cause.what == "what it gives inner: kwargs['power'] is 3 where torch gives 2"
        assert (cause.hypothesis, cause.change) == ("setting that is passed on", "pass 2")


class TorchShared(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.last = self.layers[0]

    def forward(self, x):
        return self.last(self.layers[1](self.layers[0](x)))


class FlaxShared(nnx.Module):
    def __init__(self, *, rngs):
        self.last = nnx.Linear(4, 4, rngs=rngs)
        self.layers = nnx.List([self.last, nnx.Linear(4, 4, rngs=rngs)])

    def __call__(self, x):
        return self.last(self.layers[1](self.layers[0](x)))


def test_lists_and_shared_modules():
    torch_model, flax_model = transferred(TorchShared(), FlaxShared(rngs=nnx.Rngs(0)), "shared")
    isolation = isolated((torch_model, flax_model), normal(3, 4))
    assert isolation.passed and not isolation.unpaired
    assert [(one.path, one.call) for one in isolation.modules][:3] == [("layers.0", 0), ("layers.1", 0), ("layers.0", 1)]
    altered(flax_model, "last.kernel", one_ulp)
    assert set(faults(isolated((torch_model, flax_model), normal(3, 4)))) == {"layers.0"}


# --------------------------------------------------------------- transformations of jax


def lifted(run: Any) -> type:
    class Lifted(FlaxTwo):
        def __call__(self, x):
            return self.a(self.act(run(self, x)))

    return Lifted


def scanned(self, x):
    return jax.lax.scan(lambda c, _: (self.b(c), None), x, None, length=2)[0]


TRANSFORMED = {
    "nnx.jit": lambda self, x: nnx.jit(lambda m, x: m(m(x)))(self.b, x),
    "nnx.remat": lambda self, x: nnx.remat(lambda m, x: m(m(x)))(self.b, x),
    "nnx.vmap": lambda self, x: nnx.vmap(lambda m, x: m(m(x)), in_axes=(None, 0))(self.b, x),
    "jax.jit": lambda self, x: jax.jit(lambda x: self.b(self.b(x)))(x),
    "jax.lax.scan": scanned,
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_what_runs_inside_a_transformation_is_judged_alone_all_the_same(name):
    assert isolated(two(lifted(TRANSFORMED[name])), normal(3, 4)).passed
    torch_model, flax_model = two(lifted(TRANSFORMED[name]))
    altered(flax_model, "b.kernel", one_ulp)
    assert set(faults(isolated((torch_model, flax_model), normal(3, 4)))) == {"b"}


class TorchRecurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = TorchCell(), nn.Linear(4, 4)

    def forward(self, x):
        h, states = x[:, 0] * 0, []
        for step in x.unbind(1):
            h, y = self.cell(h, step)
            states.append(y)
        return self.out(torch.stack(states, 1))


class TorchCell(nn.Module):
    def __init__(self):
        super().__init__()
        self.i, self.h = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, h, x):
        new = torch.tanh(self.i(x) + self.h(h))
        return new, new


class FlaxCell(nnx.RNNCellBase):
    def __init__(self, fault: bool, *, rngs):
        self.i, self.h = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
        self.fault = fault

    def __call__(self, carry, x):
        new = jnp.tanh(self.i(x) + self.h(carry) * (0.5 if self.fault else 1))
        return new, new

    def initialize_carry(self, input_shape, rngs=None):
        return jnp.zeros((*input_shape[:-1], 4))

    @property
    def num_feature_axes(self):
        return 1


class FlaxRecurrent(nnx.Module):
    def __init__(self, fault: bool = False, *, rngs: nnx.Rngs):
        self.out = nnx.Linear(4, 4, rngs=rngs)
        self.rnn = nnx.RNN(FlaxCell(fault, rngs=rngs))

    def __call__(self, x):
        return self.out(self.rnn(x, initial_carry=x[:, 0] * 0))


def recurrent(fault: bool = False) -> tuple[nn.Module, nnx.Module]:
    return transferred(TorchRecurrent(), FlaxRecurrent(fault, rngs=nnx.Rngs(0)), "recurrent", rename={"cell": "rnn.cell"})


def test_a_cell_that_jax_scans_is_judged_at_each_of_torchs_steps():
    options = dict(rename={"cell": "rnn.cell"})
    isolation = isolated(recurrent(), normal(3, 5, 4), **options)
    assert isolation.passed, str(isolation)
    assert sum(one.path == "cell" for one in isolation.modules) == 5
    assert set(faults(isolated(recurrent(True), normal(3, 5, 4), **options))) == {"cell"}
    torch_model, flax_model = recurrent()
    altered(flax_model, "rnn.cell.h.kernel", one_ulp)
    assert set(faults(isolated((torch_model, flax_model), normal(3, 5, 4), **options))) == {"cell.h"}


# --------------------------------------------------------------- pairing


class FlaxOtherNames(nnx.Module):
    """`b` and `a` go by the transfer's plan, `act` by the order of calls."""

    def __init__(self, *, rngs):
        self.first, self.second = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
        self.nonlinearity = FlaxReLU()

    def __call__(self, x):
        return self.second(self.nonlinearity(self.first(self.first(x))))


class FlaxReLU(nnx.Module):
    def __call__(self, x):
        return jax.nn.relu(x)


def test_modules_are_paired_by_name_by_plan_and_by_the_order_of_calls():
    rename = {"b.weight": "first.kernel", "b.bias": "first.bias", "a": "second"}
    pair = transferred(TorchTwo(), FlaxOtherNames(rngs=nnx.Rngs(0)), "names", rename=rename)
    isolation = isolated(pair, normal(3, 4), rename=rename)
    assert isolation.passed and not isolation.unpaired
    decided = {one.path: (one.flax_path, one.decided_by) for one in isolation.modules}
    assert decided == {
        "b": ("first", "plan"),
        "a": ("second", "plan"),
        "act": ("nonlinearity", "call order"),
        "": ("", "name"),
    }


def test_modules_without_a_partner_are_named():
    class Inlined(FlaxTwo):
        def __init__(self, *, rngs):
            super().__init__(rngs=rngs)
            self.act, self.sum = None, FlaxSum()

        def __call__(self, x):
            return self.sum(self.a(jax.nn.relu(self.b(self.b(x)))))

    class FlaxSum(nnx.Module):
        def __call__(self, x):
            return x

    isolation = isolated(two(Inlined), normal(3, 4))
    # What hands on what it is given has nothing to look into.
    assert isolation.passed and isolation.unpaired == ("act (torch only)",)
    assert "not paired: act (torch only)" in str(isolation)


# --------------------------------------------------------------- other orders of axes


class TorchConvolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.block = TorchScaled()
        self.fc = nn.Linear(3 * 4 * 4, 5)

    def forward(self, x):
        return self.fc(self.block(self.norm(self.conv(x)).relu()).flatten(1))


class TorchScaled(nn.Module):
    def forward(self, x):
        return x * torch.arange(1, 4, dtype=x.dtype)[:, None, None]


class FlaxScaled(nnx.Module):
    def __init__(self, fault: bool):
        self.fault = fault

    def __call__(self, x):
        return x * jnp.arange(1, 4, dtype=x.dtype) * (1.25 if self.fault else 1)


class FlaxConvolutional(nnx.Module):
    def __init__(self, fault: str = "", *, rngs: nnx.Rngs):
        self.fault = fault
        padding = ((0, 2), (0, 2)) if fault == "conv" else 1
        self.conv = nnx.Conv(2, 3, (3, 3), padding=padding, rngs=rngs)
        self.norm = nnx.BatchNorm(3, epsilon=1e-5, momentum=0.9, use_running_average=True, use_fast_variance=False, rngs=rngs)
        self.block = FlaxScaled(fault == "block")
        self.fc = nnx.Linear(3 * 4 * 4, 5, rngs=rngs)

    def __call__(self, x):
        x = self.block(jax.nn.relu(self.norm(self.conv(x.transpose(0, 2, 3, 1)))))
        x = x if self.fault == "flatten" else x.transpose(0, 3, 1, 2)
        return self.fc(x.reshape(x.shape[0], -1))


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("", {}),
        ("conv", {"conv": ["output"]}),
        ("block", {"block": ["output"]}),
        ("flatten", {"": ["what it gives fc: args[0]"]}),
    ],
)
def test_channels_last_is_handled_where_a_rule_or_the_model_itself_tells(fault, found):
    torch_model, flax_model = draw(TorchConvolutional(), "conv"), FlaxConvolutional(fault, rngs=nnx.Rngs(0))
    torch_model.norm.running_mean.copy_(torch.from_numpy(normal(3, name="mean")))
    parity.transfer(torch_model, flax_model)
    isolation = isolated((torch_model, flax_model), normal(2, 2, 4, 4))
    assert faults(isolation) == found, str(isolation)
    assert all(one.status in ("agrees", "differs") for one in isolation.modules)
    divergence = parity.trace(torch_model, flax_model, normal(2, 2, 4, 4)).first_divergence()
    assert (divergence and divergence.path) == {"": None, "conv": "conv", "block": "block", "flatten": "fc"}[fault]


class FlaxEncoderLayer(nnx.Module):
    def __init__(self, epsilon: float, *, rngs: nnx.Rngs):
        self.self_attn = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.linear1, self.linear2 = nnx.Linear(8, 12, rngs=rngs), nnx.Linear(12, 8, rngs=rngs)
        self.norm1 = nnx.LayerNorm(8, epsilon=epsilon, use_fast_variance=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(8, epsilon=1e-5, use_fast_variance=False, rngs=rngs)

    def __call__(self, x):
        x = self.norm1(x + self.self_attn(x, x, x))
        return self.norm2(x + self.linear2(jax.nn.relu(self.linear1(x))))


@pytest.mark.parametrize(("epsilon", "found"), [(1e-5, set()), (1e-4, {"norm1"})])
def test_an_encoder_layer_that_torch_would_fuse_is_taken_apart(epsilon, found):
    pair = transferred(
        nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), FlaxEncoderLayer(epsilon, rngs=nnx.Rngs(0)), "encoder"
    )
    isolation = isolated(pair, normal(3, 5, 8))
    assert set(faults(isolation)) == found
    assert {"self_attn", "linear1", "norm1", "linear2", "norm2"} <= {one.path for one in isolation.modules}


class Holder(nn.Module):
    def __init__(self, core):
        super().__init__()
        self.core = core

    def forward(self, *args, **kwargs):
        return self.core(*args, **kwargs)


class FlaxHolder(nnx.Module):
    def __init__(self, core, call):
        self.core, self.call = core, call

    def __call__(self, *args, **kwargs):
        return self.call(self.core, *args, **kwargs)


def held(layer: nn.Module, flax_layer: nnx.Module, call: Any) -> tuple[nn.Module, nnx.Module]:
    torch_model = draw(Holder(layer), "held", type(layer).__name__)
    with torch.no_grad():
        for name, parameter in torch_model.named_parameters():
            # Flax's cells have one bias.
            if "bias_hh" in name:
                parameter.zero_()
    flax_model = FlaxHolder(flax_layer, call)
    flax_model.eval()
    parity.transfer(torch_model, flax_model)
    return torch_model, flax_model


def attend(core, q, k, v, key_padding_mask=None):
    return core(q, k, v, mask=None if key_padding_mask is None else ~key_padding_mask[:, None, None, :]), None


RULED = {
    "lstm": (
        lambda: nn.LSTM(4, 6),
        lambda rngs: nnx.RNN(nnx.OptimizedLSTMCell(4, 6, rngs=rngs), time_major=False),
        lambda core, x: (core(x.swapaxes(0, 1)).swapaxes(0, 1), None),
        lambda: (normal(5, 3, 4),),
    ),
    "lstm cell": (
        lambda: nn.LSTMCell(4, 6),
        lambda rngs: nnx.LSTMCell(4, 6, rngs=rngs),
        lambda core, x, state: core((state[1], state[0]), x)[0][::-1],
        lambda: (normal(3, 4), (normal(3, 6), normal(3, 6, name=1))),
    ),
    "gru cell": (
        lambda: nn.GRUCell(4, 6),
        lambda rngs: nnx.GRUCell(4, 6, rngs=rngs),
        lambda core, x, h: core(h, x)[0],
        lambda: (normal(3, 4), normal(3, 6)),
    ),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda rngs: nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs),
        attend,
        lambda: (*(normal(3, 5, 8, name=name) for name in "qkv"), np.arange(5) >= np.array([[5], [4], [2]])),
    ),
}


@pytest.mark.parametrize("name", RULED)
def test_layers_that_are_called_otherwise_in_flax_are_paired_by_their_rule(name):
    layer, flax_layer, call, inputs = RULED[name]
    pair = held(layer(), flax_layer(nnx.Rngs(0)), call)
    isolation = isolated(pair, *inputs())
    (core,) = [one for one in isolation.modules if one.path == "core"]
    assert core.status == "agrees", str(isolation)
    assert [step.agrees for step in parity.trace(*pair, *inputs()).steps if step.path == "core"] == [True]
    assert isolation.passed or name in ("lstm", "attention"), "the holder returns less than torch's"
    leaf = next(
        path for path in ("cell.dense_h.kernel", "hi.kernel", "dense_h.kernel", "query.kernel") if has(pair[1].core, path)
    )
    altered(pair[1], f"core.{leaf}", one_ulp)
    assert "core" in faults(isolated(pair, *inputs()))


def has(model: Any, path: str) -> bool:
    for part in path.split("."):
        if not hasattr(model, part):
            return False
        model = getattr(model, part)
    return True


def test_a_pair_that_cannot_be_called_alike_is_said_not_to_be_comparable():
    class Packed(FlaxTwo):
        """Wants its input in one row."""

        def __call__(self, x):
            return self.a(self.act(self.b(self.b(x))))

    class FlaxFlat(nnx.Module):
        def __init__(self, *, rngs):
            self.two = Flat(rngs=rngs)

        def __call__(self, x):
            return self.two(x.reshape(-1)).reshape(x.shape)

    class Flat(FlaxTwo):
        def __call__(self, x):
            return super().__call__(x.reshape(3, 4)).reshape(12)

    class TorchOuter(nn.Module):
        def __init__(self):
            super().__init__()
            self.two = TorchTwo()

        def forward(self, x):
            return self.two(x)

    pair = transferred(TorchOuter(), FlaxFlat(rngs=nnx.Rngs(0)), "flat")
    isolation = isolated(pair, normal(3, 4))
    status = {one.path: one.status for one in isolation.modules}
    assert status["two.a"] == status["two.b"] == "agrees"
    assert not isolation.faults, str(isolation)
    # It is given the same numbers with its axes joined, and answers so: whoever calls it knows.
    assert status["two"] == "agrees"


def test_a_module_that_wants_more_than_torch_gives_is_said_not_to_be_comparable():
    class Scaled(FlaxTwo):
        def __init__(self, *, rngs):
            super().__init__(rngs=rngs)
            self.act = Stretched()

        def __call__(self, x):
            return self.a(jax.jit(lambda y: self.act(y, y * 0 + 1))(self.b(self.b(x))))

    class Stretched(nnx.Module):
        def __call__(self, x, factor):
            return jax.nn.relu(x * factor)

    isolation = isolated(two(Scaled), normal(3, 4))
    (act,) = [one for one in isolation.modules if one.path == "act"]
    assert act.status == "not comparable" and isolation.passed, str(isolation)
    assert act.note.startswith("called alone as torch's module is called, Flax raises TypeError: ")
    assert "missing 1 required positional argument: 'factor'" in act.note


def test_what_both_sides_refuse_is_refused():
    class Broken(TorchTwo):
        def forward(self, x):
            raise RuntimeError("half way")

    subject = Subject(*two(torch_class=Broken), (normal(3, 4),), {}, gradients=False)
    with pytest.raises(parity.InputError, match="the torch model refuses these inputs: RuntimeError: half way"):
        isolate(subject)


def test_masks_of_torchs_attention_become_the_one_of_flax():
    padding, pairs = np.array([[0, 0, 1], [0, 0, 0]], bool), np.triu(np.ones((3, 3), bool), 1)
    x = normal(2, 3, 8)
    found = one_mask({"args[0]": x, "kwargs['key_padding_mask']": padding, "kwargs['attn_mask']": pairs})
    assert set(found) == {"args[0]", MASK}
    assert (found[MASK] == ~(padding[:, None, None, :] | pairs)).all()
    # One for each head and batch entry, and minus infinity for True.
    heads = np.where(np.stack([pairs] * 4), -np.inf, 0)
    assert (one_mask({"args[0]": x, "args[5]": heads})[MASK] == ~np.broadcast_to(pairs, (2, 2, 3, 3))).all()
    assert one_mask({"args[0]": x})[MASK].all()
    added = {"args[0]": x, "kwargs['attn_mask']": np.full((3, 3), 0.5)}
    assert one_mask(added) == added, "numbers that are added are no switch"


def test_an_isolation_is_plain_data_and_leaves_the_models_alone():
    torch_model, flax_model = attention("scale")
    before = vars(FlaxCore)["__call__"]
    trace = parity.trace(torch_model, flax_model, *attention_inputs())
    data = json.loads(json.dumps(trace.isolated().to_dict(), allow_nan=False))
    assert [one["status"] for one in data["modules"]] == ["agrees"] * 3 + ["differs", "agrees", "agrees"]
    assert vars(FlaxCore)["__call__"] is before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in torch_model.modules())
    assert torch.backends.mha.get_fastpath_enabled() and torch.backends.cuda.flash_sdp_enabled()
    json.dumps(trace.to_dict(), allow_nan=False)


def test_a_trace_made_by_hand_cannot_be_isolated():
    with pytest.raises(parity.InputError, match=r"this trace holds no models to run; take one from parity.trace"):
        parity.Trace(()).isolated()


class TorchNested(nn.Module):
    """A layer whose parts lie in two modules, as checkpoints name them."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return (torch.softmax(self.query(x) @ self.key(x).transpose(-1, -2) / 6**0.5, -1) @ x,)

    def __init__(self):
        super().__init__()
        self.inner, self.dense = self.Inner(), nn.Linear(6, 6)

    def forward(self, x):
        return self.dense(self.inner(x)[0])


class FlaxUnrolled(nnx.Module):
    """The same with everything in one module."""

    def __init__(self, *, rngs, scale=6**0.5):
        self.scale = scale
        for name in ("query", "key", "dense"):
            setattr(self, name, nnx.Linear(6, 6, rngs=rngs))

    def __call__(self, x):
        weights = jax.nn.softmax(self.query(x) @ jnp.swapaxes(self.key(x), -1, -2) / self.scale, -1)
        return self.dense(weights @ x)


class TorchStack(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


class Stack(nnx.Module):
    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x):
        return self.layer(x)


@pytest.mark.parametrize("scale", [6**0.5, 6.0])
def test_a_module_that_the_port_unrolls_into_its_parent_is_not_taken_for_the_parent(scale):
    rename = {"layer.inner.query": "layer.query", "layer.inner.key": "layer.key"}
    pair = transferred(TorchStack(TorchNested()), Stack(FlaxUnrolled(rngs=nnx.Rngs(0), scale=scale)), rename=rename)
    isolation = isolated(pair, normal(2, 5, 6), rename=rename)
    assert isolation.unpaired == ("layer.inner (torch only)",)
    assert faults(isolation) == ({} if scale == 6**0.5 else {"layer": ["what it gives layer.dense: args[0]"]})
