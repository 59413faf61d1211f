"""Calls that a careful user would not make: each gets the right verdict or a clear error, and leaves nothing behind."""

import threading
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from evidence_pairs import draw, normal, transferred
from flax import linen, nnx
from torch import nn

import jax_impl
import parity
import torch_impl
from parity.frameworks import load

FAST: dict[str, Any] = {"modes": ("compiled",)}


class TorchThen(nn.Module):
    """A layer, then a function of its result and of the other arguments."""

    def __init__(self, function):
        super().__init__()
        self.line, self.function = nn.Linear(4, 4), function

    def forward(self, x, *args):
        return self.function(self.line(x), *args)


class FlaxThen(nnx.Module):
    def __init__(self, function):
        self.line, self.function = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), function

    def __call__(self, x, *args):
        return self.function(self.line(x), *args)


def pair(torch_function, flax_function=None):
    return transferred(TorchThen(torch_function), FlaxThen(flax_function or torch_function), "then")


@dataclass(frozen=True)
class Batch:
    values: Any
    factor: float = 2.0


def test_an_argument_without_axes_is_a_value_like_any_other():
    report = parity.compare(*pair(lambda x, s: x * s), normal(3, 4), np.array(2.5, np.float32), **FAST)
    assert report.passed, str(report)
    assert report.level("gradients").figures["elements"] == 12 + 1 + 16 + 4
    wrong = pair(lambda x, s: x * s, lambda x, s: x * jnp.abs(s))
    assert not parity.compare(*wrong, normal(3, 4), np.array(-2.5, np.float32), **FAST).passed


def test_a_dataclass_is_a_container_of_arguments():
    batch = Batch(normal(3, 4, name="batch"))
    right = pair(lambda x, b: Batch(x + b.values * b.factor))
    report = parity.compare(*right, normal(3, 4), batch, **FAST)
    assert report.passed, str(report)
    assert report.level("gradients").figures["elements"] == 12 + 12 + 16 + 4
    wrong = pair(lambda x, b: x + b.values * b.factor, lambda x, b: x + b.values)
    assert parity.trace(*wrong, normal(3, 4), batch).first_divergence().path == ""


class TorchCounter(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int32))

    def forward(self, x):
        self.calls += 1
        return self.line(x) * self.calls


class FlaxCounter(nnx.Module):
    def __init__(self):
        self.line = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls.set_value(self.calls.get_value() + 1)
        return self.line(x) * self.calls.get_value()


