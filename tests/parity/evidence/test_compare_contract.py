"""What `compare` promises whatever comes of it: clear refusals, nothing of the caller's changed, results as values."""

import json
import random as python_random
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from evidence_pairs import FlaxReLU, FlaxTwo, TorchReLU, TorchTwo, altered, draw, normal, one_ulp, transferred, two
from flax import nnx
from torch import nn

import parity
from parity.evidence import compare
from parity.evidence.result import LEVELS

FAST = {"modes": ("compiled",)}


class TorchDrop(TorchTwo):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(super().forward(x))


class FlaxDrop(FlaxTwo):
    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(super().__call__(x))


class TorchNoisy(TorchTwo):
    def forward(self, x):
        return super().forward(x) + torch.rand(3, 4)


class TorchIds(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, ids):
        return self.out(self.table(ids))


class FlaxIds(nnx.Module):
    def __init__(self, *, rngs):
        self.table, self.out = nnx.Embed(7, 4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, ids):
        return self.out(self.table(ids))


class TorchRaises(TorchTwo):
    def forward(self, x):
        raise RuntimeError("torch will not")


class FlaxRaises(FlaxTwo):
    def __call__(self, x):
        raise ValueError("flax will not")


class TorchFourier(TorchTwo):
    def forward(self, x):
        return {"y": torch.fft.fft(super().forward(x))}


class FlaxFourier(FlaxTwo):
    def __call__(self, x):
        return {"y": jnp.fft.fft(super().__call__(x))}


class TorchEven(nn.Module):
    def forward(self, ids):
        return ids % 2 == 0


class FlaxEven(nnx.Module):
    def __call__(self, ids):
        return ids % 2 == 0


def dropping(torch_mode: str, flax_mode: str):
    torch_model, flax_model = transferred(TorchDrop(), FlaxDrop(rngs=nnx.Rngs(0)), "two")
    getattr(torch_model, torch_mode)()
    getattr(flax_model, flax_mode)()
    return torch_model, flax_model


def ids_pair():
    return transferred(TorchIds(), FlaxIds(rngs=nnx.Rngs(0)), "ids")


X = normal(3, 4)
IDS = np.array([[0, 3, 6], [1, 1, 2]])


def abstract_two():
    return two()[0], nnx.eval_shape(lambda: FlaxTwo(rngs=nnx.Rngs(0)))


