"""Every wrong module of a Linen model is found in one run, in either style, and none is blamed for its neighbour."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from evidence_pairs import draw, normal, one_ulp
from flax import linen as nn
from linen_pairs import RENAMES, STYLES, SetupEncoder, altered, convolutions, encoder, images, x

import parity
from parity.evidence.trial import NotComparableError
from parity.frameworks.jax.isolation import answering
from parity.frameworks.linen.isolation import alone, observe

# Where each fault is planted, the hypothesis that explains it, and what to change.
FAULTS = {
    "epsilon": ("layers.1.norm1", "epsilon", "set epsilon=1e-05"),
    "tanh gelu": ("layers.1.ffn.1", "activation", "use jax.nn.gelu(x, approximate=False)"),
    "query and key swapped": ("layers.1.core", "arguments exchanged", "use the arguments in torch's order"),
}
both_styles = pytest.mark.parametrize("style", STYLES)


def isolated(pair: tuple[Any, Any], *inputs: Any, **options: Any) -> parity.Isolation:
    return parity.trace(*pair, *inputs, **options).isolated()


def faults(isolation: parity.Isolation) -> dict[str, list[str]]:
    """The places that differ, by the path of each wrong module."""
    return {one.path: [d.where for d in one.differences] for one in isolation.faults}


def filled(ours: torch.nn.Module, theirs: nn.Module, *inputs: Any, **options: Any) -> tuple[torch.nn.Module, parity.Linen]:
    """A pair with the same random arrays."""
    ours = draw(ours, type(theirs).__name__)
    return ours, parity.transfer(ours, parity.Linen(theirs, None, *inputs, **options)).value


# ---------------------------------------------------------------- which module is wrong


@both_styles
def test_a_clean_pair_has_no_wrong_module(style):
    ours, theirs = encoder(style)
    isolation = isolated((ours, theirs), x(), rename=RENAMES[style])
    wanted = {path for path, _ in ours.named_modules() if path not in ("layers", "heads")}
    assert {one.path: one.status for one in isolation.modules} == dict.fromkeys(wanted, "agrees"), str(isolation)
    assert not isolation.unpaired


@both_styles
@pytest.mark.parametrize("fault", FAULTS)
def test_the_wrong_module_is_named_with_its_cause(style, fault):
    path, hypothesis, change = FAULTS[fault]
    diagnosis = parity.diagnose(*encoder(style, fault), x(), rename=RENAMES[style])
    assert faults(diagnosis.isolation) == {path: ["output"]}
    assert (diagnosis.causes[0].path, diagnosis.causes[0].hypothesis) == (path, hypothesis)
    assert diagnosis.causes[0].change == change and diagnosis.causes[0].complete


@both_styles
def test_every_wrong_module_is_found_however_many_there_are(style):
    ours, theirs = encoder(style, "tanh gelu")
    wrong = altered(altered(theirs, "params.layers_0.q.kernel", one_ulp), "params.layers_1.norm2.scale", lambda a: a[::-1])
    assert set(faults(isolated((ours, wrong), x(), rename=RENAMES[style]))) == {
        "layers.0.q",
        "layers.1.ffn.1",
        "layers.1.norm2",
    }


@both_styles
def test_the_report_of_a_failing_comparison_tells_it(style):
    report = parity.compare(*encoder(style, "epsilon"), x(), rename=RENAMES[style], levels=["identical"])
    assert "1 wrong module of 27 modules, each run alone on what torch's was given" in str(report)
    assert re.search(r"^  layers\.1\.norm1   \S+e\+07 times what rounding explains$", str(report), re.MULTILINE)
    assert "    cause: epsilon. Flax adds 1e-06" in str(report)


def test_channels_last_statistics_and_what_flax_alone_is_told():
    ours, theirs = convolutions()
    isolation = isolated((ours, theirs), images())
    assert {one.status for one in isolation.modules} == {"agrees"}, str(isolation)
    assert {one.path for one in isolation.modules} == {"conv_1", "bn_1", "conv_2", "bn_2", "drop", "head", ""}
    wrong = altered(theirs, "batch_stats.bn_2.var", lambda a: a * 1.001)
    assert set(faults(isolated((ours, wrong), images()))) == {"bn_2"}


# ---------------------------------------------------------------- modules that are given to others


class TorchReader(torch.nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table, self.scale = table, torch.nn.Linear(6, 6)

    def forward(self, x):
        return self.table["in"](torch.tanh(self.scale(self.table["in"](x)))) + self.table["out"][0](x)


class TorchGiven(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.reader = TorchReader({"in": self.a, "out": [self.b]})

    def forward(self, x):
        return self.reader(self.a(x))


class Reader(nn.Module):
    """Takes its layers from outside, in a mapping and in a list, and one of them twice."""

    table: Any
    fault: str = ""

    @nn.compact
    def __call__(self, x):
        inner = nn.Dense(6, name="scale")(self.table["in"](x))
        first = self.table["in"](jnp.sin(inner) if self.fault == "inside" else jnp.tanh(inner))
        return first + self.table["out"][0](x)


class SetupGiven(nn.Module):
    fault: str = ""

    def setup(self):
        self.a, self.b = nn.Dense(6), nn.Dense(6)
        self.reader = Reader({"in": self.a, "out": [self.b]}, self.fault)

    def __call__(self, x):
        return self.reader(self.a(x))


class CompactGiven(nn.Module):
    fault: str = ""

    @nn.compact
    def __call__(self, x):
        a, b = nn.Dense(6, name="a"), nn.Dense(6, name="b")
        return Reader({"in": a, "out": [b]}, self.fault, name="reader")(a(x))


@pytest.mark.parametrize("style", [SetupGiven, CompactGiven])
def test_a_module_runs_with_those_that_are_given_to_it_from_elsewhere(style):
    given = normal(3, 4, 6)
    ours, theirs = filled(TorchGiven(), style(), given)
    isolation = isolated((ours, theirs), given)
    assert {one.path: one.status for one in isolation.modules} == dict.fromkeys(
        ("a", "b", "reader.scale", "reader", ""), "agrees"
    )
    assert set(faults(isolated((ours, altered(theirs, "params.a.kernel", one_ulp)), given))) == {"a"}
    assert set(faults(isolated((ours, altered(theirs, "params.b.bias", one_ulp)), given))) == {"b"}
    wrong = parity.Linen(style("inside"), theirs.variables)
    # The second call of `a` in it, which is the third of all.
    assert faults(isolated((ours, wrong), given)) == {"reader": ["what it gives a, call 2: args[0]"]}


# ---------------------------------------------------------------- what cannot be run alone


class Masked(nn.Module):
    keep: Any

    def __call__(self, x):
        return jnp.where(self.keep, x, 0)


class MakesMasked(nn.Module):
    """Makes a module with an array that there is only while it runs."""

    fault: bool = False

    @nn.compact
    def __call__(self, x):
        return Masked(x > (1 if self.fault else 0), name="act")(nn.Dense(6, name="a")(x))


class TorchMasked(torch.nn.Module):
    def forward(self, x, keep):
        return torch.where(keep, x, torch.zeros_like(x))


class TorchMakesMasked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.act = torch.nn.Linear(6, 6), TorchMasked()

    def forward(self, x):
        return self.act(self.a(x), x > 0)


def test_a_module_made_with_arrays_of_the_call_is_not_looked_into():
    given = normal(3, 4, 6)
    ours, theirs = filled(TorchMakesMasked(), MakesMasked(), given)
    found = {one.path: (one.status, one.note) for one in isolated((ours, theirs), given).modules}
    assert found["act"][0] == "not comparable"
    assert found["act"][1] == (
        "the Flax module act is made with arrays of the call that it is in, so it cannot be run by itself"
    )
    assert (found["a"][0], found[""][0]) == ("agrees", "agrees")
    # What runs for itself in the whole model may be wrong: then the model is not blamed, and that is told.
    isolation = isolated((ours, parity.Linen(MakesMasked(True), theirs.variables)), given)
    (model,) = [one for one in isolation.modules if one.path == ""]
    assert not isolation.passed and not isolation.faults
    assert (model.status, "could not be told from act" in model.note) == ("follows", True)
    assert "act: not compared, the Flax module act is made with arrays of the call" in str(isolation)


def test_a_module_that_no_call_has_met_is_refused_with_the_reason():
    class Raises(nn.Module):
        @nn.compact
        def __call__(self, x):
            raise ValueError("no such axis")
            return nn.Dense(6, name="a")(x)

    given = normal(3, 4, 6)
    ours = torch.nn.Sequential()
    ours.add_module("a", torch.nn.Linear(6, 6))
    draw(ours, "raises")
    kernel = {"kernel": jnp.asarray(ours.a.weight.detach().numpy().T), "bias": jnp.asarray(ours.a.bias.detach().numpy())}
    isolation = isolated((ours, parity.Linen(Raises(), {"params": {"a": kernel}})), given)
    found = {one.path: one for one in isolation.modules}
    assert (found["a"].status, found[""].status) == ("not comparable", "differs")
    assert found["a"].note == "the Flax module a was not met in a call of the model, so it cannot be run by itself"
    assert found[""].differences[0].reason == "Flax raises ValueError: no such axis"


class TorchStack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.last = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

    def forward(self, x):
        return self.last(self.layer(x))


class Stack(nn.Module):
    """Gives its layer one example at a time."""

    fault: bool = False

    @nn.compact
    def __call__(self, x):
        def one(layer, x):
            return layer(x) * 2 if self.fault else layer(x)

        each = nn.vmap(one, variable_axes={"params": None}, split_rngs={"params": False})
        return nn.Dense(6, name="last")(each(nn.Dense(6, name="layer"), x))


def test_what_runs_inside_a_transformation_is_not_looked_into():
    given = normal(3, 4, 6)
    ours, theirs = filled(TorchStack(), Stack(), given)
    found = {one.path: one for one in isolated((ours, theirs), given).modules}
    assert {path: one.status for path, one in found.items()} == {"layer": "not comparable", "last": "agrees", "": "agrees"}
    assert found["layer"].note == (
        "the Flax module layer runs inside a transformation of jax, which may give it one layer of a stack or one example "
        "of a batch, so it cannot be run by itself"
    )
    # The model's own code cannot be told from it then, and is not blamed.
    isolation = isolated((ours, parity.Linen(Stack(True), theirs.variables)), given)
    assert not isolation.passed and not isolation.faults
    assert "the model: not told, its own code could not be told from layer" in str(isolation)


# Made when the file is read, as models that are published have it.
PreparedCell = nn.scan(nn.SimpleCell, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1)


@pytest.mark.parametrize("early", [True, False])
def test_a_transformed_class_is_run_as_the_whole_that_it_is(early):
    class Steps(nn.Module):
        @nn.compact
        def __call__(self, x):
            options = dict(variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1)
            cell = PreparedCell if early else nn.scan(nn.SimpleCell, **options)
            return cell(6, name="cell")(jnp.zeros((x.shape[0], 6), x.dtype), x)[1]

    model = parity.Linen(Steps(), None, normal(3, 4, 6))
    model = model.replaced(variables=jax.tree.map(lambda a: jnp.asarray(normal(*a.shape)), model.variables))
    call = parity.evidence.calls.Call((normal(3, 4, 6),), castable=frozenset({"args[0]"}))
    before = PreparedCell.__call__
    records = {one.path: one for one in observe(model, call, dtype="float64")}
    assert set(records) == {"cell", ""}
    whole = alone(model, "cell", records["cell"].args, records["cell"].kwargs)
    np.testing.assert_array_equal(whole.outputs["[1]"], records["cell"].output[1])
    assert PreparedCell.__call__ is before
    with pytest.raises(NotComparableError, match=r"the Flax module cell.i runs inside a transformation of jax"):
        alone(model, "cell.i", (np.zeros((3, 6)),), {})


class SharedScope(nn.Module):
    """Has its layer's arrays as its own."""

    fault: bool = False

    def setup(self):
        self.inner = nn.Dense(6)
        nn.share_scope(self, self.inner)

    def __call__(self, x):
        return self.inner(-x if self.fault else x)


