"""What a comparison comes to where it is no plain agreement: each kind of bad pair has a verdict of its own."""

import json
from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from evidence_pairs import FlaxTwo, TorchTwo, draw, normal, transferred, two
from flax import linen, nnx
from torch import nn

import parity
from parity.evidence.repeatability import unequal
from parity.evidence.result import LEVELS
from parity.frameworks import load

X = normal(3, 4)
STRUCTURE: dict[str, Any] = {"levels": "structure", "diagnose": False}


def codes(report: parity.Report) -> list[str]:
    return [note.code for note in report.notes]


# ------------------------------------------------------------------------------ that cannot be paired


class FlaxOther(nnx.Module):
    def __init__(self):
        self.p, self.q = nnx.Linear(4, 6, rngs=nnx.Rngs(0)), nnx.Linear(6, 4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.q(self.p(x))


def test_models_without_a_common_parameter_cannot_be_paired():
    report = parity.compare(two()[0], FlaxOther(), X, levels=("weights", "structure"), diagnose=False)
    assert report.verdict == "cannot be paired"
    lines = str(report).splitlines()
    assert lines[0] == "NOT the same function: they cannot be paired, no parameter has a counterpart"
    assert lines[-1] == "  next: name the counterparts by rename={...}, as in parity.transfer"
    assert "b.weight (4, 4) of the torch model has no counterpart" in str(report)
    assert report.to_dict()["verdict"] == "cannot be paired"


def test_models_that_cannot_be_paired_and_take_other_inputs_are_told_the_first():
    report = parity.compare(two()[0], nnx.Linear(7, 9, rngs=nnx.Rngs(0)), X, diagnose=False)
    assert report.verdict == "cannot be paired" and report.level("structure").figures["raises"] == "flax"
    assert "  wiring, identical, native, gradients NOT RUN  one side raises" in str(report)


def test_a_pair_with_one_strange_parameter_can_be_paired():
    class FlaxMore(FlaxTwo):
        def __init__(self, *, rngs):
            super().__init__(rngs=rngs)
            self.more = nnx.Param(jnp.ones(3))

    torch_model, flax_model = draw(TorchTwo(), "two"), FlaxMore(rngs=nnx.Rngs(0))
    parity.transfer(torch_model.state_dict(), flax_model, ignore="more")
    assert parity.compare(torch_model, flax_model, X, levels="weights").verdict == "differs"


# ------------------------------------------------------------------------------ that raise


class TorchRaises(TorchTwo):
    def forward(self, x):
        raise RuntimeError("torch will not")


class FlaxRaises(FlaxTwo):
    def __call__(self, x):
        raise ValueError("flax will not")


@pytest.mark.parametrize("side", ["torch", "flax"])
def test_a_model_that_raises_alone_is_named_with_the_line_of_the_users_code(side):
    pair = (draw(TorchRaises(), "two"), two()[1]) if side == "torch" else (two()[0], two(FlaxRaises)[1])
    report = parity.compare(*pair, X)
    assert report.verdict == "one side raises"
    said = {"torch": "torch raises, Flax does not", "flax": "Flax raises, torch does not"}[side]
    assert str(report).splitlines()[0] == f"NOT the same function: {said}"
    finding = report.level("structure").findings[0]
    method = "forward" if side == "torch" else "__call__"
    assert finding.figures["raises"] == side and finding.figures["message"] == f"{side} will not"
    assert finding.figures["line"].startswith("test_verdicts.py:") and finding.figures["line"].endswith(f"in {method}")
    assert f"(at {finding.figures['line']})" in str(report)
    # The levels that could not run for it are one line.
    assert "  wiring, identical, native, gradients NOT RUN  one side raises" in str(report)


def test_models_that_both_raise_are_refused_with_both_messages_and_lines():
    with pytest.raises(parity.InputError) as caught:
        parity.compare(draw(TorchRaises(), "two"), two(FlaxRaises)[1], X)
    assert caught.value.code == "both sides raise"
    for part in ("torch: RuntimeError: torch will not (at test_verdicts.py:", "in forward)", "Flax: ValueError: flax will not"):
        assert part in str(caught.value)


class FlaxAsks(FlaxTwo):
    def __call__(self, x, train):
        return super().__call__(x)


def test_an_argument_that_flax_alone_asks_for_is_to_be_bound():
    report = parity.compare(*two(FlaxAsks), X)
    assert report.verdict == "one side raises"
    bound = "parity.Linen(module, variables, train=...), or give train a default in an nnx.Module"
    assert str(report).splitlines()[-1] == f"  next: bind what Flax alone asks for: {bound}"
    assert [hint["code"] for hint in report.to_dict()["hints"] if hint["kind"] == "next"] == ["bind-the-argument"]


def test_a_flax_model_that_decides_by_values_in_python_is_told_that_it_runs_compiled():
    class FlaxDecides(FlaxTwo):
        def __call__(self, x):
            return super().__call__(x if float(x.sum()) > -1e9 else -x)

    report = parity.compare(*two(FlaxDecides), X)
    assert report.verdict == "one side raises" and "let jnp.where or jax.lax.cond decide" in str(report).splitlines()[-1]
    assert [hint["code"] for hint in report.to_dict()["hints"] if hint["kind"] == "next"] == ["decide-inside-jit"]


def test_a_torch_model_that_does_not_run_in_float64_is_not_said_to_refuse_the_inputs():
    class TorchSingle(TorchTwo):
        def forward(self, x):
            if x.dtype == torch.float64:
                raise TypeError("no double")
            return super().forward(x)

    with pytest.raises(parity.InputError, match=r"the torch model does not run in float64, in .*: TypeError: no double"):
        parity.trace(*two(torch_class=TorchSingle), X)


# ------------------------------------------------------------------------------ that return nothing, or what nobody knows


class TorchSays(TorchTwo):
    says: Any = None

    def forward(self, x):
        return self.says


class FlaxSays(FlaxTwo):
    says: Any = None

    def __call__(self, x):
        return self.says


@pytest.mark.parametrize("nothing", [None, (), {"a": None}])
def test_models_that_return_nothing_are_refused(monkeypatch, nothing):
    monkeypatch.setattr(TorchSays, "says", nothing)
    monkeypatch.setattr(FlaxSays, "says", nothing)
    with pytest.raises(parity.InputError, match="both models return nothing") as caught:
        parity.compare(*two(FlaxSays, TorchSays), X)
    assert caught.value.code == "nothing returned"


def test_an_object_that_no_level_knows_is_told_by_its_class(monkeypatch):
    monkeypatch.setattr(TorchSays, "says", State())
    monkeypatch.setattr(FlaxSays, "says", State())
    report = parity.compare(*two(FlaxSays, TorchSays), X)
    said = "an object of the class State, which cannot be compared"
    assert report.level("structure").findings[0].what == f"expected (torch) {said}, actual (flax) {said}"
    assert report.trace.first_divergence().reason == f"expected (torch) {said}, actual (flax) {said}"
    assert " at 0x" not in str(report)


# ------------------------------------------------------------------------------ other trees


@pytest.mark.parametrize(
    ("torch_output", "flax_output", "differ"),
    [
        (lambda y: (y, 2 * y), lambda y: {"a": y, "b": 2 * y}, True),
        (lambda y: (y, 2 * y), lambda y: (y,), True),
        (lambda y: {"a": y}, lambda y: {"a": y, "b": y}, True),
        (lambda y: (y, 2 * y), lambda y: [y, 2 * y], False),
        (lambda y: (y, y[:, :3]), lambda y: (y, y), None),
    ],
)
def test_outputs_in_other_trees_have_a_verdict_of_their_own(torch_output, flax_output, differ):
    class TorchTree(TorchTwo):
        def forward(self, x):
            return torch_output(super().forward(x))

    class FlaxTree(FlaxTwo):
        def __call__(self, x):
            return flax_output(super().__call__(x))

    report = parity.compare(*two(FlaxTree, TorchTree), X, **STRUCTURE)
    assert report.verdict == {True: "outputs differ in structure", False: "agrees as asked", None: "differs"}[differ]
    if differ:
        assert str(report).splitlines()[0] == "NOT the same function: the outputs differ in structure"
        assert "returns it, " in str(report) and "next: return the same tree on both sides" in str(report)


# ------------------------------------------------------------------------------ that are not repeatable


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class TorchNoisyInside(TorchTwo):
    def __init__(self):
        super().__init__()
        self.noise = Noise()

    def forward(self, x):
        return self.a(self.noise(self.act(self.b(self.b(x)))))


class TorchDropsAlways(TorchTwo):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5)