# What is given, and every part that the one error must name.
REFUSED = {
    "torch in train mode": (lambda: (dropping("train", "eval"), X, {}), ["torch model is in train mode", "drop", ".eval()"]),
    "flax in train mode": (lambda: (dropping("eval", "train"), X, {}), ["Flax model is in train mode", "drop", ".eval()"]),
    "both in train mode": (lambda: (dropping("train", "train"), X, {}), ["2 problems", "torch model is", "Flax model is"]),
    "wrong order": (lambda: (two()[::-1], X, {}), ["2 problems", "the torch model comes first, the Flax model second"]),
    "classes": (lambda: ((TorchTwo, FlaxTwo), X, {}), ["the class", "TorchTwo itself", "FlaxTwo itself", "make an instance"]),
    "trees": (
        lambda: ((two()[0].state_dict(), nnx.state(two()[1])), X, {}),
        [
            "torch.nn.Module, got a collections.OrderedDict",
            "flax.nnx.Module or a parity.Linen, got flax.nnx",
            "computes nothing",
        ],
    ),
    "nothing": (
        lambda: ((None, None), X, {}),
        ["2 problems", "torch.nn.Module, got None", "flax.nnx.Module or a parity.Linen, got None"],
    ),
    "float64 for float32": (
        lambda: (two(), X.astype(np.float64), {}),
        ["args[0] is float64", "computes in float32", "cast args[0] to float32"],
    ),
    "float64 without x64": (
        lambda: ((two()[0].double(), two()[1]), X.astype(np.float64), {}),
        ["compute in float64", "jax runs without 64-bit types", 'jax.config.update("jax_enable_x64", True)'],
    ),
    "meta parameters": (lambda: ((two()[0].to("meta"), two()[1]), X, {}), ["torch model", "meta device", "load or initialise"]),
    "meta argument": (lambda: (two(), torch.empty(3, 4, device="meta"), {}), ["args[0]", "meta device"]),
    "sparse argument": (lambda: (two(), torch.eye(4).to_sparse(), {}), ["args[0]", "not dense", ".to_dense()"]),
    "abstract flax": (lambda: (abstract_two(), X, {}), ["Flax model holds no values at", "transfer into it first"]),
    "both refuse": (
        lambda: (two(), X[:, :3], {}),
        ["both models refuse these inputs", "torch: RuntimeError: mat1 and mat2", "Flax: TypeError: dot_general"],
    ),
    "unknown level": (lambda: (two(), X, {"levels": ["weight"]}), ["no such level: 'weight'", *LEVELS]),
    "no level": (lambda: (two(), X, {"levels": []}), ["none given", *LEVELS]),
    "a level that is no name": (lambda: (two(), X, {"levels": 3}), ["no such level: 3"]),
    "unknown mode": (lambda: (two(), X, {"modes": "jit"}), ["modes must be 'compiled', 'eager' or both, got 'jit'"]),
    "no mode": (lambda: (two(), X, {"modes": ()}), ["modes must be", "got nothing"]),
    "negative seed": (lambda: (two(), X, {"seed": -1}), ["seed must be a whole number, at least 0, got -1"]),
    "kwargs that are none": (lambda: (two(), X, {"kwargs": [X]}), ["kwargs must map argument names to values, got list"]),
    "random torch model": (
        lambda: ((draw(TorchNoisy(), "two"), two()[1]), X, {}),
        ["returns different numbers for the same input", "turn off what is random"],
    ),
    "complex output": (
        lambda: (two(FlaxFourier, TorchFourier), X, {}),
        ["returns complex numbers at output ['y']", "torch.view_as_real"],
    ),
    "ids too large for jax": (
        lambda: ((TorchEven().eval(), FlaxEven()), IDS + 2**40, {}),
        ["args[0] holds int64 values that do not fit in 32 bits"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_each_misuse_is_one_clear_error(name):
    (torch_model, flax_model), x, options = REFUSED[name][0]()
    x_before = x.copy() if isinstance(x, np.ndarray) else x
    with pytest.raises(parity.InputError) as caught:
        parity.compare(torch_model, flax_model, x, **options)
    message = str(caught.value)
    assert [part for part in REFUSED[name][1] if part not in message] == [], message
    assert isinstance(caught.value, ValueError)
    assert not isinstance(x, np.ndarray) or np.array_equal(x, x_before)


@pytest.mark.parametrize(
    ("pair", "says"),
    [
        (
            lambda: (draw(TorchRaises(), "two"), two()[1]),
            "expected (torch) raises RuntimeError: torch will not; actual (flax) returns",
        ),
        (lambda: (two()[0], two(FlaxRaises)[1]), "expected (torch) returns; actual (flax) raises ValueError: flax will not"),
    ],
)
def test_if_one_side_refuses_the_interface_differs(pair, says):
    report = parity.compare(*pair(), X, **FAST)
    # Behind the error stands the line of the user's code.
    assert re.sub(r" \(at test_compare_contract\.py:\d+, in \w+\)", "", report.level("structure").findings[0].what) == says
    assert [level.status for level in report.levels] == ["passed", "failed", *["not run"] * 4]
    assert report.level("structure").findings[0].what in str(report)


# --------------------------------------------------------------- nothing changes


def snapshot(torch_model, flax_model, args):
    """Everything of the caller's that a comparison could touch."""
    return {
        "torch parameters": {n: (id(p), p.dtype, p.device, p.requires_grad, p.grad) for n, p in torch_model.named_parameters()},
        "torch bits": {n: t.detach().clone().view(torch.uint8).tolist() for n, t in torch_model.state_dict().items()},
        "torch modes": [m.training for m in torch_model.modules()],
        "torch hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in torch_model.modules()],
        "flax bits": {
            str(p): np.asarray(v.get_value()).tobytes() for p, v in nnx.to_flat_state(nnx.state(flax_model, nnx.Param))
        },
        "flax variables": {str(p): id(v) for p, v in nnx.to_flat_state(nnx.state(flax_model))},
        "flax modes": str(nnx.graphdef(flax_model)),
        "arguments": [(id(a), np.asarray(a.detach() if isinstance(a, torch.Tensor) else a).tobytes()) for a in args],
        "torch rng": torch.get_rng_state().tolist(),
        "numpy rng": str(np.random.get_state()),
        "python rng": python_random.getstate(),
        "torch settings": (
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.allow_tf32,
        ),
        "jax settings": (
            jax.config.jax_enable_x64,
            jax.config.jax_default_matmul_precision,
            jax.config.jax_traceback_filtering,
            jax.config.jax_debug_nans,
            jax.config.jax_default_device,
        ),
        "classes": [vars(cls).get("__call__") for cls in (*type(flax_model).__mro__, nnx.Linear, nnx.Embed)],
    }


@pytest.fixture
def unusual_settings():
    """Settings that differ from the defaults and from what `compare` pins."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    cudnn = torch.backends.cudnn
    flags = cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")
    cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32 = False, True, True
    filtering = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "tracebackhide")
    with jax.default_matmul_precision("bfloat16"):
        yield
    jax.config.update("jax_traceback_filtering", filtering)
    cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32 = flags
    torch.set_float32_matmul_precision(precision)
    torch.set_num_threads(threads)


class TorchFrozen(TorchTwo):
    def __init__(self):
        super().__init__()
        self.b.weight.requires_grad_(False)


def faulty():
    torch_model, flax_model = two()
    altered(flax_model, "b.kernel", one_ulp)
    return torch_model, flax_model


UNCHANGED = {
    "agreement": two,
    "failure": faulty,
    "frozen parameter": lambda: two(torch_class=TorchFrozen),
    "flax raises": lambda: two(FlaxRaises),
    "torch raises": lambda: two(torch_class=TorchRaises),
    "both raise": lambda: two(FlaxRaises, TorchRaises),
    "dropout in eval": lambda: dropping("eval", "eval"),
}


@pytest.mark.parametrize("name", UNCHANGED)
@pytest.mark.usefixtures("unusual_settings")
def test_nothing_of_the_callers_changes(name):
    torch_model, flax_model = UNCHANGED[name]()
    torch_model.b.bias.grad = torch.ones(4)
    args = (torch.from_numpy(X.copy()).requires_grad_(),)
    before = snapshot(torch_model, flax_model, args)
    for verb in (
        lambda: parity.compare(torch_model, flax_model, *args, **FAST),
        lambda: parity.trace(torch_model, flax_model, *args),
    ):
        try:
            verb()
        except parity.InputError:
            assert name in ("both raise", "torch raises")
        after = snapshot(torch_model, flax_model, args)
        assert [key for key in before if before[key] != after[key]] == []
    assert args[0].grad is None


def test_a_module_under_two_names_is_as_before():
    class TorchAlias(TorchTwo):
        def __init__(self):
            super().__init__()
            self.again = self.a

    class FlaxAlias(FlaxTwo):
        def __init__(self, *, rngs):
            super().__init__(rngs=rngs)
            self.again = self.a

    torch_model, flax_model = two(FlaxAlias, TorchAlias)
    before = snapshot(torch_model, flax_model, ())
    report = parity.compare(torch_model, flax_model, X, **FAST)
    assert snapshot(torch_model, flax_model, ()) == before
    assert report.passed, str(report)


def test_a_random_model_does_not_move_the_callers_generator():
    torch_model, flax_model = draw(TorchNoisy(), "two"), two()[1]
    before = torch.get_rng_state()
    with pytest.raises(parity.InputError, match="different numbers"):
        parity.compare(torch_model, flax_model, X)
    assert torch.equal(torch.get_rng_state(), before)


class TorchWriting(TorchTwo):
    """Writes into its input and counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        x.mul_(2)
        return super().forward(x)


class FlaxWriting(FlaxTwo):
    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.count = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.count.set_value(self.count.get_value() + 1)
        return super().__call__(2 * x)


def test_a_model_that_writes_into_inputs_and_buffers_writes_into_copies():
    torch_model, flax_model = two(FlaxWriting, TorchWriting)
    x = torch.from_numpy(X.copy())
    for report in (
        parity.compare(torch_model, flax_model, x, levels=LEVELS[:-1], **FAST),
        parity.compare(torch_model, flax_model, x, **FAST),
    ):
        assert [level.level for level in report.levels if level.status != "passed"] in ([], ["gradients"])
    assert parity.trace(torch_model, flax_model, x).passed
    assert torch_model.count.item() == 0 and flax_model.count.get_value() == 0
    assert torch.equal(x, torch.from_numpy(X))


def test_a_side_that_cannot_be_differentiated_is_compared_forwards():
    class Looping(FlaxTwo):
        def __call__(self, x):
            x = jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, self.b(c[1])), (0, x))[1]
            return self.a(self.act(x))

    report = parity.compare(*two(Looping), X, **FAST)
    assert [level.level for level in report.levels if level.status != "passed"] == ["gradients"]
    assert report.level("gradients").status == "failed"
    assert "actual (flax) raises ValueError: Reverse-mode differentiation does not work" in str(report)
    assert not report.trace or report.trace.passed

    class TorchInPlace(TorchTwo):
        def forward(self, x):
            y = torch.sigmoid(super().forward(x))
            return y.mul_(2)

    class FlaxTimes(FlaxTwo):
        def __call__(self, x):
            return 2 * jax.nn.sigmoid(super().__call__(x))

    level = parity.compare(*two(FlaxTimes, TorchInPlace), X, **FAST).level("gradients")
    assert level.status == "not run"
    assert "the torch model cannot be differentiated: RuntimeError" in level.summary


# --------------------------------------------------------------- callers and models of every kind


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_it_does_not_matter_in_which_mode_torch_is(context):
    with context():
        torch_model, flax_model = ids_pair()
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        report = parity.compare(torch_model, flax_model, torch.from_numpy(IDS), **FAST)
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
    assert report.passed, str(report)
    assert report.level("gradients").figures["elements"] == 7 * 4 + 3 * 4 + 3


def test_integer_inputs_of_both_widths_and_frameworks():
    torch_model, flax_model = ids_pair()
    for ids in (IDS, IDS.astype(np.int32), torch.from_numpy(IDS), jnp.asarray(IDS)):
        assert parity.compare(torch_model, flax_model, ids, levels=LEVELS[:-1], **FAST).passed
    altered(flax_model, "table.embedding", one_ulp)
    assert parity.compare(torch_model, flax_model, IDS, **FAST).trace.first_divergence().path == "table"


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_models_without_parameters_take_the_dtype_of_their_inputs(dtype):
    report = parity.compare(TorchReLU().eval(), FlaxReLU(), X.astype(dtype), **FAST)
    assert report.passed, str(report)
    assert report.level("weights").status == "not applicable"
    assert report.level("native").figures["dtype"] == np.dtype(dtype).name


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_other_dtypes_pass_and_a_moved_weight_is_found(dtype):
    with jax.enable_x64(dtype == "float64"):
        torch_model = draw(TorchTwo(), "two").to(getattr(torch, dtype))
        flax_model = FlaxTwo(rngs=nnx.Rngs(0))
        parity.transfer(torch_model, flax_model, cast="source")
        x = torch.from_numpy(X).to(getattr(torch, dtype))
        report = parity.compare(torch_model, flax_model, x, **FAST)
        assert report.passed, str(report)
        altered(flax_model, "b.bias", lambda bias: bias + bias.astype(bias.dtype) / 4)
        report = parity.compare(torch_model, flax_model, x, levels=["weights", "identical"])
        assert [level.status for level in report.levels] == ["failed", "failed"]
        assert report.trace.first_divergence().path == "b"


def test_outputs_in_dicts_and_arguments_by_name():
    class TorchNamed(TorchTwo):
        def forward(self, x, *, gain):
            return {"y": super().forward(x) * gain, "hidden": [x > 0], "none": None}

    class FlaxNamed(FlaxTwo):
        def __call__(self, x, *, gain):
            return {"y": super().__call__(x) * gain, "hidden": [x > 0], "none": None}

    report = parity.compare(*two(FlaxNamed, TorchNamed), kwargs={"x": X, "gain": 0.5}, **FAST)
    assert report.passed, str(report)
    assert report.level("structure").figures["outputs"] == 3
    assert report.level("gradients").figures["elements"] == 12 + 40


@pytest.mark.parametrize("where", ["the output", "a layer"])
def test_a_flax_model_that_asks_for_the_dtype_in_which_it_is_deployed_is_no_other(where):
    class Pinned(FlaxTwo):
        def __init__(self, *, rngs):
            super().__init__(rngs=rngs)
            if where == "a layer":
                self.a = nnx.Linear(4, 4, dtype=jnp.float32, rngs=rngs)

        def __call__(self, x):
            y = super().__call__(x)
            return y.astype(jnp.float32) if where == "the output" else y

    assert parity.compare(*two(Pinned), X, **FAST).passed


@pytest.mark.parametrize("explicit", [True, False])
def test_what_a_model_makes_of_whole_numbers_meets_its_weights_in_float64_too(explicit):
    """A time embedding made in the forward pass is float32 whatever runs: torch refuses to multiply it by float64."""

    class Timed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 3)

        def forward(self, times):
            steps = torch.arange(4, dtype=torch.float32) if explicit else torch.arange(4)
            turns = times[:, None] * torch.exp(-2.0 * steps)
            return self.last(self.first(torch.cat([turns.cos(), turns.sin()], -1)).tanh())

    class FlaxTimed(nnx.Module):
        def __init__(self, flip=False):
            self.first, self.last = (nnx.Linear(*size, rngs=nnx.Rngs(0)) for size in ((8, 6), (6, 3)))
            self.flip = flip

        def __call__(self, times):
            steps = jnp.arange(4, dtype=jnp.float32) if explicit else jnp.arange(4)
            turns = times[:, None] * jnp.exp(-2.0 * steps)
            parts = [jnp.cos(turns), jnp.sin(turns)]
            return self.last(jnp.tanh(self.first(jnp.concatenate(parts[::-1] if self.flip else parts, -1))))

    torch.manual_seed(0)
    ours, times = Timed().eval(), np.array([3, 711, 40])
    for flip in (False, True):
        theirs = FlaxTimed(flip)
        parity.transfer(ours, theirs)
        report = parity.compare(ours, theirs, times, levels=["identical", "native", "gradients"], diagnose=False, **FAST)
        assert {level.status for level in report.levels} == {"failed" if flip else "passed"}, str(report)


