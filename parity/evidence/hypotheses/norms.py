"""Norms with another constant, another divisor, other statistics."""

from collections.abc import Iterator
from typing import Any

from parity.evidence.calls import Operation
from parity.evidence.hypotheses.suspect import Suspect, Variant

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
                ("epsilon outside", "epsilon is added outside the root", "add it to the variance"),
                ("without scale", "scale and bias are not used", "use both"),
            ):
                yield Variant(what, change, suspect.edited([op], "norm", way=way))


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


def batch_statistics(suspect: Suspect) -> Iterator[Variant]:
    """Train mode: what depends on the batch."""
    if suspect.named("native_batch_norm", "native_batch_norm_legit_no_training", "batch_norm", "cudnn_batch_norm"):
        yield Variant(
            "Flax normalises by the batch's own statistics, as in training",
            "call .eval() on the model, or pass use_running_average=True",
            lambda: suspect.again(training=True),
        )