class TorchDrawsRarely(TorchTwo):
    """Draws, but what it returns does not hang on it."""

    def forward(self, x):
        return super().forward(x) + 0 * torch.rand(())


@pytest.mark.parametrize(
    ("torch_class", "named"),
    [(TorchNoisyInside, r"is noise \(.*Noise\)"), (TorchDropsAlways, r"is the model itself \(.*TorchDropsAlways\)")],
)
def test_a_torch_model_that_draws_is_refused_with_the_module_where_it_begins(torch_class, named):
    with pytest.raises(parity.InputError, match=f"the torch model returns different numbers.*two runs {named}; turn off") as e:
        parity.compare(draw(torch_class(), "two"), two()[1], X)
    assert e.value.code == "not repeatable"


def test_a_model_that_draws_and_returns_the_same_is_compared():
    assert parity.compare(draw(TorchDrawsRarely(), "two"), two()[1], X, **STRUCTURE).passed


@pytest.mark.parametrize(
    ("one", "other", "path"),
    [
        ({"": X}, {"": X.copy()}, None),
        ({"": X}, {"": X + 1}, ""),
        ({"a": X, "b": X}, {"a": X, "b": X[:2]}, "b"),
        ({"a": X}, {"a": X.astype(np.float64)}, "a"),
        ({"a": X}, {"a": X, "b": X}, "b"),
        ({"a": X, "b": X}, {"a": X}, "b"),
        ({"a": np.full(2, np.nan), "b": float("nan")}, {"a": np.full(2, np.nan), "b": float("nan")}, None),
        ({"n": 1}, {"n": 2}, "n"),
        ({"n": 1}, {"n": X}, "n"),
        # Two caches are two objects.
        ({"cache": object(), "none": None}, {"cache": object(), "none": None}, None),
    ],
)
def test_two_runs_are_unequal_where_their_outputs_are(one, other, path):
    assert unequal(one, other) == path


