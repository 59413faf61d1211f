"""What rounding explains: how much noise is allowed for, and that a fault just above it is found."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx
from torch import nn

import parity
from benchmarks import clean_pairs, clean_trials
from parity.errors import InputError
from parity.evidence import ladder, trace
from parity.evidence.numerics import UNIT, precision
from parity.evidence.subject import Subject
from parity.frameworks.torch import Elementary, Shaken

HIDDEN = -1e20


class InPlace(nn.Module):
    """Nothing here is rounded but in place."""

    def forward(self, x):
        y = x.clone()
        return y.tanh_()


@pytest.mark.parametrize("mode", [Shaken(UNIT, 1), Elementary(UNIT, "float32", 1)])
def test_what_is_computed_in_place_is_moved_too(mode):
    x = torch.linspace(-2, 2, 50, dtype=torch.float64)
    with mode:
        moved = InPlace()(x)
    apart = (moved - x.tanh()).abs() / x.tanh().abs()
    largest = 5 * UNIT["float32"] if isinstance(mode, Elementary) else UNIT["float64"]
    assert 0.5 * largest < apart.max() < 1.5 * largest + 2**-52


def test_a_copy_in_place_is_not_moved():
    x = torch.linspace(-2, 2, 50, dtype=torch.float64)
    with Shaken(UNIT, 1):
        y = torch.empty_like(x).copy_(x).relu_()
    assert torch.equal(y, x.relu())


def noise(make, dtype: str, runs: int = 4) -> float:
    """Of what a function gives in float64 if every elementary operation is rounded, relative to the scale, in units."""
    expected = make()
    found = []
    for seed in range(runs):
        with Elementary(UNIT, dtype, seed):
            found.append(float((make() - expected).abs().max() / expected.abs().max()))
    return max(found) / UNIT[dtype]


def test_a_fused_kernel_is_rounded_at_each_of_its_steps():
    x = 1e3 + torch.from_numpy(np.random.default_rng(0).standard_normal((3, 64)))
    # Of a normalisation the first step already, the distance from the mean, loses what the mean is larger.
    assert noise(lambda: nn.functional.layer_norm(x, (64,)), "float32") > 100
    assert noise(lambda: x * 2, "float32") < 1.1


def test_sums_are_rounded_as_one_running_sum_but_for_products_in_half_precision():
    ones = torch.ones(1, 4096, dtype=torch.float64)
    assert noise(lambda: ones.sum(1), "float32") > 8
    assert noise(lambda: ones.sum(1), "bfloat16") > 8
    assert noise(lambda: ones @ ones.T, "float32") > 8
    assert noise(lambda: ones @ ones.T, "bfloat16") < 1.1


def test_a_sum_that_ends_with_its_largest_term_is_rounded_from_there_too():
    terms = torch.full((2048,), 1e-3, dtype=torch.float64)
    terms[-1] = 1e4
    # As it stands only the last addition is as large as the sum; as a loop adds up its gradients every one is.
    assert noise(terms.sum, "float32") > 8
    assert noise(terms.flip(0).sum, "float32") > 8


def kernel_gradient(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    layer.zero_grad()
    layer(x).sum().backward()
    return layer.weight.grad


@pytest.mark.parametrize("make", [nn.Conv2d, nn.ConvTranspose2d])
def test_the_gradient_of_a_kernel_is_rounded_as_one_sum_over_batch_and_places(make):
    layer = make(2, 3, 3, dtype=torch.float64)
    nn.init.ones_(layer.weight)
    ones = torch.ones(4, 2, 40, 40, dtype=torch.float64)
    assert noise(lambda: kernel_gradient(layer, ones), "float32") > 8
    assert noise(lambda: kernel_gradient(layer, ones), "bfloat16") < 3
    # The outputs add up 18 products at most.
    assert 1 < noise(lambda: layer(ones).detach(), "float32") < 8
    given = ones.clone().requires_grad_()

    def back() -> torch.Tensor:
        given.grad = None
        layer(given).sum().backward()
        return given.grad

    assert 1 < noise(back, "float32") < 10


def test_the_gradient_of_a_convolutions_bias_is_one_sum_in_half_precision_too():
    layer = nn.Conv2d(2, 3, 3, dtype=torch.float64)
    ones = torch.ones(4, 2, 40, 40, dtype=torch.float64)

    def back() -> torch.Tensor:
        layer.zero_grad()
        layer(ones).sum().backward()
        return layer.bias.grad

    assert noise(back, "bfloat16") > 8 and noise(back, "float32") > 8


def test_of_a_convolution_without_gradients_of_all_only_those_that_are_wanted_are_rounded():
    layer = nn.Conv1d(2, 4, 3, groups=2, bias=False, dtype=torch.float64)
    with Elementary(UNIT, "float32", 0):
        layer(torch.ones(2, 2, 9, dtype=torch.float64)).sum().backward()
    assert layer.weight.grad is not None and layer.bias is None


# ---------------------------------------------------------------- levels


class TorchMasked(nn.Module):
    """Scores, some of them hidden."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x).masked_fill(x > 1.0, HIDDEN)


