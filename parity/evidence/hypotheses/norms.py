"""Norms with another constant, another divisor, other statistics."""

from collections.abc import Iterator
from typing import Any

from parity.evidence.calls import Operation
from parity.evidence.hypotheses.suspect import Edited, Edits, Suspect, Variant
from parity.evidence.trial import is_array

NORMS = {"native_layer_norm": 4, "native_group_norm": 7, "native_batch_norm": 7, "batch_norm_no_training": 6}
NORMS |= {"native_batch_norm_legit_no_training": 6, "native_batch_norm_legit": 7, "cudnn_batch_norm": 7, "fused_rms_norm": 3}

ADDS = ("add", "clamp_min", "clamp", "maximum")

EPSILONS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-3, 1e-7, 1e-2, 1e-4, 1e-10)


def epsilon(suspect: Suspect) -> Iterator[Variant]:
    """The small number under the root of a norm."""
    for op in suspect.operations:
        name = op.name.rstrip("_").lstrip("_")
        place = NORMS.get(name)
        if place is not None and place < len(op.args) and isinstance(op.args[place], float):
            yield from another_constant(suspect, op, place, op.args[place])
        elif name in ADDS and len(op.args) > 1 and isinstance(op.args[1], float) and 0 < op.args[1] <= 1e-2:
            yield from another_constant(suspect, op, 1, op.args[1])
    yield from outside_the_root(suspect)


def outside_the_root(suspect: Suspect) -> Iterator[Variant]:
    """The small number added to the root, not under it; of any size, since it is then another quantity."""
    layers = [(op, op, op.args[4], "norm") for op in suspect.named("native_layer_norm")]
    layers += [(op, op, epsilon_of(op), "batch norm") for op in suspect.named(*BY_CHANNEL)]
    inside = [
        op for op in suspect.named("add") if len(op.args) > 1 and isinstance(op.args[1], float) and 0 < op.args[1] <= 1e-2
    ]
    roots = suspect.named("sqrt", "rsqrt")
    by_hand = [(add, root, add.args[1], "root") for add in inside for root in roots if root.number == add.number + 1]
    for add, root, mine, kind in (*layers, *by_hand):

        def values(number: float, add: Operation = add, root: Operation = root, kind: str = kind) -> Any:
            if kind != "root":
                return suspect.again({root.number: (kind, {"way": "epsilon outside", "epsilon": number})})
            settings = {"by": number, "inverse": root.name.startswith("rsqrt")}
            return suspect.again({add.number: ("left out", {}), root.number: ("epsilon outside", settings)})

        tried = dict.fromkeys((mine, *EPSILONS))
        if not any(suspect.explained(values(number))[0] for number in tried):
            found = suspect.solved(values, list(tried))
            tried |= dict.fromkeys([float(f"{found:.3g}"), found] if found is not None else [])
        for number in tried:
            what = f"{number:.6g} is added to the root in Flax, {mine:g} under it in torch"
            yield Variant(what, f"jnp.sqrt(variance + {mine:g})", lambda n=number, v=values: v(n))


def another_constant(suspect: Suspect, op: Operation, place: int, mine: float) -> Iterator[Variant]:
    def values(number: float) -> Any:
        return suspect.again({op.number: ("argument", {"index": place, "value": number})})

    tried = [number for number in (*EPSILONS, 0.0) if number != mine]
    for number in tried:
        yield Variant(f"Flax adds {number:g} where torch adds {mine:g}", f"set epsilon={mine:g}", lambda n=number: values(n))
    if any(sum(suspect.explained(values(n))[0].values()) or suspect.explained(values(n))[0] for n in tried):
        return
    found = suspect.solved(values, [mine, *EPSILONS])
    if found is not None:
        for number in (float(f"{found:.3g}"), found):
            yield Variant(
                f"Flax adds {number:.6g} where torch adds {mine:g}", f"set epsilon={mine:g}", lambda n=number: values(n)
            )