class TorchAtTimes(TorchTwo):
    """Raises in some runs."""

    runs, raising = 0, frozenset[int]()

    def forward(self, x):
        type(self).runs += 1
        if self.runs in self.raising:
            raise RuntimeError("not this time")
        return super().forward(x)


@pytest.mark.parametrize("raising", [{2}, {2, 3, 4, 5, 6}])
def test_a_torch_model_that_raises_in_some_runs_is_refused_as_not_repeatable(monkeypatch, raising):
    monkeypatch.setattr(TorchAtTimes, "runs", 0)
    monkeypatch.setattr(TorchAtTimes, "raising", raising)
    pair = two(torch_class=TorchAtTimes)
    with pytest.raises(parity.InputError, match=r"torch model raises in one run and returns .*: not this time \(at") as caught:
        parity.compare(*pair, X, modes="compiled")
    assert caught.value.code == "not repeatable"


def test_a_flax_model_that_raises_in_some_runs_is_refused_as_not_repeatable():
    runs = []

    class FlaxAtTimes(FlaxTwo):
        def __call__(self, x):
            runs.append(x)
            if len(runs) > 2:
                raise RuntimeError("not this time")
            return super().__call__(x)

    with pytest.raises(parity.InputError, match=r"Flax model raises in one run and returns .*: not this time \(at") as caught:
        parity.compare(*two(FlaxAtTimes), X, levels=("structure", "native"), modes="eager")
    assert caught.value.code == "not repeatable"


class TorchClock(TorchTwo):
    """What it draws shows in float64 alone."""

    clock = 0

    def forward(self, x):
        type(self).clock += 1
        return super().forward(x) + 1e6 + 1e-7 * self.clock


def test_what_torch_draws_below_float32_is_no_fault_of_flax():
    with pytest.raises(parity.InputError, match="the torch model returns different numbers") as caught:
        parity.compare(*two(torch_class=TorchClock), X, levels="identical")
    assert caught.value.code == "not repeatable"


@pytest.mark.parametrize("entry", [parity.trace, parity.diagnose])
def test_a_trace_or_a_diagnosis_names_no_fault_in_what_is_random(entry):
    with pytest.raises(parity.InputError, match="the torch model returns different numbers") as caught:
        entry(draw(TorchNoisyInside(), "two"), two()[1], X)
    assert caught.value.code == "not repeatable"
    torch_model, flax_model = draw(TorchTwo(), "two"), FlaxNoisyInside(rngs=nnx.Rngs(0))
    parity.transfer(torch_model, flax_model)
    with pytest.raises(parity.InputError, match="the Flax model returns different numbers"):
        entry(torch_model, flax_model, X)


