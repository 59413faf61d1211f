"""Causes in how modules are connected, in positions, masks behind softmax and norms by hand; each with its neighbours."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from evidence_pairs import draw, normal, transferred
from fault_pairs import SOME, FlaxStage, TorchStage, X, functions, held, near_zero, torch_attend
from flax import nnx
from torch import nn

import parity

WIDTH, INNER = 6, 10
FEATURES = normal(3, 5, WIDTH)
IDS = np.array([[0, 2, 4, 1], [6, 5, 4, 2], [1, 1, 0, 5]], np.int32)


def diagnosed(torch_model, flax_model, *inputs, path, cause, says, complete=True):
    found = parity.diagnose(torch_model, flax_model, *inputs)
    assert [fault.path for fault in found.isolation.faults] == [path], str(found)
    assert found.causes and (found.causes[0].hypothesis, found.causes[0].complete) == (cause, complete), str(found)
    assert says in f"{found.causes[0].what}; {found.causes[0].change}", str(found)
    assert not found.notes and not found.unexplained
    return found


# --------------------------------------------------------------- functions: masks, norms, summaries


def behind_softmax(share):
    def attend(q, k, v, hidden):
        weights = jax.nn.softmax(q @ k.swapaxes(-2, -1) / math.sqrt(q.shape[-1]), -1) * ~hidden
        return (weights / weights.sum(-1, keepdims=True) if share == "half" else weights) @ v

    return attend


def not_masked(q, k, v, hidden):
    return jax.nn.softmax(q @ k.swapaxes(-2, -1) / math.sqrt(q.shape[-1]), -1) @ v


def torch_norm(x):
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, correction=0) + 1e-5)


def torch_rms(x):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-3)


def flax_norm(outside=0.0, inside=1e-5, centred=True, ddof=0, rms=False):
    def norm(x):
        y = x - x.mean(-1, keepdims=True) if centred else x
        spread = (x * x).mean(-1, keepdims=True) if rms else x.var(-1, keepdims=True, ddof=ddof)
        return y / (jnp.sqrt(spread + inside) + outside)

    return norm


def centred_rms(x):
    y = x - x.mean(-1, keepdims=True)
    return y / jnp.sqrt((y * y).mean(-1, keepdims=True) + 1e-3)


SEQUENCES = tuple(normal(3, 2, 5, 4, name=name) for name in "qkv")
SHIFTED = X + 2
FUNCTIONS = [
    functions("behind", torch_attend, behind_softmax(""), (*SEQUENCES, SOME), "mask", "behind softmax"),
    functions("not used", torch_attend, not_masked, (*SEQUENCES, SOME), "mask", "the mask is not used"),
    functions("outside", torch_norm, flax_norm(1e-4, 0.0), (near_zero(X),), "epsilon", "0.0001 is added to the root"),
    functions("outside, odd", torch_norm, flax_norm(3.3e-4, 0.0), (near_zero(X),), "epsilon", "0.00033 is added to the root"),
    functions("under", torch_norm, flax_norm(0.0, 1e-6), (near_zero(X),), "epsilon", "Flax adds 1e-06 where torch adds 1e-05"),
    functions("not centred", torch_norm, flax_norm(centred=False), (SHIFTED,), "variance", "the mean is not subtracted"),
    functions("an RMS norm", torch_norm, flax_norm(centred=False, rms=True), (SHIFTED,), "variance", "an RMS norm"),
    functions("unbiased", torch_norm, flax_norm(ddof=1), (SHIFTED,), "variance", "ddof=0"),
    functions("centred", torch_rms, centred_rms, (SHIFTED,), "variance", "the mean is subtracted first"),
    functions("maximum", lambda x: x.sin().mean(1), lambda x: jnp.sin(x).max(1), (X,), "part of a value", "largest along"),
    functions("position", lambda x: x.sin()[:, 0], lambda x: jnp.sin(x)[:, -1], (X,), "part of a value", "position 3 along"),
]


@pytest.mark.parametrize("planted", FUNCTIONS, ids=lambda planted: planted.name)
def test_a_fault_in_a_function_is_told_from_its_neighbours(planted):
    diagnosed(*planted.pair(), *planted.inputs, path="core", cause=planted.cause, says=planted.says)


# --------------------------------------------------------------- masks that a module makes for others


class TorchMasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = TorchStage(torch_attend)

    def forward(self, q, k, v, padding):
        causal = torch.arange(k.shape[2])[None, :] > torch.arange(q.shape[2])[:, None]
        return self.attend(q, k, v, padding | causal[None, None])


class FlaxMasks(nnx.Module):
    def __init__(self, steps, use=True, invert=False):
        self.attend = FlaxStage(not_masked_where)
        self.steps, self.use, self.invert = steps, use, invert

    def __call__(self, q, k, v, padding):
        causal = jnp.arange(k.shape[2])[None, :] > jnp.arange(q.shape[2])[:, None] + self.steps
        padding = ~padding if self.invert else padding
        return self.attend(q, k, v, padding | causal[None, None] if self.use else padding)


def not_masked_where(q, k, v, hidden):
    scores = q @ k.swapaxes(-2, -1) / math.sqrt(q.shape[-1])
    return jax.nn.softmax(jnp.where(hidden, -jnp.inf, scores), -1) @ v


PADDED = np.zeros((3, 1, 1, 5), bool)
PADDED[1, ..., 3:] = True
MASKS = {
    "moved": (FlaxMasks(1), "the causal mask is moved by 1, the second of two"),
    "left out": (FlaxMasks(0, use=False), "a mask is not used, the second of two"),
    "inverted": (FlaxMasks(0, invert=True), "the mask is inverted, the first of two"),
}


@pytest.mark.parametrize("name", MASKS)
def test_of_two_masks_that_are_joined_the_wrong_one_is_told(name):
    flax_model, says = MASKS[name]
    diagnosed(TorchMasks().eval(), flax_model, *SEQUENCES, PADDED, path="", cause="mask", says=says)


def test_a_mask_that_hides_the_same_is_no_fault():
    assert parity.diagnose(TorchMasks().eval(), FlaxMasks(0), *SEQUENCES, PADDED).passed


# --------------------------------------------------------------- positions


def torch_rotary(x):
    length, d = x.shape[-2:]
    angle = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, d, 2) / d)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def flax_rotary(base=10000.0, sign=1, first=0, neighbours=False, exchanged=False):
    def rotary(x):
        length, d = x.shape[-2:]
        angle = sign * (np.arange(length)[:, None] + first) * base ** (-np.arange(0, d, 2) / d)
        cos, sin = jnp.asarray(np.cos(angle), x.dtype), jnp.asarray(np.sin(angle), x.dtype)
        cos, sin = (sin, cos) if exchanged else (cos, sin)
        a, b = (x[..., ::2], x[..., 1::2]) if neighbours else (x[..., : d // 2], x[..., d // 2 :])
        y = a * cos - b * sin, b * cos + a * sin
        return jnp.stack(y, -1).reshape(x.shape) if neighbours else jnp.concatenate(y, -1)

    return rotary


ROTARY = [
    (flax_rotary(base=500000.0), "positions", "base 500000 in Flax, 10000 in torch"),
    (flax_rotary(base=777.0), "positions", "base 777 in Flax"),
    (flax_rotary(sign=-1), "positions", "turn the other way round"),
    (flax_rotary(first=1), "positions", "counted from +1"),
    (flax_rotary(exchanged=True), "positions", "sine and cosine"),
    (flax_rotary(neighbours=True), "rotary pairs", "rotates neighbouring channels where torch rotates the two halves"),
    (lambda x: 2 * flax_rotary()(x), "factor", "times torch's"),
]


@pytest.mark.parametrize(("wrong", "cause", "says"), ROTARY, ids=[says for _, _, says in ROTARY])
def test_positions_are_told_apart(wrong, cause, says):
    diagnosed(*held(torch_rotary, wrong, "rotary"), normal(2, 2, 5, 6), path="core", cause=cause, says=says)


def test_angles_that_torch_computes_in_float32_in_a_float64_run_are_no_fault():
    assert parity.diagnose(*held(torch_rotary, flax_rotary(), "rotary"), normal(2, 2, 5, 6)).passed


# --------------------------------------------------------------- modules that are connected otherwise


class TorchBlock(nn.Module):
    """A norm behind each sum, a gate."""

    def __init__(self):
        super().__init__()
        self.norm1, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.up, self.act = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER), nn.SiLU()
        self.down, self.norm2 = nn.Linear(INNER, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = self.norm1(x + self.mix(x))
        return self.norm2(x + self.down(self.act(self.gate(x)) * self.up(x)))


class TorchPart(nn.Module):
    """Embeddings, of which one is added as it is once more, a block, a head that is tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.words, self.places, self.block = nn.Embedding(7, WIDTH), nn.Embedding(4, WIDTH), TorchBlock()

    def forward(self, ids):
        words = self.words(ids)
        return (self.block(words + self.places(torch.arange(ids.shape[1]))) + words) @ self.words.weight.T


