"""Optimizers in torch's order of operations, where optax's own differ; see parity/training/optimizers.py.

Each is a function of one leaf: gradient, parameter and the leaf's state in, the direction and the
new state out. The direction is still to be multiplied by minus the rate.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from parity.training.optimizers import Group
from parity.training.schedules import Hyper

Arrays = dict[str, jax.Array]


class TorchState(NamedTuple):
    """What torch keeps for the parameters of a group.

    Attributes:
        count: updates so far.
        tensors: trees like the parameters', by torch's names, such as `exp_avg`.
        scalars: single numbers by torch's names, such as `mu_product`.
    """

    count: jax.Array  # type: ignore[assignment]  # optax's own states call it so
    tensors: dict[str, Any]
    scalars: dict[str, jax.Array]


# The direction and the new tensors for: gradient, parameter, tensors.
Step = Callable[[jax.Array, jax.Array, Arrays], tuple[jax.Array, Arrays]]
# The step of update t, counted from 1, and the new scalars for it.
Plan = Callable[[jax.Array, Arrays], tuple[Step, Arrays]]


def leafwise(
    plan: Plan, tensors: Mapping[str, float], scalars: Mapping[str, Any] | None = None
) -> optax.GradientTransformation:
    """A transformation from the step of one leaf.

    Args:
        plan: what is done in update t.
        tensors: the names of the leaf's state and its first value.
        scalars: the names of the group's own numbers and their first values.
    """

    def init(params: Any) -> TorchState:
        first = {name: jax.tree.map(lambda p, v=value: jnp.full_like(p, v), params) for name, value in tensors.items()}
        return TorchState(jnp.zeros([], jnp.int32), first, {name: jnp.asarray(v) for name, v in (scalars or {}).items()})

    def update(updates: Any, state: TorchState, params: Any = None) -> tuple[Any, TorchState]:
        if params is None:
            raise ValueError(optax.base.NO_PARAMS_MSG)
        count = optax.safe_increment(state.count)
        step, numbers = plan(count, state.scalars)
        gradients, structure = jax.tree.flatten(updates)
        values = jax.tree.leaves(params)
        old = {name: jax.tree.leaves(tree) for name, tree in state.tensors.items()}
        done = [
            stepped(step, g, p, {name: leaves[place] for name, leaves in old.items()})
            for place, (g, p) in enumerate(zip(gradients, values, strict=True))
        ]
        new = {name: jax.tree.unflatten(structure, [tensors[name] for _, tensors in done]) for name in old}
        return jax.tree.unflatten(structure, [u for u, _ in done]), TorchState(count, new, numbers)

    return optax.GradientTransformation(init, update)


def stepped(step: Step, g: jax.Array, p: jax.Array, tensors: Arrays) -> tuple[jax.Array, Arrays]:
    """One leaf's step: half precision is computed in float32 and rounded once."""
    wide = jnp.promote_types(p.dtype, jnp.float32)
    direction, new = step(g.astype(wide), p.astype(wide), {name: t.astype(wide) for name, t in tensors.items()})
    return direction.astype(g.dtype), {name: new[name].astype(t.dtype) for name, t in tensors.items()}


def now(hyper: Hyper, t: jax.Array) -> Any:
    """A hyperparameter in update t."""
    return hyper if isinstance(hyper, int | float) else hyper.at(t - 1, jnp)


def bias_correction(beta: Any, t: jax.Array) -> Any:
    """`1 - beta^t`. torch takes it in double precision; in float32, `0.999**t` would leave 5 digits of the difference."""
    if isinstance(beta, float) and beta == 0:
        return 1.0
    if jax.config.jax_enable_x64:
        return 1 - beta**t
    return -jnp.expm1(t * (math.log(beta) if isinstance(beta, float) else jnp.log(beta)))


def lerp(start: jax.Array, end: jax.Array, weight: Any) -> jax.Array:
    """`torch.lerp`, which begins at the nearer end."""
    near, far = start + weight * (end - start), end - (end - start) * (1 - weight)
    return (near if weight < 0.5 else far) if isinstance(weight, float) else jnp.where(weight < 0.5, near, far)


def square_moment(old: jax.Array, g: jax.Array, beta2: Any) -> jax.Array:
    return beta2 * old + (1 - beta2) * g * g


def sgd(group: Group) -> optax.GradientTransformation:
    """With dampening, or a momentum that moves; the first gradient is not damped."""

    def plan(t: jax.Array, scalars: Arrays) -> tuple[Step, Arrays]:
        momentum = now(group.hyper("momentum"), t)

        def step(g: jax.Array, p: jax.Array, old: Arrays) -> tuple[jax.Array, Arrays]:
            damped = momentum * old["momentum_buffer"] + (1 - group.options["dampening"]) * g
            buffer = jnp.where(t == 1, g, damped)
            return (g + momentum * buffer if group.options["nesterov"] else buffer), {"momentum_buffer": buffer}

        return step, scalars

    return leafwise(plan, {"momentum_buffer": 0.0})