class FlaxDrop(nnx.Module):
    def __init__(self, *, rngs):
        self.rngs = rngs

    def __call__(self, x):
        return jnp.where(jax.random.bernoulli(self.rngs.dropout(), 0.5, x.shape), 2 * x, 0)


class FlaxDropping(FlaxTwo):
    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.dropped = FlaxDrop(rngs=rngs)

    def __call__(self, x):
        return self.a(self.dropped(self.act(self.b(self.b(x)))))


class PythonNoise(nnx.Module):
    def __call__(self, x):
        return x + np.random.default_rng().standard_normal(x.shape).astype(np.float32)


class FlaxNoisyInside(FlaxTwo):
    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.noise = PythonNoise()

    def __call__(self, x):
        return self.a(self.noise(self.act(self.b(self.b(x)))))


@pytest.mark.parametrize(
    ("flax_class", "says"),
    [
        (FlaxDropping, r"other numbers with other random keys; the first module that differs between two runs is dropped \("),
        (FlaxNoisyInside, r"different numbers for the same input; the first module that differs between two runs is noise \("),
    ],
)
def test_a_flax_model_that_draws_is_refused_with_the_module_where_it_begins(flax_class, says):
    torch_model, flax_model = draw(TorchTwo(), "two"), flax_class(rngs=nnx.Rngs(0))
    parity.transfer(torch_model, flax_model)
    with pytest.raises(parity.InputError, match=f"the Flax model returns {says}") as caught:
        parity.compare(torch_model, flax_model, X, levels=("weights", "identical"))
    assert caught.value.code == "not repeatable"


