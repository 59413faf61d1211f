"""Optimizers of torch in NumPy, as a port may have got them: the steps that it would take on given gradients.

A third implementation beside torch's and optax's. What ports do otherwise is an option here, so that a
suspected fault can be computed and held against what a port did.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parity.training.optimizers import Group
from parity.training.schedules import Hyper

Arrays = Mapping[str, np.ndarray]
State = dict[str, Any]

# What torch's optimizers do, and a port may have forgotten or put elsewhere.
QUIRKS = (
    "eps in the root",
    "eps in the root and beside it",
    "no bias correction",
    "no bias correction of the first moment",
    "no bias correction of the second moment",
    "largest moment behind its correction",
    "momentum behind the rate",
    "decay without the rate",
    "first gradient damped",
)


@dataclass(frozen=True)
class Port:
    """An optimizer as a port may have it.

    Attributes:
        kind: the name of torch's class.
        groups: parameters and options, by torch's names.
        state: torch's state before the first step, by parameter: arrays, and `step`.
        norm: bound of `clip_grad_norm_`, and `value` that of `clip_grad_value_`.
        spare: what is added to the norm before the division; torch adds 1e-6.
        begun: steps that schedules have had before the first step.
        shift: steps by which they run ahead.
        factor: of every gradient.
        decoupled: whether weight decay bypasses the moments; None as torch's class has it.
        unused: parameters without gradient, which torch leaves alone.
        quirks: out of `QUIRKS`.
    """

    kind: str
    groups: tuple[Group, ...]
    state: Mapping[str, State] = field(default_factory=dict)
    norm: float | None = None
    value: float | None = None
    spare: float = 1e-6
    begun: int = 0
    shift: int = 0
    factor: float = 1.0
    decoupled: bool | None = None
    unused: frozenset[str] = frozenset()
    quirks: frozenset[str] = frozenset()

    def is_decoupled(self, group: Group) -> bool:
        """Whether a group's weight decay bypasses the moments."""
        # torch gives AdamW the option since it is a subclass of Adam.
        return (group.decoupled or self.kind == "AdamW") if self.decoupled is None else self.decoupled


@dataclass(frozen=True)
class Taken:
    """One step of a run.

    Attributes:
        gradients: by parameter, perhaps a sample of their elements.
        norm: of all gradients that the optimizer moves by, whole.
        values: of parameters behind the step, the same elements.
    """

    gradients: Arrays
    norm: float
    values: Arrays


def trajectory(port: Port, start: Arrays, steps: Sequence[Taken]) -> list[dict[str, np.ndarray]]:
    """The parameters that a port has behind each step."""
    values = dict(start)
    state = {name: dict(port.state.get(name, {})) for name in start}
    found = []
    for number, step in enumerate(steps):
        clip = 1.0 if port.norm is None else min(port.norm / (port.factor * step.norm + port.spare), 1.0)
        for group in port.groups:
            options = at(group, port.begun + number + port.shift)
            for name in group.names:
                if name in values and name in step.gradients and name not in port.unused:
                    g = step.gradients[name] * (port.factor * clip)
                    g = g if port.value is None else np.clip(g, -port.value, port.value)
                    with np.errstate(all="ignore"):
                        values[name] = moved(port, group, options, g, values[name], state[name])
        found.append(dict(values))
    return found


def at(group: Group, count: int) -> dict[str, Any]:
    """A group's options after so many steps of its schedules."""

    def now(value: Hyper) -> Any:
        return value if isinstance(value, int | float) or not hasattr(value, "at") else float(value.at(np.asarray(count)))

    return {name: now(value) for name, value in group.options.items()}


def moved(port: Port, group: Group, o: Mapping[str, Any], g: np.ndarray, p: np.ndarray, s: State) -> np.ndarray:
    """A parameter behind one step; its state moves along."""
    decay, lr = o.get("weight_decay") or 0.0, o["lr"]
    g = -g if o.get("maximize") else g
    if not port.is_decoupled(group):
        g = g + decay * p
    elif decay:
        p = p - (1.0 if "decay without the rate" in port.quirks else lr) * decay * p
    s["step"] = t = int(s.get("step", 0)) + 1
    return p - lr * STEPS[port.kind](port.quirks, o, g, s, t)


def moment(s: State, name: str, beta: float, value: np.ndarray) -> np.ndarray:
    s[name] = beta * s.get(name, np.zeros_like(value)) + (1 - beta) * value
    return s[name]


def corrections(quirks: frozenset[str], o: Mapping[str, Any], t: int) -> tuple[float, float]:
    first = bool(quirks & {"no bias correction", "no bias correction of the first moment"})
    second = bool(quirks & {"no bias correction", "no bias correction of the second moment"})
    return (1.0 if first else 1 - o["beta1"] ** t), (1.0 if second else 1 - o["beta2"] ** t)


def root(quirks: frozenset[str], square: Any, eps: float) -> Any:
    """`sqrt(square) + eps`, or what a port has made of it."""
    if "eps in the root" in quirks:
        return np.sqrt(square + eps)
    return np.sqrt(square + eps) + eps if "eps in the root and beside it" in quirks else np.sqrt(square) + eps