class FlaxMasked(nnx.Module):
    def __init__(self, fault: float = 0.0):
        self.layer, self.fault = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), fault

    def __call__(self, x):
        return jax.numpy.where(x > 1.0, HIDDEN, self.layer(x) + self.fault)


def masked(fault: float):
    theirs, mine = TorchMasked().eval(), FlaxMasked(fault)
    parity.transfer(theirs, mine)
    return theirs, mine, np.random.default_rng(0).standard_normal((4, 5, 8)).astype(np.float32)


def test_native_and_trace_see_a_small_fault_beside_hidden_scores():
    assert parity.compare(*masked(0.0), levels=["native"]).passed
    assert parity.trace(*masked(0.0)).passed
    assert not parity.compare(*masked(1e-4), levels=["native"], diagnose=False).passed
    found = parity.trace(*masked(1e-4)).first_divergence()
    assert found
    assert found.path == ""
    assert found.torch > HIDDEN
    assert found.difference == pytest.approx(1e-4, rel=1e-3)
    assert found.differing < found.elements


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_error_of_ten_times_the_noise_is_found_after_every_look(dtype):
    rng = np.random.default_rng(0)
    oracle = rng.standard_normal(400)
    runs = [oracle + UNIT[dtype] * rng.uniform(-1, 1, 400) for _ in range(25)]
    assert precision(runs[0], runs[1:], oracle, dtype, last=True).passed
    wrong = oracle + 10 * UNIT[dtype] * rng.uniform(-1, 1, 400)
    assert not precision(wrong, runs, oracle, dtype, last=True).passed


def test_few_numbers_are_judged_by_their_largest():
    oracle, unit = np.ones(1), UNIT["float32"]
    assert precision(oracle + 4.5 * unit, [oracle + unit], oracle, "float32").passed
    assert not precision(oracle + 5.5 * unit, [oracle + unit], oracle, "float32").passed


class TorchCube(nn.Module):
    def forward(self, x):
        return (x * x * x).sum(-1)


class FlaxCube(nnx.Module):
    def __init__(self, wrong: bool = False):
        self.wrong = wrong

    def __call__(self, x):
        y = x * x * x
        # Overflows where torch does not.
        return (y * 1e38 / 1e38 if self.wrong else y).sum(-1)


def test_gradients_that_overflow_in_torch_are_compared_in_float64_and_it_is_said():
    x = np.full((2, 3, 4), 2e14, np.float32)
    level = parity.compare(TorchCube(), FlaxCube(), x, levels=["gradients"]).level("gradients")
    assert level.passed
    assert any("of torch's own float32 values overflow: gradients were compared in float64 only" in n for n in level.notes)


def test_what_only_flax_overflows_is_found():
    report = parity.compare(TorchCube(), FlaxCube(wrong=True), np.full((2, 3, 4), 1e3, np.float32), levels=["native"])
    assert not report.passed


class TorchDifference(nn.Module):
    """A difference of powers: in float32 it is infinity less infinity before the values themselves are out of range."""

    def forward(self, x):
        return (x * x - x * x * 0.5) * 1e-2