class FlaxBlock(nnx.Module):
    def __init__(self, fault, rngs):
        self.fault = fault
        self.norm1, self.norm2 = (nnx.LayerNorm(WIDTH, epsilon=1e-5, use_fast_variance=False, rngs=rngs) for _ in range(2))
        self.mix, self.gate, self.up = (nnx.Linear(WIDTH, width, rngs=rngs) for width in (WIDTH, INNER, INNER))
        self.act, self.down = Silu(), nnx.Linear(INNER, WIDTH, rngs=rngs)

    def gated(self, x):
        gate, up = self.gate(x), self.up(x)
        if self.fault == "gate and up":
            return self.down(self.act(up) * gate)
        if self.fault == "activation behind":
            return self.act(self.down(gate * up))
        return self.down(self.act(gate) * up)

    def __call__(self, x):
        if self.fault == "norms before":
            x = x + self.mix(self.norm1(x))
            return x + self.gated(self.norm2(x))
        x = self.norm1(x + self.mix(x)) if self.fault != "no norm" else x + self.mix(x)
        return self.norm2((2 if self.fault == "twice" else 1) * x + self.gated(x))


class FlaxPart(nnx.Module):
    def __init__(self, fault):
        rngs = nnx.Rngs(0)
        self.fault = fault
        self.words, self.places = nnx.Embed(7, WIDTH, rngs=rngs), nnx.Embed(4, WIDTH, rngs=rngs)
        self.block = FlaxBlock(fault, rngs)

    def __call__(self, ids):
        words = self.words(ids) * (3.0 if self.fault == "scaled" else 1.0)
        return (self.block(words + self.places(jnp.arange(ids.shape[1]))) + words) @ self.words.embedding[...].T