def test_a_model_that_counts_its_calls_is_compared_with_gradients():
    torch_model, flax_model = transferred(TorchCounter(), FlaxCounter(), "counter")
    report = parity.compare(torch_model, flax_model, normal(3, 4), **FAST)
    assert report.passed, str(report)
    assert (int(torch_model.calls), int(flax_model.calls.get_value())) == (0, 0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_model_is_refused_as_what_it_is():
    scripted = torch.jit.script(nn.Linear(4, 4).eval())
    with pytest.raises(parity.InputError, match=r"the model is compiled by torch\.jit.*give the module it was made from"):
        parity.compare(scripted, nnx.Linear(4, 4, rngs=nnx.Rngs(0)), normal(3, 4))


class TorchPixels(nn.Module):
    """What images of whole numbers are normalised by stands in the model."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.relu(self.conv((x.float() / 255 - 0.5) / 0.25)).mean((2, 3)))


class FlaxPixels(nnx.Module):
    def __init__(self):
        self.conv = nnx.Conv(3, 4, (3, 3), padding="VALID", rngs=nnx.Rngs(0))
        self.head = nnx.Linear(4, 2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        x = jnp.moveaxis(x, 1, -1).astype(jnp.float32)
        return self.head(nnx.relu(self.conv((x / 255 - 0.5) / 0.25)).mean((1, 2)))


def test_pixels_that_are_made_floats_in_the_model_are_compared_and_traced():
    pair = transferred(TorchPixels(), FlaxPixels(), "pixels")
    x = np.random.default_rng(0).integers(0, 256, (2, 3, 6, 7)).astype(np.uint8)
    report = parity.compare(*pair, x, **FAST)
    assert report.passed, str(report)
    # On both sides the quotients are float32 even in a float64 run, and XLA multiplies by the reciprocal.
    trace = parity.trace(*pair, x)
    assert trace.passed, str(trace)
    pair[1].head.kernel.set_value(pair[1].head.kernel.get_value() * (1 + 1e-4))
    assert parity.trace(*pair, x).first_divergence().path == "head"


def test_an_embedding_of_time_steps_is_no_divergence():
    def torch_waves(x, steps):
        angles = steps[:, None].float() * torch.exp(-torch.arange(2) * 2.0)
        return torch.cat([angles.sin(), angles.cos()], -1)

    def flax_waves(x, steps):
        angles = steps[:, None].astype(jnp.float32) * jnp.exp(-jnp.arange(2) * 2.0)
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)

    class TorchSteps(TorchThen):
        def forward(self, x, steps):
            return self.line(self.function(x, steps)) + x

    class FlaxSteps(FlaxThen):
        def __call__(self, x, steps):
            return self.line(self.function(x, steps)) + x

    models = transferred(TorchSteps(torch_waves), FlaxSteps(flax_waves), "steps")
    trace = parity.trace(*models, normal(3, 4), np.array([17, 999, 402]))
    assert trace.passed, str(trace)


def test_complex_arguments_are_widened_like_others():
    z = (normal(3, 4) + 1j * normal(3, 4, name="imaginary")).astype(np.complex64)
    report = parity.compare(*pair(lambda x, z: x + z.abs(), lambda x, z: x + jnp.abs(z)), normal(3, 4), z, **FAST)
    assert report.passed, str(report)


def test_what_torch_export_made_is_compared():
    torch_model, flax_model = transferred(nn.Linear(4, 4), nnx.Linear(4, 4, rngs=nnx.Rngs(0)), "line")
    exported = torch.export.export(torch_model, (torch.from_numpy(normal(3, 4)),)).module()
    assert parity.compare(exported, flax_model, normal(3, 4), levels=("structure", "identical")).passed


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.array([[1.0, None]], object), r"args\[0\] holds object, which are no numbers; give an array of numbers"),
        (np.array(["a", "b"]), r"args\[0\] holds str32, which"),
        (np.array(["2026-01-01"], "datetime64[D]"), r"args\[0\] holds datetime64\[D\], which"),
        (np.zeros(3, [("a", "f4"), ("b", "i4")]), r"args\[0\] holds records, which"),
        (np.ones((3, 4), ">f4"), r"args\[0\] has the byte order of another kind of machine; give it as \.astype\('float32'\)"),
    ],
)
def test_an_array_of_no_numbers_is_refused_by_its_name(array, says):
    with pytest.raises(parity.InputError, match=f"cannot compare: {says}"):
        parity.compare(*pair(lambda x: x), array)


def test_a_random_key_among_the_arguments_is_refused_by_its_name():
    with pytest.raises(parity.InputError, match=r"args\[1\] is no array of numbers: .*PRNGKey"):
        parity.compare(*pair(lambda x, key: x), normal(3, 4), jax.random.key(0))


def helper(x):
    return x


class FlaxHelped(FlaxThen):
    """Calls what a notebook may define anew: neither its class nor its parts tell."""

    def __init__(self):
        super().__init__(lambda x: None)

    def __call__(self, x):
        return helper(self.line(x))


class LinenHelped(linen.Module):
    @linen.compact
    def __call__(self, x):
        return helper(linen.Dense(4, name="line")(x))


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_a_function_that_is_defined_anew_is_what_is_compared(monkeypatch, kind):
    torch_model = draw(TorchThen(torch.tanh), "helped")
    flax_model = FlaxHelped() if kind == "nnx" else parity.Linen(LinenHelped(), None, normal(3, 4))
    flax_model = parity.transfer(torch_model, flax_model).value
    for function, same in [(jnp.sin, False), (jnp.tanh, True), (lambda x: jnp.tanh(x) * 1.01, False)]:
        monkeypatch.setitem(globals(), "helper", function)
        report = parity.compare(torch_model, flax_model, normal(3, 4), **FAST)
        assert report.passed is same and (same or report.diagnosis.isolation.faults)
        assert parity.diagnose(torch_model, flax_model, normal(3, 4)).passed is same
        assert parity.trace(torch_model, flax_model, normal(3, 4)).passed is same


def test_the_mirror_is_compared_under_strict_promotion():
    models = transferred(
        torch_impl.MultiHeadAttention(8, 2, 4, 4, 4), jax_impl.MultiHeadAttention(8, 2, 4, 4, 4, rngs=nnx.Rngs(0))
    )
    x = normal(2, 3, 8)
    with jax.numpy_dtype_promotion("strict"):
        report = parity.compare(*models, x, x, x, **FAST)
        assert jax.config.jax_numpy_dtype_promotion == "strict"
    assert report.passed, str(report)


def settings() -> tuple[Any, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.deterministic,
        torch.get_num_threads(),
        jax.config.jax_traceback_filtering,
    )


@pytest.mark.parametrize("room", ["torch", "nnx"])
def test_threads_that_overlap_leave_the_process_as_it_was(room):
    before, inside, leave = settings(), [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]

    def hold(number):
        with load(room).pinned():
            inside[number].set()
            leave[number].wait(10)

    threads = [threading.Thread(target=hold, args=(number,)) for number in range(2)]
    for number, thread in enumerate(threads):
        thread.start()
        assert inside[number].wait(10)
    pinned = settings()
    # The first to come is the first to leave: the second still needs what the first has set.
    for number, thread in enumerate(threads):
        leave[number].set()
        thread.join()
        assert settings() == (pinned if number == 0 else before)
    assert pinned != before


def test_the_ends_of_the_range_among_outputs_are_no_fault():
    mask = np.array([[False, False, True, True]])
    models = pair(
        lambda x, mask: x.masked_fill(mask, torch.finfo(x.dtype).min),
        lambda x, mask: jnp.where(mask, jnp.finfo(x.dtype).min, x),
    )
    report = parity.compare(*models, normal(3, 4), mask, levels=("structure", "identical", "native"), **FAST)
    assert report.passed, str(report)


def test_gradients_below_the_smallest_normal_number_are_no_fault():
    depth = 40
    torch_model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth)))
    flax_model = nnx.Sequential(*(nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(depth)))
    transferred(torch_model, flax_model, "deep")
    with torch.no_grad():
        for parameter in torch_model.parameters():
            parameter.mul_(0.02)
    parity.transfer(torch_model, flax_model)
    report = parity.compare(torch_model, flax_model, normal(2, 4), levels=("native", "gradients"), **FAST)
    assert report.passed, str(report)


def test_a_random_key_is_no_array_of_numbers():
    with pytest.raises(parity.InputError, match=r"the value is no array of numbers: .*PRNGKey"):
        parity.diff(jax.random.key(0), jax.random.key(0))


@pytest.mark.parametrize("hidden", [-1e9, -1e20, "min"])
@pytest.mark.parametrize("factor", [1.0, 1.5, 1 + 1e-6])
def test_a_hidden_score_does_not_hide_what_is_wrong_beside_it(hidden, factor):
    mask = np.array([[False, False, True, True]])

    def value(finfo):
        return finfo.min if hidden == "min" else hidden

    models = pair(
        lambda x, mask: x.masked_fill(mask, value(torch.finfo(x.dtype))),
        lambda x, mask: jnp.where(mask, value(jnp.finfo(x.dtype)), x * factor),
    )
    report = parity.compare(*models, normal(3, 4), mask, levels="identical", **FAST)
    assert report.passed == (factor == 1), str(report)
    if factor != 1:
        assert report.level("identical").figures["unexplained"] == 6


def test_what_is_rounding_beside_larger_values_is_still_rounding():
    # Zero in exact arithmetic, and noise on both sides; large and small values beside it.
    models = pair(
        lambda x: (x + 1e9 * (x > 0).to(x.dtype), (x + 0.1) - x - 0.1, torch.cat([x * 1e12, (x + 0.1) - x - 0.1])),
        lambda x: (x + 1e9 * (x > 0), (0.1 + x) - (x + 0.1), jnp.concatenate([x * 1e12, (x - 0.1) + (0.1 - x)])),
    )
    report = parity.compare(*models, normal(3, 4), levels=("identical", "native"), **FAST)
    assert report.passed, str(report)


def test_weights_of_a_saturated_softmax_are_judged_together():
    # From 1 down to denormal numbers, which XLA flushes to zero and torch does not.
    models = pair(lambda x: torch.softmax(x * 150, -1), lambda x: jax.nn.softmax(x * 150, -1))
    report = parity.compare(*models, normal(16, 4), levels=("identical", "native"), **FAST)
    assert report.passed, str(report)


def test_compare_inside_jit_is_refused():
    torch_model, flax_model = nn.Linear(3, 3).eval(), nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    parity.transfer(torch_model, flax_model)

    @jax.jit
    def step(x):
        parity.compare(torch_model, flax_model, np.ones((2, 3), np.float32))
        return x

    with pytest.raises(parity.InputError, match=r"this runs inside jax.jit, where arrays hold no numbers; call it outside"):
        step(1.0)


class TorchRecurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 4, batch_first=True)

    def forward(self, x):
        return self.rnn(x)[0]


class FlaxConstant(nnx.Module):
    def __call__(self, x):
        return jnp.zeros((*x.shape[:-1], 4), x.dtype)


def test_a_layer_with_other_kernels_for_gradients_is_not_called_random():
    report = parity.compare(TorchRecurrent().eval(), FlaxConstant(), normal(2, 5, 3), modes="compiled")
    assert report.level("identical").status == "failed"