def test_models_that_pin_their_outputs_to_fewer_digits_do_not_count_as_passed():
    class Pinned(FlaxTwo):
        def __call__(self, x):
            return super().__call__(x).astype(jnp.bfloat16)

    class TorchPinned(TorchTwo):
        def forward(self, x):
            return super().forward(x).bfloat16()

    report = parity.compare(*two(Pinned, TorchPinned), X, **FAST)
    assert report.level("identical").status == report.level("gradients").status == "not run"
    assert not report.passed
    text = str(report)
    assert "not proved: a level could not run" in text and "NOT the same function" not in text
    assert "the torch model pins a dtype: output of the model is bfloat16 in a float64 run; remove the cast" in text
    assert "does not count as passed" in text
    with pytest.raises(parity.DivergenceError, match="not proved"):
        report.raise_for_divergence()


@pytest.mark.parametrize("scale", [1e30, 1e-42, 0.0])
def test_the_ends_of_the_range_are_no_fault(scale):
    report = parity.compare(*two(), (X * scale).astype(np.float32), **FAST)
    assert report.passed, str(report)


def test_whole_numbers_as_outputs():
    class TorchBest(TorchTwo):
        def forward(self, x):
            return super().forward(x).argmax(-1)

    class FlaxBest(FlaxTwo):
        def __call__(self, x):
            return super().__call__(x).argmax(-1)

    class FlaxWorst(FlaxTwo):
        def __call__(self, x):
            return super().__call__(x).argmin(-1)

    assert parity.compare(*two(FlaxBest, TorchBest), X, **FAST).passed
    report = parity.compare(*two(FlaxWorst, TorchBest), X, **FAST)
    assert report.level("identical").findings[0].what == "3 of 3 whole numbers differ"
    assert report.trace.first_divergence().path == ""