class Silu(nnx.Module):
    def __call__(self, x):
        return jax.nn.silu(x)


CONNECTIONS = {
    "gate and up": ("block", "arguments exchanged", "what block.gate returns and what block.up returns are taken for"),
    "activation behind": ("block", "order of modules", "what it gives block.act: args[0] is what block.down returns"),
    "norms before": ("block", "norm placement", "what it gives block.mix: args[0] is what block.norm1 returns"),
    "no norm": ("block", "another value", "block.norm1 is left out"),
    "scaled": ("", "factor", "what words returns is multiplied by 3"),
    "twice": ("block", "residual", "once too often"),
}


def part(fault=""):
    torch_model, flax_model = draw(TorchPart(), "part"), FlaxPart(fault)
    parity.transfer(torch_model, flax_model)
    return torch_model, flax_model


@pytest.mark.parametrize("fault", CONNECTIONS)
def test_modules_connected_otherwise_are_told(fault):
    path, cause, says = CONNECTIONS[fault]
    # Where the activation is gone from a product, that is a second cause beside the new order.
    diagnosed(*part(fault), IDS, path=path, cause=cause, says=says, complete=fault != "activation behind")


def test_a_clean_pair_whose_head_is_tied_has_no_cause():
    found = parity.diagnose(*part(), IDS)
    assert found.passed and not found.causes


# --------------------------------------------------------------- arrays


def change(model, path, new):
    *holders, name = path.split(".")
    for holder in holders:
        model = getattr(model, holder)
    variable = getattr(model, name)
    variable[...] = new(variable[...])