def variance(suspect: Suspect) -> Iterator[Variant]:
    """A divisor of n where torch has n - 1, or the other way round; a norm that is another one."""
    yield from means(suspect)
    yield from roots(suspect)
    for op in suspect.operations:
        if op.name in ("var", "std", "var_mean", "std_mean"):
            mine = op.kwargs.get("correction", 1)
            mine = 1 if mine is None else mine
            yield Variant(
                f"Flax divides the squares by n - {1 - int(mine)}, torch by n - {mine}",
                f"pass ddof={mine} to jnp.{op.name.partition('_')[0]}",
                suspect.edited([op], "correction", value=1 - int(mine)),
            )
        if op.name == "native_layer_norm":
            for way, what, change in (
                ("unbiased", "the variance is divided by n - 1", "divide by n: jnp.var without ddof"),
                ("without mean", "the mean is not subtracted: an RMS norm", "use nnx.LayerNorm"),
                ("without scale", "scale and bias are not used", "use both"),
            ):
                yield Variant(what, change, suspect.edited([op], "norm", way=way))


BY_CHANNEL = ("native_batch_norm", "batch_norm_no_training", "native_batch_norm_legit_no_training", "native_batch_norm_legit")


def roots(suspect: Suspect) -> Iterator[Variant]:
    """A norm that divides by the variance, not by its root."""
    change = "take the root: jnp.sqrt, or jax.lax.rsqrt to multiply by"
    for op in suspect.named("rsqrt", "sqrt"):
        yield Variant(f"the root is left out where torch takes {op.name}", change, suspect.edited([op], "root left out"))
    for op in suspect.named(*BY_CHANNEL):
        eps = epsilon_of(op)
        yield Variant(
            "Flax divides by the variance where torch divides by its root",
            change,
            suspect.edited([op], "batch norm", way="no root", epsilon=eps),
        )


def epsilon_of(op: Operation) -> float:
    place = NORMS[op.name.rstrip("_").lstrip("_")]
    return float(op.args[place])


def groups_of_channels(suspect: Suspect) -> Iterator[Variant]:
    """A group norm over other groups: another number of them, or channels dealt out one by one."""
    for op in suspect.named("native_group_norm"):
        mine, channels = op.args[6], op.args[4]
        for count in [c for c in range(1, channels + 1) if channels % c == 0 and c != mine]:
            yield Variant(
                f"Flax makes {count} groups, torch {mine}",
                f"set num_groups={mine}",
                suspect.edited([op], "argument", index=6, value=count),
            )


def means(suspect: Suspect) -> Iterator[Variant]:
    """A mean subtracted where torch takes the root mean square, or the other way round."""
    given = suspect.trial.torch.args
    scales = suspect.named("rsqrt", "sqrt", "fused_rms_norm", "rms_norm", "pow", "linalg_vector_norm")
    if scales and given and is_array(given[0]) and given[0].dtype.kind == "f" and given[0].ndim > 1:
        x = given[0]
        yield Variant(
            "the mean is subtracted first, as in a layer norm: torch divides by the root mean square of the values themselves",
            "divide by jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + eps), or use nnx.RMSNorm",
            lambda: suspect.again(args=(x - x.mean(-1, keepdims=True), *given[1:])),
        )
    centred = [op for op in suspect.named("sub") if len(op.shapes) == 2 and op.shapes[0] != op.shapes[1]]
    centred = [op for op in centred if op.shapes[0] == op.shape and op.shapes[1] == (*op.shape[:-1], 1)]
    spread = suspect.named("var", "var_mean")
    left_out: Edits = {op.number: ("left out", {}) for op in centred}
    squares: Edits = {op.number: ("mean square", {}) for op in spread}
    for edits in ({**left_out, **squares}, left_out) if spread and centred else (left_out,) if centred else ():
        what = "the mean is not subtracted" + (": an RMS norm" if squares and edits is not left_out else "")
        yield Variant(what, "subtract the mean", Edited(suspect, edits))


def batch_statistics(suspect: Suspect) -> Iterator[Variant]:
    """Train mode: what depends on the batch."""
    if suspect.named("native_batch_norm", "native_batch_norm_legit_no_training", "batch_norm", "cudnn_batch_norm"):
        yield Variant(
            "Flax normalises by the batch's own statistics, as in training",
            "call .eval() on the model, or pass use_running_average=True",
            lambda: suspect.again(training=True),
        )