def test_nan_and_infinities_in_inputs_are_no_fault():
    x = X.copy()
    x[0, 1], x[1, 2], x[2, 0] = np.nan, np.inf, -np.inf
    # Gradients do differ: torch's ReLU passes them on at NaN, jax's does not.
    report = parity.compare(*two(), x, levels=LEVELS[:-1], **FAST)
    assert report.passed, str(report)


# --------------------------------------------------------------- results


def test_agreement_is_one_line():
    report = parity.compare(*two(), X, **FAST)
    assert report.passed and report.trace is None
    assert str(report) == f"the same function: {', '.join(LEVELS)} (12 values identical)"
    report.raise_for_divergence()


def test_what_a_reader_must_know_is_noted():
    def notes(report):
        return [str(note) for note in report.notes]

    report = parity.compare(TorchReLU().eval(), FlaxReLU(), np.ones((2, 4), np.float32), **FAST)
    assert notes(report) == ["args[0] is constant (1.0): a wrong scale, order or axis may not show"]
    assert "note: args[0] is constant" in str(report)
    one = parity.compare(*two(), X[:1], **FAST)
    assert notes(one) == ["args[0] has a batch of one: mixed-up batch entries do not show"]
    empty = parity.compare(*two(), X[:0], **FAST)
    assert empty.level("identical").status == "not applicable"
    assert notes(empty) == ["args[0] is empty: nothing is computed from it, and nothing shown"]


