"""Another nonlinearity, or another slope of it."""

from collections.abc import Iterator
from typing import Any

from parity.evidence.calls import Operation
from parity.evidence.hypotheses.suspect import Suspect, Variant, groups
from parity.evidence.trial import is_array

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "silu": "silu",
    "elu": "elu",
    "celu": "celu",
    "leaky_relu": "leaky relu",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "softplus": "softplus",
    "mish": "mish",
    "hardswish": "hard swish",
    "hardsigmoid": "hard sigmoid",
    "log_sigmoid_forward": "log sigmoid",
    "exp": "exp",
    "softshrink": "soft shrink",
    "hardshrink": "hard shrink",
    "threshold": "threshold",
}

INSTEAD = {
    "gelu": "jax.nn.gelu(x, approximate=False)",
    "tanh gelu": "jax.nn.gelu(x, approximate=True)",
    "leaky relu": "jax.nn.leaky_relu(x, negative_slope)",
    "silu": "jax.nn.silu(x)",
    "relu": "jax.nn.relu(x)",
    "relu6": "jax.nn.relu6(x)",
    "elu": "jax.nn.elu(x)",
    "selu": "jax.nn.selu(x)",
    "softsign": "jax.nn.soft_sign(x)",
    "log sigmoid": "jax.nn.log_sigmoid(x)",
}

# The simplest first: what is left out is more likely than a function that does nothing to these numbers.
FUNCTIONS: tuple[str, ...] = (
    "identity",
    "relu",
    "gelu",
    "tanh gelu",
    "quick gelu",
    "silu",
    "elu",
    "leaky relu",
    "leaky relu of slope 0.2",
)
FUNCTIONS += ("leaky relu of slope 0.1", "relu6", "tanh", "sigmoid", "hard tanh", "hard sigmoid", "hard swish", "softplus")
FUNCTIONS += (
    "mish",
    "selu",
    "log sigmoid",
    "softsign",
    "squared relu",
    "soft shrink",
    "hard shrink",
    "hard sigmoid of slope 0.2",
)
# Beside those, what torch has no operation for.
COMPOSED: tuple[str, ...] = ("tanh shrink",)

# Numbers that an activation takes: the place among its arguments, the name, torch's default, and what ports have instead.
NUMBERS: dict[str, tuple[tuple[int, str, float, tuple[float, ...]], ...]] = {
    "softplus": ((1, "beta", 1.0, (1.0, 2.0, 0.5)), (2, "threshold", 20.0, (20.0, 1e9))),
    "celu": ((1, "alpha", 1.0, (1.0, 0.5, 2.0)),),
    "elu": ((1, "alpha", 1.0, (1.0, 0.5, 2.0)), (3, "input_scale", 1.0, (1.0,))),
    "hardtanh": ((1, "min_val", -1.0, (-1.0, 0.0)), (2, "max_val", 1.0, (1.0, 6.0, 1e9))),
    "softshrink": ((1, "lambd", 0.5, (0.5, 1.0, 0.1)),),
    "hardshrink": ((1, "lambd", 0.5, (0.5, 1.0, 0.1)),),
    "threshold": ((1, "threshold", 0.0, (0.0,)), (2, "value", 0.0, (0.0,))),
}


# What a bounded identity is called, by its bounds.
BOUNDED = {(0, 6): "relu6", (-1, 1): "hard tanh", (0,): "relu", (0, None): "relu"}


def function_of(op: Operation) -> str:
    """The function that an operation computes, '' for one that is no activation."""
    if op.name.rstrip("_") in ("hardtanh", "clamp", "clamp_min"):
        bounds = tuple(op.args[1:3])
        other = f"hard tanh within {bounds}" if bounds else "hard tanh"
        return BOUNDED.get(bounds, other if op.name.startswith("hardtanh") else "")
    if op.name.rstrip("_") == "elu" and len(op.args) > 1:
        alpha, scale, inner = (*op.args[1:4], 1.0, 1.0)[:3]
        plain = "elu" if alpha == 1 else f"elu of alpha {alpha:g}"
        return "selu" if scale != 1 else f"celu of alpha {alpha:g}" if inner != 1 else plain
    name = ACTIVATIONS.get(op.name.rstrip("_"), "")
    if name == "celu":
        return f"celu of alpha {op.args[1]:g}" if op.args[1:] and op.args[1] != 1 else "elu"
    if name == "softplus" and op.args[1:2] not in ((), (1,)):
        return f"softplus of beta {op.args[1]:g}"
    return "tanh gelu" if name == "gelu" and op.kwargs.get("approximate") == "tanh" else name


