"""Axes, heads and pieces in another order."""

import itertools
from collections.abc import Iterator
from typing import Any

from parity.evidence.calls import Operation, fingerprint
from parity.evidence.hypotheses.suspect import Suspect, Variant, groups
from parity.evidence.trees import flatten
from parity.evidence.trial import is_array


def softmax_axis(suspect: Suspect) -> Iterator[Variant]:
    """Softmax, a mean or a sum over another axis."""
    for op in suspect.named("softmax", "log_softmax", "safe_softmax", "mean", "sum", "amax", "cumsum", "argmax"):
        dim = op.args[1] if len(op.args) > 1 else None
        mine = dim[0] if isinstance(dim, tuple) and len(dim) == 1 else dim
        if not isinstance(mine, int) or not op.shapes:
            continue
        ndim = len(op.shapes[0])
        for axis in range(ndim):
            if axis != mine % ndim:
                value: Any = [axis] if isinstance(dim, tuple) else axis
                yield Variant(
                    f"{op.name.strip('_')} runs over axis {axis} in Flax and {mine % ndim} in torch",
                    f"pass axis={mine}",
                    suspect.edited([op], "argument", index=1, value=value),
                )


SUMMARIES = {"mean": "mean", "sum": "sum", "amax": "largest", "max": "largest", "amin": "smallest", "min": "smallest"}


def summaries(suspect: Suspect) -> Iterator[Variant]:
    """A mean where torch takes the largest, the first position where it takes the last, and so on, along the same axis."""
    for op in suspect.named(*SUMMARIES, "select"):
        if len(op.args) < 2 or not op.shapes or (op.name == "select" and len(op.args) < 3):
            continue
        dims = tuple(op.args[1]) if isinstance(op.args[1], tuple | list) else (op.args[1],)
        if not dims or not all(isinstance(dim, int) for dim in dims):
            continue
        shape, mine = op.shapes[0], SUMMARIES.get(op.name, f"position {op.args[2]}" if op.name == "select" else "")
        for other in dict.fromkeys(SUMMARIES.values()):
            if other != mine:
                yield Variant(
                    f"Flax takes the {other} along axis {dims} where torch takes the {mine}",
                    f"take the {mine}",
                    suspect.edited([op], "summary", dims=dims, to=other),
                )
        last = shape[dims[0]] - 1
        for position in dict.fromkeys((0, last, 1, last - 1)) if len(dims) == 1 else ():
            if not (op.name == "select" and op.args[2] % shape[dims[0]] == position):
                yield Variant(
                    f"Flax takes position {position} along axis {dims[0]} where torch takes the {mine}",
                    f"take the {mine}",
                    suspect.edited([op], "summary", dims=dims, to="position", position=position),
                )


def heads(suspect: Suspect) -> Iterator[Variant]:
    """Heads split or merged by a bare reshape, or with heads and width in the other order."""
    moves = [op for op in suspect.operations if op.name in ("transpose", "permute") and len(op.shape) > 2]
    for where, chosen in groups(moves):
        if chosen:
            yield Variant(
                f"axes are moved by a bare reshape where torch transposes {chosen[0].shapes[0]} to {chosen[0].shape}{where}",
                f"transpose to {chosen[0].shape}, then reshape",
                suspect.edited(chosen, "reshaped"),
            )
    views = [op for op in suspect.operations if op.name in ("view", "_unsafe_view", "unsafe_view") and op.shapes]
    splits = [(op, axis) for op in views for axis in [split_axis(op.shapes[0], op.shape)] if axis is not None]
    joins = [(op, axis) for op in views for axis in [split_axis(op.shape, op.shapes[0])] if axis is not None]
    for pairs, edit, word in ((splits, "split minor", "split"), (joins, "joined minor", "merged")):
        for where, chosen in groups(op for op, _ in pairs):
            axis = next((axis for op, axis in pairs if chosen and op.number == chosen[0].number), None)
            if chosen and axis is not None and not (edit == "joined minor" and in_space(suspect, chosen[0])):
                yield Variant(
                    f"heads are {word} in the order (width, heads){where}",
                    f"{word.removesuffix('d')} as (heads, width)",
                    suspect.edited(chosen, edit, axis=axis),
                )


def split_axis(joined: tuple[int, ...], split: tuple[int, ...]) -> int | None:
    """Where one axis of the first shape is two of the second."""
    if len(split) != len(joined) + 1:
        return None
    for axis in range(len(joined)):
        whole = split[axis] * split[axis + 1]
        if split[axis] > 1 and split[axis + 1] > 1 and (*split[:axis], whole, *split[axis + 2 :]) == joined:
            return axis
    return None