ARRAYS = {
    "a tied array": ("words.embedding", lambda a: 2 * a, "words", "Flax's is 2 times torch's"),
    "a row that no id takes": ("words.embedding", lambda a: a.at[3].multiply(-1.0), "words", "6 of 42 values of Flax's differ"),
    "inputs in another order": (
        "block.mix.kernel",
        lambda a: a[np.arange(WIDTH).reshape(2, -1).T.reshape(-1)],
        "block.mix",
        "columns (inputs) in another order: cut into 2 and 3, those are exchanged",
    ),
    "outputs in another order": (
        "block.mix.kernel",
        lambda a: a[:, [1, 0, 2, 3, 4, 5]],
        "block.mix",
        "rows (outputs) in another order",
    ),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_a_wrong_array_is_the_fault_of_the_module_that_holds_it(name):
    path, new, owner, says = ARRAYS[name]
    torch_model, flax_model = part()
    change(flax_model, path, new)
    found = diagnosed(torch_model, flax_model, IDS, path=owner, cause="weights", says=says)
    unseen = "what was run does not show it" in str(found)
    assert unseen is (name == "a row that no id takes")


def test_arrays_of_two_modules_exchanged_are_told_in_both():
    torch_model, flax_model = part()
    gate, up = flax_model.block.gate.kernel[...], flax_model.block.up.kernel[...]
    flax_model.block.gate.kernel[...], flax_model.block.up.kernel[...] = up, gate
    found = parity.diagnose(torch_model, flax_model, IDS)
    assert [fault.path for fault in found.isolation.faults] == ["block.gate", "block.up"], str(found)
    assert [cause.what for cause in found.causes] == [
        "block.gate.weight: Flax has torch's block.up.weight there",
        "block.up.weight: Flax has torch's block.gate.weight there",
    ]


def test_arrays_that_were_never_loaded_are_told_so_whatever_their_biases_are():
    torch_model, flax_model = draw(TorchPart(), "part"), FlaxPart("")
    found = parity.diagnose(torch_model, flax_model, IDS)
    owners = {name for name, module in torch_model.named_modules() if list(module.parameters(recurse=False))}
    assert {fault.path for fault in found.isolation.faults} == owners, str(found)
    assert all("they were not loaded" in found.causes_of(owner)[0].what for owner in owners - {"block.norm1", "block.norm2"})
    assert "its initial value: it was not loaded" in found.causes_of("block.norm1")[0].what


class TorchIdle(nn.Module):
    """A module that is never called."""

    def __init__(self):
        super().__init__()
        self.idle, self.used = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


class FlaxIdle(nnx.Module):
    def __init__(self):
        self.idle, self.used = (nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(2))

    def __call__(self, x):
        return self.used(x)


def test_an_array_of_a_module_that_is_never_called_is_told():
    torch_model, flax_model = draw(TorchIdle(), "idle"), FlaxIdle()
    parity.transfer(torch_model, flax_model)
    assert parity.diagnose(torch_model, flax_model, normal(3, 4)).passed
    change(flax_model, "idle.bias", lambda a: a + 1)
    found = diagnosed(torch_model, flax_model, normal(3, 4), path="idle", cause="weights", says="4 of 4 values")
    assert found.isolation.faults[0].flax_path == "idle"


# --------------------------------------------------------------- arguments, trees of outputs, ties


def test_one_argument_that_is_used_twice_is_told():
    right, wrong = lambda a, b: torch.sin(a) + 2 * b, lambda a, b: jnp.sin(a) + 2 * a
    said = "args[0] is taken for args[1]"
    diagnosed(*held(right, wrong, "args"), X, normal(3, 4, 8, name="b"), path="core", cause="arguments exchanged", says=said)


class TorchBeside(nn.Module):
    """A module inside returns its weights, or None, beside its features."""

    def __init__(self):
        super().__init__()
        self.attend, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 8)

    def forward(self, x):
        return self.out(self.attend(x, x, x, need_weights=False)[0])


class FlaxAttend(nnx.Module):
    def __init__(self, scale):
        self.in_proj_weight, self.in_proj_bias = nnx.Param(jnp.zeros((24, 8))), nnx.Param(jnp.zeros(24))
        self.out_proj, self.scale = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), scale

    def __call__(self, x):
        y = x @ self.in_proj_weight[...].T + self.in_proj_bias[...]
        q, k, v = (part.reshape(*x.shape[:2], 2, 4).swapaxes(1, 2) for part in jnp.split(y, 3, -1))
        weights = jax.nn.softmax(q @ k.swapaxes(-2, -1) * self.scale, -1)
        return self.out_proj((weights @ v).swapaxes(1, 2).reshape(x.shape))


class FlaxBeside(nnx.Module):
    def __init__(self, scale):
        self.attend, self.out = FlaxAttend(scale), nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.out(self.attend(x))


