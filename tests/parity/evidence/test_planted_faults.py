"""Each level finds what it must find, says where, and passes what it cannot know."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from evidence_pairs import (
    FlaxReLU,
    TorchReLU,
    altered,
    attention,
    attention_inputs,
    block,
    low_variance,
    normal,
    one_ulp,
)

import parity
from parity.evidence.result import LEVELS

AGREES = "no divergence"


@dataclass(frozen=True)
class Fault:
    """A pair with one fault, and what must come of it.

    Attributes:
        name: of the fault.
        build: the pair and the inputs.
        fails: levels that must fail; all others must pass, but for
        other: levels with another status; '' is a status that is left open.
        path: of the first divergence; `AGREES` if the float64 trace must not see any, None if there must be no trace.
    """

    name: str
    build: Callable[[], tuple[Any, Any, tuple[Any, ...]]]
    fails: str
    path: str | None
    other: tuple[tuple[str, str], ...] = ()


def attending(name: str, fails: str, path: str | None, **other: str) -> Fault:
    return Fault(name, lambda: (*attention(name), attention_inputs()), fails, path, tuple(other.items()))


def spoiled(name: str, variable: str, change: Any, fails: str, path: str, **other: str) -> Fault:
    def build():
        pair = attention()
        altered(pair[1], variable, change)
        return (*pair, attention_inputs())

    return Fault(name, build, fails, path, tuple(other.items()))


def blocked(name: str, fails: str, path: str, **other: str) -> Fault:
    return Fault(name, lambda: (*block(name), (low_variance(3, 4, 8),)), fails, path, tuple(other.items()))


def rectified(name: str, fails: str, path: str) -> Fault:
    def build():
        x = normal(3, 4)
        x[1, 2] = 0
        return TorchReLU().eval(), FlaxReLU(name), (x,)

    return Fault(name or "clean relu", build, fails, path, (("weights", "not applicable"),))


NOT_RUN = dict.fromkeys(("wiring", "identical", "native", "gradients"), "not run")
FUNCTION = "identical native gradients"
FAULTS = [
    attending("scale", FUNCTION, "core"),
    attending("split by reshape", f"wiring {FUNCTION}", "core"),
    attending("merged by reshape", f"wiring {FUNCTION}", "out"),
    attending("mask off by one", f"wiring {FUNCTION}", "core"),
    attending("mask inverted", f"wiring {FUNCTION}", "core"),
    attending("key and value swapped", f"wiring {FUNCTION}", "k"),
    attending("kernel transposed in code", f"wiring {FUNCTION}", ""),
    attending("no bias", "weights identical native", "out", wiring="not run", gradients="not run"),
    attending("bf16", f"wiring {FUNCTION}", "core"),
    attending("tf32", "wiring native gradients", AGREES),
    attending("nan", f"structure wiring {FUNCTION}", "core"),
    attending("output missing", f"structure wiring {FUNCTION}", ""),
    attending("output extra", "structure", ""),
    attending("shape", f"structure wiring {FUNCTION}", ""),
    attending("dtype", "structure wiring native", "", identical="not run", gradients="not run"),
    attending("gradient", "gradients", AGREES),
    attending("gradient stopped", "gradients", AGREES),
    attending("raises", "structure", None, **NOT_RUN),
    spoiled("one weight by one ulp", "out.kernel", one_ulp, "weights identical gradients", "out"),
    spoiled("square weight transposed", "q.kernel", np.transpose, f"weights {FUNCTION}", "q"),
    # Softmax does not see what is the same for every key: no output can show it.
    spoiled("key bias", "k.bias", lambda bias: bias + 1, "weights", "k"),
    spoiled("value bias", "v.bias", lambda bias: bias + 1, f"weights {FUNCTION}", "v"),
    blocked("epsilon", "weights identical gradients", "norm", wiring="not applicable", native=""),
    # The ledger compares the functions that stand for torch's activations too.
    blocked("tanh gelu", f"weights {FUNCTION}", "act", wiring="not applicable"),
    rectified("maximum", "gradients", AGREES),
]
CLEAN = [
    attending("", "", None),
    blocked("", "", None, wiring="not applicable"),
    rectified("", "", None),
]


@pytest.mark.parametrize("fault", FAULTS + CLEAN, ids=lambda fault: fault.name or "clean")
def test_each_level_finds_what_it_can_know_and_the_trace_names_the_place(fault):
    torch_model, flax_model, inputs = fault.build()
    report = parity.compare(torch_model, flax_model, *inputs, modes=("compiled",))
    expected = {level: "failed" if level in fault.fails.split() else "passed" for level in LEVELS} | dict(fault.other)
    found = {result.level: result.status for result in report.levels}
    assert {level: found[level] if status else "" for level, status in expected.items()} == expected
    assert report.passed == (not fault.fails)
    assert all(result.findings for result in report.levels if result.status == "failed")
    if fault.path is None:
        assert report.trace is None
        return
    divergence = report.trace.first_divergence()
    assert (AGREES if divergence is None else divergence.path) == fault.path


def test_weights_names_the_leaf_the_place_and_both_values():
    torch_model, flax_model = attention()
    altered(flax_model, "out.kernel", one_ulp)
    (finding,) = parity.compare(torch_model, flax_model, *attention_inputs(), levels="weights").levels[0].findings
    # Flat place 3 of the kernel is (0, 3); torch's layout is the transpose.
    assert finding.where == "out.weight"
    assert "1 of 64 values differ from out.kernel, worst at (3, 0)" in finding.what
    weight = torch_model.out.weight.detach().numpy()[3, 0]
    assert f"expected (torch) {weight!s}, actual (flax) {np.nextafter(weight, np.float32(np.inf))!s}" in finding.what


@pytest.mark.parametrize(
    ("fault", "level", "says"),
    [
        ("no bias", "weights", "out.bias (8,) of the torch model has no counterpart"),
        ("output missing", "structure", "torch returns it, flax does not"),
        ("output extra", "structure", "flax returns it, torch does not"),
        ("shape", "structure", "expected (torch) shape (3, 4, 8), actual (flax) (3, 1, 4, 8)"),
        ("dtype", "structure", "expected (torch) dtype float32, actual (flax) float16"),
        ("raises", "structure", "expected (torch) returns; actual (flax) raises ValueError: no such axis"),
        ("nan", "structure", "NaN or infinity at 8 places on one side only, first at (1, 2, 0)"),
    ],
)
def test_a_level_says_what_differs(fault, level, says):
    report = parity.compare(*attention(fault), *attention_inputs(), levels=["weights", "structure"])
    text = " ".join(finding.what for finding in report.level(level).findings)
    assert says in text


def test_the_text_of_a_failing_report_tells_levels_place_values_and_tolerance():
    report = parity.compare(*attention("scale"), *attention_inputs(), modes=("compiled",))
    text = str(report)
    for part in (
        "NOT the same function",
        "weights    ok",
        "identical  FAILED",
        "times what rounding explains",
        "core   first divergence   (last agreement: v)",
        "expected (torch)",
        "actual (flax)",
        "would pass at atol=",
        "seed 0",
    ):
        assert part in text
    with pytest.raises(parity.DivergenceError, match="NOT the same function"):
        report.raise_for_divergence()


def test_where_float64_agrees_the_text_points_to_the_levels():
    text = str(parity.compare(*attention("tf32"), *attention_inputs(), modes=("compiled",)))
    assert "module calls that could be paired agree in float64: look at the levels that failed" in text


def test_the_largest_difference_passes_as_tolerance_and_is_where_the_report_says():
    torch_model, flax_model, inputs = FAULTS[0].build()
    found = parity.compare(torch_model, flax_model, *inputs, modes=("compiled",)).trace.first_divergence()
    assert (found.path, found.output, found.elements) == ("core", "[0]", 96)
    assert 0 < found.differing <= found.elements
    assert found.difference == found.atol == abs(found.flax - found.torch) > 1e-3