def in_space(suspect: Suspect, op: Operation) -> bool:
    """Whether an operation takes what a layer over images returns: its last axes are height and width."""
    found = {
        fingerprint(array)
        for key in suspect.isolator.children.get(suspect.trial.torch.key, ())
        if any(word in suspect.isolator.torch_layers[key[0]].kinds[0] for word in ("Conv", "Pool", "BatchNorm", "Upsample"))
        for _, array in flatten(suspect.isolator.calls[key].output, is_array)
        if is_array(array)
    }
    return any(number in found for number in op.operands.values())


def columns_first(suspect: Suspect) -> Iterator[Variant]:
    """Height and width of an image laid in one row column by column."""
    for op in suspect.operations:
        if op.name in ("view", "_unsafe_view", "unsafe_view") and op.shapes and in_space(suspect, op):
            axis = split_axis(op.shape, op.shapes[0])
            if axis is not None:
                yield Variant(
                    f"Flax lays axes {axis} and {axis + 1} of {op.shapes[0]} in one row column by column, torch row by row",
                    "reshape without exchanging height and width before",
                    suspect.edited([op], "joined minor", axis=axis),
                )


def flattened(suspect: Suspect) -> Iterator[Variant]:
    """Channels first or last before all is laid in one row; height and width exchanged before."""
    yield from columns_first(suspect)
    views = [op for op in suspect.operations if op.name in ("view", "_unsafe_view") and op.shapes and len(op.shapes[0]) > 2]
    for where, chosen in groups(op for op in views if len(op.shape) < len(op.shapes[0])):
        if chosen:
            yield Variant(
                f"Flax lays {chosen[0].shapes[0]} in one row with the channels last{where}",
                "move the channels to the front first, x.transpose(0, 3, 1, 2).reshape(n, -1), or reorder the kernel's rows",
                suspect.edited(chosen, "channels last first"),
            )


# Pairs of slices that are tried.
MOST_SLICES = 24


def pieces(suspect: Suspect) -> Iterator[Variant]:
    """The pieces of a split (q, k, v; gate and value), or of what is put together, in another order."""
    yield from joined_pieces(suspect)
    for op in suspect.named("glu"):
        yield Variant(
            "the first half of a gated linear unit is taken for the gate",
            "value * sigmoid(gate), where the value is the first half",
            suspect.edited([op], "gated", value="identity", gate="sigmoid", exchanged=True),
        )
    yield from exchanged_slices(suspect)
    by_count: dict[int, list[Operation]] = {}
    for op in suspect.named("split", "chunk", "split_with_sizes", "unbind", "tensor_split"):
        by_count.setdefault(pieces_of(op), []).append(op)
    for count, ops in by_count.items():
        for (where, chosen), order in itertools.product(
            groups(ops), itertools.permutations(range(count)) if 1 < count <= 4 else ()
        ):
            if order != tuple(range(count)):
                yield Variant(
                    f"the {count} pieces of a split are taken in the order {order}{where}",
                    "take them in torch's order",
                    suspect.edited(chosen, "parts", order=order),
                )


def exchanged_slices(suspect: Suspect) -> Iterator[Variant]:
    """Two slices of one value, such as `x[..., :n]` and `x[..., n:]`, each in the place of the other."""
    slices = [op for op in suspect.named("slice") if len(op.args) > 3 and (0,) in op.operands and op.shape != op.shapes[0]]
    for one, other in list(itertools.combinations(slices, 2))[:MOST_SLICES]:
        same = (one.operands, one.args[1], one.shape) == (other.operands, other.args[1], other.shape)
        if same and one.args[2:4] != other.args[2:4]:
            ends = [{"start": op.args[2] or 0, "end": op.args[3]} for op in (other, one)]
            edits = [(op, "moved slice", place) for op, place in zip((one, other), ends, strict=True)]
            yield Variant(
                f"two slices of {one.shapes[0]}, from {ends[1]['start']} and from {ends[0]['start']} on, are exchanged",
                "take them in torch's order",
                suspect.edited_each(edits),
            )


def joined_pieces(suspect: Suspect) -> Iterator[Variant]:
    """What is put together (a skip connection, both directions, a class token) in another order."""
    for op in suspect.named("cat", "stack", "concat"):
        count = len([path for path in op.operands if len(path) == 2])
        for order in itertools.permutations(range(count)) if 1 < count <= 4 else ():
            if order != tuple(range(count)):
                yield Variant(
                    f"{count} pieces are put together in the order {order}",
                    "put them together in torch's order",
                    suspect.edited([op], "joined", order=order),
                )


def pieces_of(op: Operation) -> int:
    """How many equal pieces a split makes; 0 if they are not equal."""
    if op.name == "split_with_sizes":
        return len(op.args[1]) if len(set(op.args[1])) == 1 else 0
    dim = op.args[-1] if len(op.args) > (1 if op.name == "unbind" else 2) else 0
    size = op.shapes[0][dim]
    if op.name == "unbind":
        return size
    each = op.shape[dim] if op.shape else 0
    return size // each if each and size % each == 0 else 0