class FlaxDifference(nnx.Module):
    def __init__(self, wrong: str = ""):
        self.wrong = wrong

    def __call__(self, x):
        y = x * x * 0.5 * 1e-2
        if self.wrong == "not a number":
            return jnp.where(x > 2, jnp.nan, y)
        return y * (2.0 if self.wrong else 1.0)


def test_what_overflows_in_torch_itself_is_compared_in_float64_alone_and_it_is_said():
    x = np.full((2, 3, 4), 3e19, np.float32)
    x[0, 0] = 1.5
    report = parity.compare(TorchDifference(), FlaxDifference(), x, levels=["structure", "identical", "native"])
    assert report.passed, report
    assert any("20 values overflow float32 in torch itself" in note for note in report.level("structure").notes)
    # In float64, where nothing overflows, and at values that do not overflow, faults are seen as ever.
    wrong = parity.compare(TorchDifference(), FlaxDifference("twice"), x, levels=["identical", "native"], diagnose=False)
    assert [level.status for level in wrong.levels] == ["failed", "failed"]


def test_what_is_no_number_in_torch_at_moderate_values_is_compared():
    x = np.full((2, 3, 4), 1.5, np.float32)
    x[1, 1, 1] = 3.0
    report = parity.compare(TorchDifference(), FlaxDifference("not a number"), x, levels=["structure"], diagnose=False)
    assert "NaN or infinity at 1 places on one side only" in str(report)
    other = parity.compare(TorchHalves(), FlaxHalves(), x, levels=["structure"], diagnose=False)
    assert "NaN or infinity at 1 places on one side only" in str(other)


class TorchHalves(nn.Module):
    """Not a number in float32 at 3, where float64 has one: nothing of what it returns is large."""

    def forward(self, x):
        huge = (x - 2).relu() * 1e38
        return x + (huge * 1e4 - huge * 1e4).nan_to_num(torch.nan, posinf=torch.nan)


class FlaxHalves(nnx.Module):
    def __call__(self, x):
        return x


def test_a_norm_without_parameters_takes_any_width_and_that_counts_only_if_strict():
    theirs = nn.LayerNorm(8, elementwise_affine=False).eval()
    mine = nnx.LayerNorm(8, epsilon=1e-5, use_bias=False, use_scale=False, use_fast_variance=False, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)
    lenient = parity.compare(theirs, mine, x, levels=["structure"]).level("structure")
    assert lenient.passed
    assert any("counts only with strict=True: args[0] one wider" in note for note in lenient.notes)
    assert not parity.compare(theirs, mine, x, levels=["structure"], strict=True, diagnose=False).passed


# ---------------------------------------------------------------- trace


class TorchPair(nn.Module):
    """Torch's layer returns its state besides; a port's need not."""

    def __init__(self):
        super().__init__()
        self.norm, self.rnn = nn.SyncBatchNorm(3), nn.RNN(3, 4, bias=False, batch_first=True)

    def forward(self, x):
        return self.rnn(self.norm(x).transpose(1, 2))[0]


class FlaxRnn(nnx.Module):
    def __init__(self):
        self.weight_ih_l0, self.weight_hh_l0 = nnx.Param(jax.numpy.zeros((4, 3))), nnx.Param(jax.numpy.zeros((4, 4)))

    def __call__(self, x):
        h, found = jax.numpy.zeros((x.shape[0], 4), x.dtype), []
        for token in x.swapaxes(0, 1):
            h = jax.numpy.tanh(token @ self.weight_ih_l0[...].T + h @ self.weight_hh_l0[...].T)
            found.append(h)
        return jax.numpy.stack(found, 1)


class FlaxPair(nnx.Module):
    def __init__(self, *, fault: bool = False):
        self.norm = nnx.BatchNorm(3, epsilon=1e-5, use_fast_variance=False, rngs=nnx.Rngs(0))
        self.rnn, self.fault = FlaxRnn(), fault

    def __call__(self, x):
        y = self.rnn(self.norm(x.swapaxes(1, 2)))
        return y * 1.001 if self.fault else y