def soft_signs(suspect: Suspect) -> list[Operation]:
    """The divisions of a number by something of its own magnitude, as `x / (1 + |x|)` is written."""
    taken = {op.operands.get((0,)) for op in suspect.named("abs")} - {None}
    return [op for op in suspect.named("div") if op.operands.get((0,)) in taken]


def activation(suspect: Suspect) -> Iterator[Variant]:
    """Another nonlinearity, or another slope of it."""
    yield from gates(suspect)
    kinds: dict[str, list[Operation]] = {}
    for op in suspect.operations:
        if function_of(op):
            kinds.setdefault(function_of(op), []).append(op)
    if ops := soft_signs(suspect):
        kinds["softsign"] = ops
    for mine, ops in kinds.items():
        for where, chosen in groups(ops):
            # Other numbers first: with none of them a function may be another one by name alone.
            yield from numbers(suspect, chosen, where)
            for other in FUNCTIONS:
                if other != mine:
                    said = "leaves the function out" if other == "identity" else f"computes {other}"
                    yield Variant(
                        f"Flax {said} where torch computes {mine}{where}",
                        f"use {INSTEAD.get(mine, mine)}",
                        suspect.edited(chosen, "activation", to=other),
                    )
            if mine == "leaky relu":
                yield from slopes(suspect, chosen, where)
    yield from of_the_argument(suspect)


def numbers(suspect: Suspect, chosen: list[Operation], where: str) -> Iterator[Variant]:
    """The same function with other numbers: another alpha, beta, threshold or bound."""
    operation = chosen[0].name.rstrip("_")
    for index, name, default, usual in NUMBERS.get(operation, ()):
        given = chosen[0].args[index] if len(chosen[0].args) > index else default
        if not isinstance(given, int | float):
            continue

        def values(number: float, index: int = index) -> Any:
            return suspect.edited(chosen, "argument", index=index, value=number)()

        tried = [number for number in usual if number != given]
        if not any(suspect.explained(values(number))[0] for number in tried):
            found = suspect.solved(values, [given or 1.0, *(number for number in usual if number)])
            tried += [float(f"{found:.3g}")] if found is not None and found != given else []
        for number in tried:
            said = (
                f"leaves out the {name} of {given:g}" if number == 1e9 else f"has {name}={number:g} where torch has {given:g}"
            )
            yield Variant(
                f"Flax's {ACTIVATIONS.get(operation, operation)} {said}{where}",
                f"pass {name}={given:g}, or write the formula out",
                lambda n=number, v=values: v(n),
            )


def of_the_argument(suspect: Suspect) -> Iterator[Variant]:
    """Another function of the only argument, where torch writes its own out in several operations."""
    given = [array for array in suspect.trial.torch.args if is_array(array) and array.dtype.kind == "f"]
    last = [op for op in suspect.operations if given and op.shape == given[0].shape][-1:]
    if len(given) != 1 or not last or suspect.weights:
        return
    for other in (*FUNCTIONS, *COMPOSED):
        if other != "identity":
            edit = suspect.edited(last, "function of", to=other, value=given[0])
            yield Variant(f"Flax computes {other} of what it is given; torch does not", "write torch's formula out", edit)


def gates(suspect: Suspect) -> Iterator[Variant]:
    """A gated linear unit with another gate, or with a function of its value."""
    for op in suspect.named("glu"):
        for value, gate in (*((v, "sigmoid") for v in FUNCTIONS), *(("identity", g) for g in FUNCTIONS)):
            if (value, gate) != ("identity", "sigmoid"):
                said = f"{gate} of the gate" if value == "identity" else f"{value} of the value too"
                yield Variant(
                    f"Flax's gated linear unit takes {said}; torch multiplies the value by sigmoid of the gate",
                    "use jax.nn.glu(x, axis)",
                    suspect.edited([op], "gated", value=value, gate=gate),
                )


def slopes(suspect: Suspect, chosen: list[Operation], where: str) -> Iterator[Variant]:
    mine = chosen[0].args[1] if len(chosen[0].args) > 1 else 0.01

    def values(number: float) -> Any:
        return suspect.edited(chosen, "slope", value=number)()

    found = suspect.solved(values, (0.01, 0.1, 0.2, 0.3, 0.05))
    for number in (0.01, 0.2, 0.1, *([float(f"{found:.3g}")] if found is not None else [])):
        if number != mine:
            yield Variant(
                f"Flax's slope is {number:g}, torch's {mine:g}{where}",
                f"set negative_slope={mine:g}",
                lambda n=number: values(n),
            )
