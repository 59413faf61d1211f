"""Another nonlinearity, or another slope of it."""

from collections.abc import Iterator
from typing import Any

from parity.evidence.calls import Operation
from parity.evidence.hypotheses.suspect import Suspect, Variant, groups

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "silu": "silu",
    "elu": "elu",
    "leaky_relu": "leaky relu",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "softplus": "softplus",
    "mish": "mish",
    "hardswish": "hard swish",
    "hardsigmoid": "hard sigmoid",
    "log_sigmoid_forward": "log sigmoid",
    "exp": "exp",
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

FUNCTIONS: tuple[str, ...] = ("relu", "gelu", "tanh gelu", "quick gelu", "silu", "elu", "leaky relu", "leaky relu of slope 0.2")
FUNCTIONS += ("leaky relu of slope 0.1", "relu6", "tanh", "sigmoid", "hard tanh", "hard sigmoid", "hard swish", "softplus")
FUNCTIONS += ("mish", "selu", "log sigmoid", "softsign", "squared relu", "identity")


# What a bounded identity is called, by its bounds.
BOUNDED = {(0, 6): "relu6", (-1, 1): "hard tanh", (0,): "relu", (0, None): "relu"}


def function_of(op: Operation) -> str:
    """The function that an operation computes, '' for one that is no activation."""
    if op.name.rstrip("_") in ("hardtanh", "clamp", "clamp_min"):
        return BOUNDED.get(tuple(op.args[1:3]), "hard tanh" if op.name.startswith("hardtanh") and len(op.args) == 1 else "")
    name = ACTIVATIONS.get(op.name.rstrip("_"), "")
    if name == "elu" and any(number not in (1, None) for number in op.args[1:]):
        # What torch dispatches for selu is elu with two numbers.
        return "selu" if len(op.args) > 2 else f"elu of alpha={op.args[1]:g}"
    if name == "softplus" and op.args[1:2] not in ((), (1,)):
        return f"softplus of beta={op.args[1]:g}"
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