@pytest.mark.parametrize("pair", [two, faulty, lambda: two(FlaxRaises)])
def test_a_report_is_plain_data(pair):
    report = parity.compare(*pair(), X, **FAST)
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["passed"] == report.passed
    assert [level["level"] for level in data["levels"]] == list(LEVELS)
    assert re.fullmatch(r"2\.\d+.*", data["environment"]["torch"])
    assert data["environment"]["jax matmul precision"] == "highest"


def test_levels_are_climbed_in_order_and_only_those_asked_for():
    report = parity.compare(*two(), X, levels=("identical", "weights"))
    assert [level.level for level in report.levels] == ["weights", "identical"]
    assert report.level("identical").passed
    with pytest.raises(KeyError, match="'native' was not asked for; this report has weights, identical"):
        report.level("native")


def test_a_level_that_did_not_run_is_not_passed():
    done = parity.evidence.result.LevelResult("weights", "passed", "")
    stopped = parity.evidence.result.LevelResult("native", "not run", "no oracle")
    inapplicable = parity.evidence.result.LevelResult("wiring", "not applicable", "gelu")
    assert parity.Report((done,)).passed
    assert parity.Report((done, inapplicable)).passed
    assert not parity.Report((done, stopped)).passed
    assert not parity.Report((inapplicable,)).passed
    assert not parity.Report(()).passed


