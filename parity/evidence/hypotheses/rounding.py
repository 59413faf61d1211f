"""Part of the computation in a narrower dtype."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from parity.evidence.hypotheses.suspect import Suspect, Values, Variant, groups
from parity.evidence.numerics import finite_scale, largest_gap, numpy_float
from parity.evidence.trees import mapped
from parity.evidence.trial import is_array

PRECISE = (
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "softmax",
    "safe_softmax",
    "native_layer_norm",
    "convolution",
    "gelu",
    "exp",
    "mul",
    "add",
)


def precision(suspect: Suspect) -> Iterator[Variant]:
    """Part of the computation in a narrower dtype."""
    narrow = ("bfloat16", "float16", "float32")
    ops = [op for op in suspect.operations if op.name.rstrip("_").lstrip("_") in PRECISE]
    for dtype in narrow:
        yield from arguments_in(suspect, dtype)
        for where, chosen in groups(ops):
            for side in ("operands", "result") if chosen else ():
                name = f"{side} of {chosen[0].name.strip('_')}" if len(chosen) == 1 else f"{side} of every operation"
                yield Variant(
                    f"Flax computes in {dtype}: {name} are cut{where if len(chosen) > 1 else ''}",
                    f"leave out the cast to {dtype} (.astype, or dtype=)",
                    suspect.edited(chosen, "rounded", dtype=dtype, where=side),
                )


# Settings of Flax's layers by which they compute in a dtype of their own, and what leaves it to the arguments.
PINS: dict[str, Any] = {"dtype": None, "preferred_element_type": None, "force_fp32_for_softmax": True}


def pinned(suspect: Suspect) -> Iterator[Variant]:
    """A setting by which Flax's layer computes in a narrower dtype: without it the layer is torch's."""
    expected, actual = suspect.trial.expected, suspect.trial.actual
    for name, free in PINS.items():
        given = suspect.flax_layer.settings(name)
        if given is None or given == free or str(given) == "float64":
            continue

        def values(name: str = name, free: Any = free) -> Values:
            other = suspect.flax_again(settings={name: free})
            alike = [p for p in suspect.differing if suspect.distance(p, expected[p], other.get(p)) <= 1]
            return {place: actual[place] for place in alike}

        said = getattr(given, "__name__", given)
        yield Variant(f"Flax's layer computes with {name}={said}", f"leave out {name}={said}", values)


SIZES = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}


# Narrow dtypes, as jax's programs write them. That of the weights stands for what is outside of the program too.
SHORT = {"bfloat16": "bf16", "float16": "f16"}


def may_have(suspect: Suspect, dtype: str) -> bool:
    """Whether Flax's model has anything of a narrow dtype in a float64 run: a difference may be of its size by chance."""
    if dtype not in SHORT:
        return True
    one = suspect.subject
    try:
        program, _ = one.flax.traced(one.flax_model, one.call, "float64")
    except Exception:
        # What cannot be traced shows nothing.
        return False
    return re.search(rf"\b{SHORT[dtype]}\[", program) is not None or "reduce_precision" in program


def size_of_rounding(suspect: Suspect) -> Iterator[Variant]:
    """A difference that is as large as rounding in a narrower dtype makes it, wherever that happens."""
    expected, actual = suspect.trial.expected, suspect.trial.actual
    places = [p for p in suspect.differing if is_array(expected.get(p)) and is_array(actual.get(p))]
    places = [p for p in places if expected[p].shape == actual[p].shape]
    if len(places) < len(suspect.differing):
        return
    sizes = [largest_gap(expected[p], actual[p]) / (finite_scale(expected[p]) or 1.0) for p in places]
    for dtype, unit in SIZES.items():
        if all(unit / 16 <= size <= unit * 4 for size in sizes) and may_have(suspect, dtype):
            yield Variant(
                f"the difference is as large as rounding to {dtype} makes it: Flax computes something in {dtype}",
                f"leave out casts to {dtype} (.astype, dtype=, preferred_element_type=)",
                lambda: {p: expected[p] for p in places},
                unit=4 * unit,
            )


def arguments_in(suspect: Suspect, dtype: str) -> Iterator[Variant]:
    def cut(_: str, leaf: Any) -> Any:
        if not is_array(leaf) or leaf.dtype.kind != "f":
            return leaf
        # The lowest float64, as masks have it, is minus infinity in a narrower dtype.
        with np.errstate(over="ignore"):
            return leaf.astype(numpy_float(dtype)).astype(leaf.dtype)

    one = suspect.trial.torch
    arrays = {p.path: p.torch for p in suspect.weights}
    weights = {path: cut("", array) for path, array in arrays.items()}
    new = {"args": mapped(cut, one.args), "kwargs": mapped(cut, dict(one.kwargs))}
    change = f"leave out dtype={dtype} and the cast"
    for index, array in enumerate(one.args):
        if is_array(array) and array.dtype.kind == "f":
            args = (*one.args[:index], cut("", array), *one.args[index + 1 :])
            yield Variant(f"Flax cuts args[{index}] to {dtype}", change, lambda a=args: suspect.again(args=a))
    yield Variant(f"Flax cuts its arguments to {dtype}", change, lambda: suspect.again(**new))
    if weights:
        yield Variant(f"Flax cuts its weights to {dtype}", change, lambda: suspect.again(weights=weights))
        yield Variant(f"Flax cuts arguments and weights to {dtype}", change, lambda: suspect.again(**new, weights=weights))
        yield Variant(
            f"Flax computes in {dtype}: arguments, weights and result are cut",
            change,
            lambda: {p: cut("", v) for p, v in suspect.again(**new, weights=weights).items()},
        )
    yield Variant(f"Flax cuts its result to {dtype}", change, lambda: {p: cut("", v) for p, v in suspect.again().items()})