@pytest.mark.parametrize("fault", [False, True])
def test_a_module_that_answers_in_another_form_is_no_divergence_if_what_holds_it_agrees(fault):
    theirs, mine = TorchPair().eval(), FlaxPair(fault=fault)
    mine.eval()
    parity.transfer(theirs, mine)
    traced = parity.trace(theirs, mine, np.random.default_rng(0).standard_normal((2, 3, 5)).astype(np.float32))
    steps = {step.path: step for step in traced.steps}
    # The ledger knows that Flax keeps the channels of this one last.
    assert steps["norm"].agrees
    assert traced.passed is not fault
    if not fault:
        assert steps["rnn"].note.startswith("answers in another form: ")


# ---------------------------------------------------------------- the clean trials themselves


@pytest.fixture
def one_program(monkeypatch):
    """A program that is quick to compile, in place of those that are drawn."""
    theirs, mine = nn.Linear(6, 5).eval(), nnx.Linear(6, 5, rngs=nnx.Rngs(0))

    def trial(rng):
        clean_pairs.filled(theirs, rng, "float32")
        parity.transfer(theirs, mine)
        return theirs, mine, (clean_pairs.numbers((2, 3, 6), rng, "float32"),)

    program = clean_pairs.Program("Linear", "", "float32", trial)
    monkeypatch.setattr(clean_pairs, "program", lambda seed, number: program)
    monkeypatch.setattr(clean_pairs, "forget", lambda: None)
    return program, mine


def counted(path, upto: int) -> dict:
    record = clean_trials.read_record(path, 0)
    clean_trials.run(record, upto, lambda: clean_trials.write_record(path, record), lambda _: None)
    return json.loads(path.read_text())


def test_a_run_that_was_stopped_counts_the_same_as_one_that_was_not(tmp_path, one_program):
    counted(tmp_path / "two.json", 3)
    two, one = counted(tmp_path / "two.json", 7), counted(tmp_path / "one.json", 7)
    assert one.pop("seconds") > 0
    assert two.pop("seconds") > 0
    assert one == two
    assert one["outcomes"] == {"passed": 7}
    assert one["pairs"]["Linear"]["identical"] == {"passed": 7}
    assert sum(one["ratios"]["identical"]["histogram"]) == sum(one["looks"]) == 7


def test_a_run_with_another_seed_or_other_code_is_not_gone_on_with(tmp_path, one_program, monkeypatch):
    counted(tmp_path / "a.json", 1)
    with pytest.raises(InputError, match="was begun with seed 0, now 5: give --out another file"):
        clean_trials.read_record(tmp_path / "a.json", 5)
    monkeypatch.setattr(clean_trials, "fingerprint", lambda: "other")
    with pytest.raises(InputError, match="now 'other'"):
        clean_trials.read_record(tmp_path / "a.json", 0)


def test_a_planted_fault_is_an_alarm_with_its_number(one_program):
    program, _ = one_program

    def faulty(rng):
        theirs, mine, args = program.trial(rng)
        mine.kernel[...] = mine.kernel[...] * 1.0001
        return theirs, mine, args

    trial = clean_trials.compared(replace(program, trial=faulty), 0, 11, True)
    record = clean_trials.empty_record(0)
    clean_trials.count(record, trial)
    assert trial.outcome == "alarm"
    assert record["alarms"][0]["trial"] == 11
    assert "kernel" in record["alarms"][0]["text"]
    assert record["outcomes"] == {"alarm": 1}


@pytest.mark.parametrize(
    ("raised", "outcome"),
    [(clean_trials.OutOfTimeError(), "timed out"), (RuntimeError("x"), "error"), (InputError("both models refuse"), "refused")],
)
def test_a_trial_that_did_not_run_has_not_passed(one_program, raised, outcome):
    def broken(rng):
        raise raised

    trial = clean_trials.compared(replace(one_program[0], trial=broken), 0, 0, True)
    assert (trial.outcome, trial.levels) == (outcome, {})


def test_programs_are_drawn_the_same_again_and_never_without_a_value():
    assert clean_pairs.program(3, 5).shape == clean_pairs.program(3, 5).shape
    pairs = {clean_pairs.program(3, number).pair for number in range(3)}
    assert all(pairs)