class LinenDropping(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dropout(0.5, deterministic=False, name="drop")(linen.Dense(4, name="line")(x))


def test_a_linen_model_that_draws_is_refused_with_the_module_where_it_begins():
    class TorchLine(nn.Module):
        def __init__(self):
            super().__init__()
            self.line, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(self.line(x))

    torch_model, module = draw(TorchLine(), "line"), LinenDropping()
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = parity.transfer(torch_model, module.init(keys, X)).value
    with pytest.raises(parity.InputError, match=r"two runs is drop .*deterministic=True") as caught:
        parity.compare(torch_model, parity.Linen(module, variables, rngs={"dropout": jax.random.key(2)}), X)
    assert caught.value.code == "not repeatable"


# ------------------------------------------------------------------------------ that write


class TorchWriting(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, batch):
        batch["x"][:, :2].mul_(2)
        return self.line(batch.pop("x"))


class FlaxWriting(nnx.Module):
    def __init__(self, *, rngs, writes: bool):
        self.line, self.writes = nnx.Linear(4, 4, rngs=rngs), writes

    def __call__(self, batch):
        x = batch.pop("x") if self.writes else batch["x"]
        return self.line(x.at[:, :2].multiply(2))


@pytest.mark.parametrize("writes", [False, True])
def test_a_model_that_writes_into_its_arguments_is_told_and_writes_into_copies(writes):
    pair = transferred(TorchWriting(), FlaxWriting(rngs=nnx.Rngs(0), writes=writes), "writing")
    x = torch.from_numpy(X.copy())
    batch = {"x": x}
    report = parity.compare(*pair, batch, levels=("structure", "identical"))
    assert report.passed, str(report)
    assert torch.equal(x, torch.from_numpy(X)) and list(batch) == ["x"]
    told = [(note.where, note.what.split(";")[0]) for note in report.notes if note.code == "input-written"]
    by_flax = [("args[0]", "is written into by the Flax model")] if writes else []
    assert told == [(p, "is written into by the torch model") for p in ("args[0]['x']", "args[0]")] + by_flax
    assert "note: args[0]['x'] is written into by the torch model; every run here was given an untouched copy" in str(report)


class State:
    def __init__(self):
        self.seen: list[int] = []


class TorchRemembering(nn.Module):
    """Keeps all that a torch model may keep beside buffers, and returns what hangs on it."""

    def __init__(self):
        super().__init__()
        self.line, self.n, self.calls = nn.Linear(4, 4), 0, []
        self.cache, self.state, self.known = OrderedDict(a=1), State(), {1}
        self.scale, self.array = torch.ones(4), np.ones(4, np.float32)

    def forward(self, x):
        self.n += 1
        self.calls.append(self.n)
        self.cache["b"] = x
        self.state.seen.append(self.n)
        self.known.add(self.n + 1)
        self.scale.mul_(2)
        self.array *= 3
        self.line.last = x
        return self.line(x) * self.n * len(self.calls) * self.scale.sum()


class FlaxFour(nnx.Module):
    def __init__(self, *, rngs):
        self.line = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.line(x) * 8


def test_plain_attributes_that_a_run_changes_are_put_back_and_told():
    torch_model, flax_model = transferred(TorchRemembering(), FlaxFour(rngs=nnx.Rngs(0)), "remembering")
    report = parity.compare(torch_model, flax_model, X, modes="compiled")
    assert report.passed, str(report)
    [note] = [note for note in report.notes if note.code == "attribute-changed"]
    assert set(note.figures["attributes"]) == {"n", "calls", "cache", "state", "known", "scale", "array", "line.last"}
    parity.trace(torch_model, flax_model, X)
    assert (torch_model.n, torch_model.calls, dict(torch_model.cache)) == (0, [], {"a": 1})
    assert (torch_model.state.seen, torch_model.known) == ([], {1})
    assert torch.equal(torch_model.scale, torch.ones(4)) and (torch_model.array == 1).all()
    assert not hasattr(torch_model.line, "last")


def test_attributes_are_put_back_though_the_model_raises():
    class Raising(TorchRemembering):
        def forward(self, x):
            super().forward(x)
            raise RuntimeError("half way")

    model = Raising().eval()
    assert parity.compare(model, FlaxFour(rngs=nnx.Rngs(0)), X, **STRUCTURE).verdict == "one side raises"
    assert model.n == 0 and not model.calls and not hasattr(model.line, "last")


def test_a_model_that_leaves_all_as_it_was_is_told_of_nothing():
    with load("torch").pinned():
        run = load("torch").evaluate(draw(TorchTwo(), "two"), parity.evidence.calls.Call((X,), {}, frozenset({"args[0]"})))
    assert run.written == run.attributes == ()


# ------------------------------------------------------------------------------ the text


def deep(fault: bool):
    """Eight layers, every second one wrong."""

    class FlaxScaled(nnx.Linear):
        def __call__(self, x):
            return super().__call__(x) * 1.01

    kinds = [FlaxScaled if fault and number % 2 else nnx.Linear for number in range(8)]
    torch_model = nn.Sequential(*(nn.Linear(4, 4) for _ in kinds))
    return transferred(torch_model, nnx.Sequential(*(kind(4, 4, rngs=nnx.Rngs(0)) for kind in kinds)), "deep")


def test_a_failure_takes_at_most_a_screen_in_the_order_where_how_much_why_what_next():
    report = parity.compare(*deep(fault=True), np.ones((1, 4), np.float32), modes="compiled")
    text = str(report)
    lines = text.splitlines()
    assert sum(max(1, -(-len(line) // 80)) for line in lines) <= 36, text
    order = ["first divergence", "would pass at atol", "identical", "wrong modules of", "cause:", "note:", "seed", "next:"]
    found = [next(number for number, line in enumerate(lines) if part in line) for part in order]
    assert found == sorted(found) and lines[-1].startswith("  next: ")
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert len(data["diagnosis"]["isolation"]["modules"]) >= 8
    assert {note["code"] for note in data["notes"]} >= {"constant", "batch-of-one"}
    assert data["verdict"] == "differs"


def test_a_screen_is_enough_whatever_the_models_are_called():
    result, finding = parity.evidence.result.LevelResult, parity.evidence.result.Finding
    levels = tuple(
        result(level, "failed", "s" * 300, {}, tuple(finding("w" * 200, "f" * 500) for _ in range(9)), ("n" * 400,) * 9)
        for level in LEVELS
    )
    lines = str(parity.Report(levels, notes=tuple(parity.Note("constant", "a", "t" * 300) for _ in range(9)))).splitlines()
    assert sum(max(1, -(-len(line) // 80)) for line in lines) <= 36
    assert lines[0] == "NOT the same function"
    assert lines[-2:] == ["  seed 0", "  next: parity.diagnose tells which modules are wrong, and why"]


def test_every_verdict_is_one_of_the_table():
    result = parity.evidence.result.LevelResult
    reports = [
        (parity.Report((result("identical", "passed", ""),)), "same"),
        (parity.Report((result("weights", "passed", ""),)), "agrees as asked"),
        (parity.Report((result("native", "not run", "no oracle"),)), "not proved"),
        (parity.Report((result("native", "failed", ""),)), "differs"),
    ]
    assert [report.verdict for report, _ in reports] == [verdict for _, verdict in reports]
    assert all(report.verdict in parity.VERDICTS and str(report) for report, _ in reports)