def adam(quirks: frozenset[str], o: Mapping[str, Any], g: np.ndarray, s: State, t: int) -> Any:
    m, v = moment(s, "exp_avg", o["beta1"], g), moment(s, "exp_avg_sq", o["beta2"], g * g)
    first, second = corrections(quirks, o, t)
    if o.get("amsgrad"):
        late = "largest moment behind its correction" in quirks
        seen = v / second if late else v
        s["max_exp_avg_sq"] = v = np.maximum(s.get("max_exp_avg_sq", np.zeros_like(g)), seen)
        second = 1.0 if late else second
    return m / first / root(quirks, v / second, o["eps"])


def nadam(quirks: frozenset[str], o: Mapping[str, Any], g: np.ndarray, s: State, t: int) -> Any:
    m, v = moment(s, "exp_avg", o["beta1"], g), moment(s, "exp_avg_sq", o["beta2"], g * g)
    mu, after = (o["beta1"] * (1 - 0.5 * 0.96 ** (n * o.get("momentum_decay", 4e-3))) for n in (t, t + 1))
    # torch keeps it in float32.
    s["mu_product"] = float(np.float32(s.get("mu_product", 1.0)) * np.float32(mu))
    low = root(quirks, v / corrections(quirks, o, t)[1], o["eps"])
    return ((1 - mu) * g / (1 - s["mu_product"]) + after * m / (1 - s["mu_product"] * after)) / low


def radam(quirks: frozenset[str], o: Mapping[str, Any], g: np.ndarray, s: State, t: int) -> Any:
    m, v = moment(s, "exp_avg", o["beta1"], g), moment(s, "exp_avg_sq", o["beta2"], g * g)
    first, second = corrections(quirks, o, t)
    longest = 2 / (1 - o["beta2"]) - 1
    length = longest - 2 * t * o["beta2"] ** t / (1 - o["beta2"] ** t)
    if length <= 5:
        return m / first
    rect = math.sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length))
    return m / first * rect * math.sqrt(second) / (np.sqrt(v) + o["eps"])


def adamax(quirks: frozenset[str], o: Mapping[str, Any], g: np.ndarray, s: State, t: int) -> Any:
    m = moment(s, "exp_avg", o["beta1"], g)
    s["exp_inf"] = np.maximum(o["beta2"] * s.get("exp_inf", np.zeros_like(g)), np.abs(g) + o["eps"])
    return m / s["exp_inf"] / corrections(quirks, o, t)[0]


def sgd(quirks: frozenset[str], o: Mapping[str, Any], g: np.ndarray, s: State, t: int) -> Any:
    momentum, dampening = o.get("momentum") or 0.0, o.get("dampening") or 0.0
    if not momentum:
        return g
    fresh = "momentum_buffer" not in s
    damped = (1 - dampening) * g if not fresh or "first gradient damped" in quirks else g
    return rolled(quirks, o, g, damped, momentum, s)


def rolled(
    quirks: frozenset[str], o: Mapping[str, Any], g: np.ndarray, damped: np.ndarray, momentum: float, s: State
) -> np.ndarray:
    """Momentum on what a step would be without; behind the rate, it remembers the rates of earlier steps."""
    rate = o["lr"] if "momentum behind the rate" in quirks else 1.0
    s["momentum_buffer"] = momentum * s.get("momentum_buffer", np.zeros_like(g)) + damped * rate
    buffer = s["momentum_buffer"] / rate
    return damped + momentum * buffer if o.get("nesterov") else buffer


def rmsprop(quirks: frozenset[str], o: Mapping[str, Any], g: np.ndarray, s: State, t: int) -> Any:
    v = moment(s, "square_avg", o["alpha"], g * g)
    if o.get("centered"):
        v = v - moment(s, "grad_avg", o["alpha"], g) ** 2
    step = g / root(quirks, v, o["eps"])
    return rolled(quirks, o, step, step, o["momentum"], s) if o.get("momentum") else step


def adagrad(quirks: frozenset[str], o: Mapping[str, Any], g: np.ndarray, s: State, t: int) -> Any:
    s["sum"] = s.get("sum", np.full_like(g, o.get("initial_accumulator_value", 0.0))) + g * g
    return g / root(quirks, s["sum"], o["eps"]) / (1 + (t - 1) * o.get("lr_decay", 0.0))


def adadelta(quirks: frozenset[str], o: Mapping[str, Any], g: np.ndarray, s: State, t: int) -> Any:
    v = moment(s, "square_avg", o["rho"], g * g)
    step = np.sqrt(s.get("acc_delta", np.zeros_like(g)) + o["eps"]) / np.sqrt(v + o["eps"]) * g
    moment(s, "acc_delta", o["rho"], step * step)
    return step


STEPS: dict[str, Any] = {
    "SGD": sgd,
    "Adam": adam,
    "AdamW": adam,
    "NAdam": nadam,
    "RAdam": radam,
    "Adamax": adamax,
    "RMSprop": rmsprop,
    "Adagrad": adagrad,
    "Adadelta": adadelta,
}