def test_a_port_that_returns_the_features_alone_is_compared_by_them():
    torch_model, x = draw(TorchBeside(), "beside"), normal(3, 5, 8)
    right, wrong = FlaxBeside(0.5), FlaxBeside(1.0)
    for flax_model in (right, wrong):
        parity.transfer(torch_model, flax_model)
    clean = parity.diagnose(torch_model, right, x)
    assert clean.passed and all(one.status == "agrees" for one in clean.isolation.modules), str(clean)
    diagnosed(torch_model, wrong, x, path="attend", cause="softmax scale", says="sqrt(4) times torch's")


def test_ties_that_rounding_breaks_do_not_swallow_a_fault():
    """Where every score is -1e20 any rounding makes another softmax: an inverted mask is a fault all the same."""
    hidden = np.zeros((3, 1, 5, 5), bool)
    hidden[1, 0, 2] = True
    hidden[0, 0, 1, :2] = True

    def right(q, k, v, hidden):
        return torch.softmax((q @ k.transpose(-2, -1)).masked_fill(hidden, -1e20) / 2, -1) @ v

    def wrong(q, k, v, hidden):
        return jax.nn.softmax(jnp.where(~hidden, -1e20, q @ k.swapaxes(-2, -1)) / 2, -1) @ v

    diagnosed(*held(right, wrong, "ties"), *SEQUENCES, hidden, path="core", cause="mask", says="the mask is inverted")


# --------------------------------------------------------------- the time for trying causes


def test_where_time_runs_out_the_report_says_so():
    def odd(x):
        return jnp.sin(x + 0.1 * x**2 * jnp.cos(x))

    found = parity.diagnose(*held(torch.sin, odd, "odd"), X, seconds=1e-6)
    assert [fault.path for fault in found.isolation.faults] == ["core"]
    assert len(found.notes) == 1 and found.tried <= 9, str(found)
    assert "core: of 1e-06 s for causes its share ran out after" in str(found)
    assert "give more by seconds=" in str(found)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), "10", True, None])
def test_a_time_that_is_none_is_refused(seconds):
    with pytest.raises(parity.InputError, match="seconds must be a positive number, got"):
        parity.diagnose(*held(torch.sin, jnp.sin, "time"), X, seconds=seconds)


def test_a_module_whose_answer_is_known_computes_nothing():
    from parity.frameworks.torch.isolation import alone

    counted = []

    class Counting(nn.Module):
        def forward(self, x):
            counted.append(1)
            return F.relu(x)

    model = nn.Sequential(Counting(), nn.Sigmoid())
    answer = np.full((2, 3), 0.25)
    run = alone(model, "", (np.ones((2, 3)),), {}, {"0": [answer]})
    assert not counted and run.seen == {"0": 1}
    np.testing.assert_allclose(run.outputs[""], 1 / (1 + np.exp(-0.25)) * np.ones((2, 3)))
    assert run.given["0", 0, "args[0]"].tolist() == np.ones((2, 3)).tolist()
    model(torch.ones(2, 3))
    assert counted == [1], "the model is as before"


# --------------------------------------------------------------- a term of a sum that is not normed


class TorchAdded(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.norm, self.out = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.out(x + self.norm(self.mix(x)))


class FlaxAdded(nnx.Module):
    def __init__(self, rngs):
        self.mix, self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 4, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, epsilon=1e-5, use_fast_variance=False, rngs=rngs)

    def __call__(self, x):
        return self.out(x + self.mix(x))


def test_a_norm_left_out_of_a_sum_is_no_other_residual():
    torch_model, flax_model = draw(TorchAdded(), "added"), FlaxAdded(nnx.Rngs(0))
    parity.transfer(torch_model, flax_model)
    found = diagnosed(torch_model, flax_model, FEATURES, path="", cause="another value", says="norm is left out")
    assert "residual" not in {cause.hypothesis for cause in found.causes}, str(found)


def torch_turned(x):
    a, b = x.chunk(2, -1)
    return torch.cat([a * 2 - b * 3, b * 2 + a * 3], -1)


def flax_turned(x):
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * 2 - b * 3, b * 2 - a * 3], -1)


def test_a_term_with_the_other_sign_is_told():
    says = "one term has the other sign where torch computes add"
    diagnosed(*held(torch_turned, flax_turned, "sign"), FEATURES, path="core", cause="terms", says=says)


def test_a_product_for_a_quotient_is_told():
    def wrong(x):
        return x * (2 + jnp.abs(x).sum(-1, keepdims=True))

    pair = held(lambda x: x / (2 + x.abs().sum(-1, keepdim=True)), wrong, "quotient")
    says = "Flax takes the product of two arrays where torch takes their quotient; divide the first by the second"
    diagnosed(*pair, FEATURES, path="core", cause="factor", says=says)