class TorchSaturated(nn.Module):
    """A GRU whose candidate is driven to one: 1 - tanh^2 is little more than what rounding leaves of it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(6, 8, batch_first=True)
        rng = np.random.default_rng(0)
        with torch.no_grad():
            for path, array in self.layer.state_dict().items():
                array.copy_(torch.from_numpy(0.01 * rng.standard_normal(tuple(array.shape))))
                if "bias_hh" in path:
                    array.zero_()
                    array[16:] = 16.5

    def forward(self, x):
        return self.layer(x)[0]


class FlaxSaturated(linen.Module):
    wrong: float = 0.0

    @linen.compact
    def __call__(self, x):
        y = linen.RNN(linen.GRUCell(8), name="layer")(x)
        return y + self.wrong * jax.numpy.sin(y)


@pytest.mark.parametrize("wrong", [0.0, 1e-5])
def test_the_noise_of_a_saturated_cell_is_explained_and_a_fault_above_it_found(wrong):
    x = np.random.default_rng(1).standard_normal((2, 5, 6)).astype(np.float32)
    done = parity.transfer(TorchSaturated(), parity.Linen(FlaxSaturated(wrong), None, x))
    subject = Subject(TorchSaturated().eval(), done.value, (x,), {})
    assert ladder.native(subject, modes=("compiled",)).passed is (not wrong)
    if not wrong:
        assert ladder.gradients(subject).passed


class TorchMap(nn.Module):
    """The logistic map, which doubles a rounding at each step: float32 knows nothing of its end, float64 half the digits."""

    def forward(self, x):
        y = torch.sigmoid(x)
        for _ in range(34):
            y = 4 * y * (1 - y)
        return y


class FlaxMap(nnx.Module):
    """The same, rounded otherwise."""

    def __call__(self, x):
        y = jax.nn.sigmoid(x)
        for _ in range(34):
            y = 4 * y - 4 * y * y
        return y


def looks(monkeypatch) -> list[int]:
    """How often the second look is taken, counted from here on."""
    taken, real = [], trace.shaken
    monkeypatch.setattr(trace, "shaken", lambda *given: taken.append(1) or real(*given))
    return taken


def test_what_float64_itself_does_not_know_is_no_divergence(monkeypatch):
    taken = looks(monkeypatch)
    x = np.random.default_rng(0).standard_normal((3, 5, 4)).astype(np.float32)
    assert parity.trace(TorchMap(), FlaxMap(), x).first_divergence() is None
    # The first look alone would have called it one.
    assert taken


@pytest.mark.parametrize("part", [2e-12, 1e-3])
def test_a_small_difference_is_found_after_the_second_look(monkeypatch, part):
    class Scaled(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(4, 6, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.layer(x) * (1 + part)

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 6)

        def forward(self, x):
            return self.layer(x)

    taken = looks(monkeypatch)
    theirs, mine = Plain(), Scaled()
    parity.transfer(theirs, mine)
    x = np.random.default_rng(0).standard_normal((3, 5, 4)).astype(np.float32)
    found = parity.trace(theirs, mine, x).first_divergence()
    assert found is not None and found.path == ""
    # What parts by more than little is not looked at twice.
    assert bool(taken) == (part < 1e-6)


def test_the_parts_of_a_run_add_up_to_the_whole(one_program, monkeypatch):
    monkeypatch.setattr(clean_trials, "SHARED", 2)

    def counted(part: str) -> dict:
        record = clean_trials.empty_record(7, part)
        clean_trials.run(record, 6, lambda: None, lambda _: None)
        return record

    whole, parts = counted("1/1"), [counted("1/2"), counted("2/2")]
    assert [one["trials"] for one in parts] == [4, 2]
    added = clean_trials.merged(parts)
    changing = ("seconds", "ratios", "largest")
    assert {k: v for k, v in added.items() if k not in changing} == {k: v for k, v in whole.items() if k not in changing}
    assert added["ratios"]["identical"]["histogram"] == whole["ratios"]["identical"]["histogram"]
    assert sorted(one["trial"] for one in added["largest"]) == sorted(one["trial"] for one in whole["largest"])
    with pytest.raises(InputError, match="a part is there twice: 1/2, 1/2"):
        clean_trials.merged([parts[0], parts[0]])
    with pytest.raises(InputError, match="not of one run: seed is 7 and 8"):
        clean_trials.merged([parts[0], clean_trials.empty_record(8, "2/2")])