def test_the_same_seed_gives_the_same_report_and_the_models_may_be_compared_again():
    torch_model, flax_model = faulty()
    first, second = (parity.compare(torch_model, flax_model, X, seed=3, **FAST) for _ in range(2))
    assert str(first) == str(second)
    assert first.seed == 3 and "seed 3" in str(first)


def test_strict_makes_the_refusal_of_another_dtype_part_of_the_interface():
    loose, strict = (parity.compare(*two(), X, levels="structure", strict=strict) for strict in (False, True))
    says = "args[0] in float16: expected (torch) raises RuntimeError: mat1 and mat2 must have the same dtype"
    assert (
        loose.passed
        and loose.level("structure").notes[0]
        == f"also tried, counts only with strict=True: {strict.level('structure').findings[0].what}"
    )
    assert "float16" not in str(loose)
    assert not strict.passed and strict.level("structure").findings[0].what.startswith(says)


def test_a_diagnosis_that_cannot_be_made_is_told(monkeypatch):
    def broken(*_):
        raise ValueError("no such thing")

    monkeypatch.setattr(compare, "diagnose_subject", broken)
    torch_model, flax_model = two()
    altered(flax_model, "a.kernel", one_ulp)
    report = parity.compare(torch_model, flax_model, X)
    [note] = [note for note in report.notes if note.code == "not-looked-into"]
    assert "the diagnosis could not be made: ValueError: no such thing" in str(note)
    assert str(note) in str(report) and report.verdict == "differs" and report.trace is not None