# ---------------------------------------------------------------- arguments that Flax's layer is not given


class TorchCross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.att, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.att(x, context, context)[0])


class FlaxCross(nnx.Module):
    def __init__(self, fault: str, rngs: nnx.Rngs):
        self.att = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.norm, self.fault = nnx.LayerNorm(8, epsilon=1e-5, use_fast_variance=False, rngs=rngs), fault

    def __call__(self, x, context):
        if self.fault == "to itself":
            return self.norm(x + self.att(x))
        if self.fault == "turned round":
            return self.norm(x + self.att(context[:, :5], x))
        if self.fault == "norm inside":
            return x + self.norm(self.att(x, context))
        return self.norm(x + self.att(x, context))


@pytest.mark.parametrize(
    ("fault", "cause", "says"),
    [
        ("to itself", "another value", "Flax gives att no args[1] (its own args[1]) and no args[2] (its own args[1])"),
        ("turned round", "another value", "what it gives att: args[1] is its own args[0]"),
        ("norm inside", "residual", "output has its own args[0] once too often"),
    ],
)
def test_who_calls_a_layer_with_other_arguments_is_blamed_not_the_layer(fault, cause, says):
    pair = transferred(TorchCross(), FlaxCross(fault, nnx.Rngs(0)), "cross")
    found = parity.diagnose(*pair, normal(3, 5, 8), normal(3, 6, 8, name="context"))
    assert [one.path for one in found.isolation.faults] == [""], str(found)
    assert found.causes[0].hypothesis == cause and says in found.causes[0].what, str(found)
    if fault == "norm inside":
        assert found.causes[1].what == "what it gives norm: args[0] lacks its own args[0]: a residual is not added", str(found)


def test_values_that_a_layer_takes_to_be_its_keys_are_no_fault():
    pair = transferred(TorchCross(), FlaxCross("", nnx.Rngs(0)), "cross")
    assert parity.diagnose(*pair, normal(3, 5, 8), normal(3, 6, 8, name="context")).passed


class TorchPairs(nn.Module):
    """A table of what lies between two places."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(5)
        return torch.softmax(x + self.table(places[None] - places[:, None] + 4).permute(2, 0, 1), -1)


class FlaxPairs(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Embed(9, 4, rngs=rngs)

    def __call__(self, x):
        places = jnp.arange(5)
        return jax.nn.softmax(x + self.table(places[:, None] - places[None] + 4).transpose(2, 0, 1), -1)


def test_of_a_table_nothing_is_said_about_batch_and_length():
    pair = transferred(TorchPairs(), FlaxPairs(nnx.Rngs(0)), "pairs")
    first = parity.diagnose(*pair, normal(3, 4, 5, 5)).causes[0]
    assert first.what == "what it gives table has its first two axes in the other order"
    assert first.change == "give it x.swapaxes(0, 1)"


# ---------------------------------------------------------------- a loop that takes always the same layer


class TorchLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


class FlaxLoop(nnx.Module):
    def __init__(self, order: tuple[int, ...], rngs: nnx.Rngs):
        self.blocks, self.order = nnx.List([nnx.Linear(6, 6, rngs=rngs) for _ in range(3)]), order

    def __call__(self, x):
        for number in self.order:
            x = x + jnp.tanh(self.blocks[number](x))
        return x


def test_layers_that_are_never_called_are_told():
    pair = transferred(TorchLoop(), FlaxLoop((0, 0, 0), nnx.Rngs(0)), "loop")
    found = parity.diagnose(*pair, FEATURES)
    assert [one.path for one in found.isolation.faults] == [""], str(found)
    what = "Flax never calls blocks.1 and blocks.2, and calls blocks.0 3 times where torch calls it 1"
    assert (found.causes[0].hypothesis, found.causes[0].what) == ("another layer", what), str(found)


@pytest.mark.slow
def test_layers_that_are_called_in_another_order_are_no_layers_that_are_never_called():
    pair = transferred(TorchLoop(), FlaxLoop((2, 1, 0), nnx.Rngs(0)), "loop")
    found = parity.diagnose(*pair, FEATURES)
    assert "or call the two in torch's order" in found.causes[0].change, str(found)
    assert not [cause for cause in found.causes if "never" in cause.what], str(found)