class SetupShared(nn.Module):
    fault: bool = False

    def setup(self):
        self.layer, self.last = SharedScope(self.fault), nn.Dense(6)

    def __call__(self, x):
        return self.last(self.layer(x))


def test_of_two_modules_that_share_a_scope_the_outer_one_is_run():
    given = normal(3, 4, 6)
    ours, theirs = filled(TorchStack(), SetupShared(), given)
    isolation = isolated((ours, theirs), given)
    assert {one.path: one.status for one in isolation.modules} == dict.fromkeys(("layer", "last", ""), "agrees"), str(isolation)
    assert set(faults(isolated((ours, parity.Linen(SetupShared(True), theirs.variables)), given))) == {"layer"}


def test_a_recurrent_layer_holds_its_cell_from_elsewhere():
    class Recurrent(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.RNN(nn.SimpleCell(5), name="rnn")(x)

    class TorchRecurrent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = torch.nn.RNN(6, 5, batch_first=True)
            torch.nn.init.zeros_(self.rnn.bias_hh_l0)

        def forward(self, x):
            return self.rnn(x)[0]

    given = normal(3, 4, 6)
    torch.manual_seed(0)
    ours = TorchRecurrent().eval()
    theirs = parity.transfer(ours, parity.Linen(Recurrent(), None, given)).value
    assert {one.path: one.status for one in isolated((ours, theirs), given).modules} == {"rnn": "agrees", "": "agrees"}
    wrong = altered(theirs, "params.SimpleCell_0.i.kernel", one_ulp)
    assert set(faults(isolated((ours, wrong), given))) == {"rnn"}


# ---------------------------------------------------------------- the same module as in the model's own run


def test_attributes_that_depend_on_the_dtype_are_those_of_the_run():
    class Careful(nn.Module):
        factor: float = 1.0

        @nn.compact
        def __call__(self, x):
            epsilon = self.factor * float(jnp.finfo(x.dtype).eps)
            return nn.LayerNorm(epsilon=epsilon, dtype=x.dtype, use_fast_variance=False, name="norm")(x)

    class TorchNorm(torch.nn.LayerNorm):
        def forward(self, x):
            return torch.nn.functional.layer_norm(x, (6,), self.weight, self.bias, torch.finfo(x.dtype).eps)

    class TorchCareful(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = TorchNorm(6)

        def forward(self, x):
            return self.norm(x)

    # So small that the least epsilon counts.
    given = normal(3, 4, 6) * np.float32(1e-4)
    ours, theirs = filled(TorchCareful(), Careful(), given)
    assert isolated((ours, theirs), given).passed
    assert set(faults(isolated((ours, parity.Linen(Careful(1e4), theirs.variables)), given))) == {"norm"}


def test_dropout_that_is_left_on_is_a_cause():
    class Dropped(nn.Module):
        @nn.compact
        def __call__(self, x, deterministic=False):
            return nn.Dense(6, name="a")(nn.Dropout(0.5, deterministic=deterministic)(x))

    given = normal(3, 4, 6)
    ours = torch.nn.Sequential()
    ours.add_module("a", torch.nn.Linear(6, 6))
    ours, theirs = filled(ours, Dropped(), given, deterministic=True)
    keys = {"dropout": jax.random.key(0)}
    diagnosis = parity.diagnose(ours, parity.Linen(Dropped(), theirs.variables, rngs=keys), given)
    assert faults(diagnosis.isolation) == {"": ["what it gives a: args[0]"]}
    assert "Flax returns other numbers with other random keys" in str(diagnosis)


@both_styles
def test_equal_layers_are_compiled_once(style):
    _, theirs = encoder(style)
    given = normal(3, 4, 8).astype(np.float64)
    alone(theirs, "layers.0" if style is SetupEncoder else "layers_0", (given,), {})
    before = answering.cache_info().misses
    alone(theirs, "layers.1" if style is SetupEncoder else "layers_1", (given,), {})
    assert answering.cache_info().misses == before


def test_a_submodule_is_run_with_other_weights_and_settings():
    _, theirs = encoder(SetupEncoder)
    given, scale = normal(3, 4, 8).astype(np.float64), np.asarray(theirs.variables["params"]["layers_1"]["norm1"]["scale"])
    before = jax.tree.map(np.array, theirs.variables)
    plain = alone(theirs, "layers.1.norm1", (given,), {}).outputs[""]
    # Powers of two: nothing is rounded.
    bias = {"params.layers_1.norm1.bias": np.zeros(8, np.float32)}
    halved = alone(theirs, "layers.1.norm1", (given,), {}, weights={"params.layers_1.norm1.scale": scale / 2, **bias})
    np.testing.assert_array_equal(
        halved.outputs[""], alone(theirs, "layers.1.norm1", (given,), {}, weights=bias).outputs[""] / 2
    )
    wide = alone(theirs, "layers.1.norm1", (given,), {}, settings={"epsilon": 1.0}).outputs[""]
    assert np.abs(wide - plain).max() > 0.01
    assert jax.tree.all(jax.tree.map(np.array_equal, theirs.variables, before))
    assert math.isclose(theirs.wide_structure.parts["layers_1", "norm1"].module.epsilon, 1e-5)


# ---------------------------------------------------------------- an array of which Flax has a part only


class Gated(nn.Module):
    """Flax's GRU has the second bias of one gate alone."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.RNN(nn.GRUCell(5), name="gru")(x)


class TorchGated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = torch.nn.GRU(3, 5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gru(x)[0]


def test_weights_that_were_not_loaded_are_the_cause_where_flax_has_part_of_an_array():
    ours, features = draw(TorchGated(), "gated"), normal(2, 4, 3)
    with torch.no_grad():
        ours.gru.bias_hh_l0[:10] = 0
    variables = Gated().init(jax.random.key(0), features)
    found = parity.diagnose(ours, parity.Linen(Gated(), variables, features), features)
    assert [fault.path for fault in found.isolation.faults] == ["gru"] and not found.unexplained, str(found)
    assert found.causes[0].hypothesis == "weights" and "gru.bias_hh_l0" in found.causes[0].what, str(found)
    # Of one block that is wrong the others are torch's.
    filled_in = ours, parity.transfer(ours, parity.Linen(Gated(), None, features)).value
    changed = altered(filled_in[1], "params.GRUCell_0.hn.bias", lambda bias: 2 * bias)
    found = parity.diagnose(ours, changed, features)
    assert "gru.bias_hh_l0: Flax's is 2 times torch's" in found.causes[0].what, str(found)


class AttendingLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.norm = torch.nn.MultiheadAttention(12, 3, batch_first=True), torch.nn.LayerNorm(12)

    def forward(self, x):
        return self.norm(x + self.attn(x, x, x, need_weights=False)[0])


class AttendingLayers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(AttendingLayer() for _ in range(2))

    def forward(self, x):
        return self.layers[1](self.layers[0](x))


class LinenAttendingLayer(nn.Module):
    epsilon: float

    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(3, name="attn")(x)
        return nn.LayerNorm(self.epsilon, use_fast_variance=False, name="norm")(x)


class LinenAttending(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i, epsilon in enumerate((1e-5, 1e-3)):
            x = LinenAttendingLayer(epsilon, name=f"layers_{i}")(x)
        return x


def test_an_attention_of_a_numbered_layer_is_compared_by_its_rule_and_is_no_divergence():
    """Torch's returns a pair, Flax's an array, and Linen's layers are numbered behind a line where torch has a dot."""
    torch.manual_seed(0)
    x = np.random.default_rng(0).standard_normal((2, 5, 12), dtype=np.float32)
    ours = AttendingLayers().eval()
    theirs = parity.transfer(ours, parity.Linen(LinenAttending(), None, x)).value
    assert parity.trace(ours, theirs, x).first_divergence().path == "layers.1.norm"