def adam(group: Group) -> optax.GradientTransformation:
    """Adam and AdamW; amsgrad keeps the largest moment before its bias correction."""
    beta2, eps, amsgrad = group.options["beta2"], group.options["eps"], group.options["amsgrad"]

    def plan(t: jax.Array, scalars: Arrays) -> tuple[Step, Arrays]:
        beta1 = now(group.hyper("beta1"), t)
        first, second = bias_correction(beta1, t), bias_correction(beta2, t)

        def step(g: jax.Array, p: jax.Array, old: Arrays) -> tuple[jax.Array, Arrays]:
            new = {"exp_avg": lerp(old["exp_avg"], g, 1 - beta1), "exp_avg_sq": square_moment(old["exp_avg_sq"], g, beta2)}
            square = new["exp_avg_sq"]
            if amsgrad:
                square = new["max_exp_avg_sq"] = jnp.maximum(old["max_exp_avg_sq"], square)
            return new["exp_avg"] / (jnp.sqrt(square) / jnp.sqrt(second) + eps) / first, new

        return step, scalars

    return leafwise(plan, dict.fromkeys(("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ())), 0.0))


def nadam(group: Group, scalar_dtype: str) -> optax.GradientTransformation:
    """Momenta that grow by psi = `momentum_decay`, and their product, in the dtype in which torch keeps it."""
    beta2, eps, psi = group.options["beta2"], group.options["eps"], group.options["momentum_decay"]

    def plan(t: jax.Array, scalars: Arrays) -> tuple[Step, Arrays]:
        beta1 = now(group.hyper("beta1"), t)
        mu, mu_next = (beta1 * (1.0 - 0.5 * jnp.exp(n * psi * math.log(0.96))) for n in (t, t + 1))
        product = scalars["mu_product"] * mu.astype(scalars["mu_product"].dtype)
        wide = product.astype(mu.dtype)
        gradient, moment = (1.0 - mu) / (1.0 - wide), mu_next / (1.0 - wide * mu_next)
        second = bias_correction(beta2, t)

        def step(g: jax.Array, p: jax.Array, old: Arrays) -> tuple[jax.Array, Arrays]:
            new = {"exp_avg": lerp(old["exp_avg"], g, 1 - beta1), "exp_avg_sq": square_moment(old["exp_avg_sq"], g, beta2)}
            denominator = jnp.sqrt(new["exp_avg_sq"] / second) + eps
            return gradient * (g / denominator) + moment * (new["exp_avg"] / denominator), new

        return step, {"mu_product": product}

    first = {"mu_product": np.ones([], scalar_dtype if jax.config.jax_enable_x64 else np.float32)}
    return leafwise(plan, {"exp_avg": 0.0, "exp_avg_sq": 0.0}, first)


def radam(group: Group) -> optax.GradientTransformation:
    """Rectified only where the length of the average is above 5; eps beside the root of the uncorrected moment."""
    beta2, eps = group.options["beta2"], group.options["eps"]
    longest = 2 / (1 - beta2) - 1

    def plan(t: jax.Array, scalars: Arrays) -> tuple[Step, Arrays]:
        beta1 = now(group.hyper("beta1"), t)
        first, second = bias_correction(beta1, t), bias_correction(beta2, t)
        length = average_length(beta2, t)
        rectified = t >= first_rectified(beta2)
        inside = jnp.where(rectified, (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length), 1.0)
        scale = jnp.sqrt(inside) * jnp.sqrt(second)

        def step(g: jax.Array, p: jax.Array, old: Arrays) -> tuple[jax.Array, Arrays]:
            new = {"exp_avg": lerp(old["exp_avg"], g, 1 - beta1), "exp_avg_sq": square_moment(old["exp_avg_sq"], g, beta2)}
            adapted = scale / (jnp.sqrt(new["exp_avg_sq"]) + eps)
            return new["exp_avg"] / first * jnp.where(rectified, adapted, 1.0), new

        return step, scalars

    return leafwise(plan, {"exp_avg": 0.0, "exp_avg_sq": 0.0})


def average_length(beta2: float, t: jax.Array) -> jax.Array:
    """`2 / (1 - beta2) - 1 - 2 t beta2^t / (1 - beta2^t)`, torch's rho_t; two nearly equal numbers at first."""
    if jax.config.jax_enable_x64:
        return 2 / (1 - beta2) - 1 - 2 * t * beta2**t / (1 - beta2**t)
    # In float32 4 digits would be left of the difference: 2 t / (e^x - 1) with x = -t log(beta2), taken apart.
    rate = -math.log(beta2)
    x = t * rate
    series = x / 2 - x**2 / 12 + x**4 / 720 - x**6 / 30240 + x**8 / 1209600
    rest = jnp.where(x < 0.5, series, 1 - x / jnp.expm1(jnp.maximum(x, 0.5)))
    return (2 / (1 - beta2) - 1 - 2 / rate) + 2 / rate * rest


def first_rectified(beta2: float) -> int:
    """The first update in which torch rectifies. Found in double precision: in float32 the length is good to 1e-4."""
    longest = 2 / (1 - beta2) - 1
    if longest <= 5:
        return np.iinfo(np.int32).max
    t = 1
    while longest - 2 * t * beta2**t / (1 - beta2**t) <= 5.0:
        t += 1
    return t


def adagrad(group: Group) -> optax.GradientTransformation:
    """Eps beside the root, and a rate that falls by itself."""

    def plan(t: jax.Array, scalars: Arrays) -> tuple[Step, Arrays]:
        slower = 1 + (t - 1) * group.options["lr_decay"]

        def step(g: jax.Array, p: jax.Array, old: Arrays) -> tuple[jax.Array, Arrays]:
            total = old["sum"] + g * g
            return g / (jnp.sqrt(total) + group.options["eps"]) / slower, {"sum": total}

        return step, scalars

    return leafwise(plan, {"sum": group.options["initial_accumulator_value"]})


def adamax(group: Group) -> optax.GradientTransformation:
    """Eps goes to the gradient's size, not to the denominator."""

    def plan(t: jax.Array, scalars: Arrays) -> tuple[Step, Arrays]:
        beta1 = now(group.hyper("beta1"), t)
        first = bias_correction(beta1, t)

        def step(g: jax.Array, p: jax.Array, old: Arrays) -> tuple[jax.Array, Arrays]:
            moment = lerp(old["exp_avg"], g, 1 - beta1)
            largest = jnp.maximum(group.options["beta2"] * old["exp_inf"], jnp.abs(g) + group.options["eps"])
            return moment / largest / first, {"exp_avg": moment, "exp_inf": largest}

        return step, scalars

    return leafwise(plan, {"exp_avg": 0.0, "exp_inf": 0.0})


def asgd(group: Group, scalar_dtype: str) -> optax.GradientTransformation:
    """Its rate `eta` is that of the update before, rounded to the dtype in which torch keeps it; sign and rate are in it."""
    lambd, dtype = group.options["lambd"], scalar_dtype if jax.config.jax_enable_x64 else "float32"

    def plan(t: jax.Array, scalars: Arrays) -> tuple[Step, Arrays]:
        lr = jnp.asarray(now(group.hyper("lr"), t), float)
        eta = jnp.where(t == 1, lr.astype(dtype), scalars["eta"])
        mu = scalars["mu"]

        def step(g: jax.Array, p: jax.Array, old: Arrays) -> tuple[jax.Array, Arrays]:
            rate = eta.astype(lr.dtype)
            direction = -lambd * rate * p - rate * g
            after = p + direction
            average = jnp.where(mu == 1, after, old["ax"] + (after - old["ax"]) * mu.astype(lr.dtype))
            return direction, {"ax": average}

        new_eta = lr / (1 + lambd * lr * t) ** group.options["alpha"]
        new_mu = 1 / jnp.maximum(1.0, t - group.options["t0"])
        return step, {"eta": new_eta.astype(dtype), "mu": jnp.asarray(new_mu, dtype)}

    return leafwise(plan, {"ax": 0.0}, {"eta": np.zeros([], dtype), "mu": np.ones([], dtype)})


def rprop(group: Group) -> optax.GradientTransformation:
    """Steps of their own for every element; only signs of gradients count. The sign is in the direction."""
    options = group.options

    def plan(t: jax.Array, scalars: Arrays) -> tuple[Step, Arrays]:
        def step(g: jax.Array, p: jax.Array, old: Arrays) -> tuple[jax.Array, Arrays]:
            turn = jnp.sign(g * old["prev"])
            factor = jnp.where(turn > 0, options["etaplus"], jnp.where(turn < 0, options["etaminus"], 1.0))
            size = jnp.clip(old["step_size"] * factor, options["step_size_min"], options["step_size_max"])
            kept = jnp.where(turn < 0, 0.0, g)
            return -jnp.sign(kept) * size, {"prev": kept, "step_size": size}

        return step, scalars

    return leafwise(plan, {"prev": 0.0, "step_size": float(now(group.hyper("lr"), jnp.asarray(1)))})
