"""The one array that travels in the place of several that torch computes it from, if the caller asks for it.

The weight that torch computes, the effective one, tells nothing of the arrays that it came from: there is no way back.
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from parity.errors import InputError, listed
from parity.weights.computed import MERGES, Computed, computed
from parity.weights.files import Tree
from parity.weights.leaf import Leaf
from parity.weights.paths import join


def chosen(merge: Any) -> dict[str, float | None]:
    """What may be merged, and the number given with it.

    Raises:
        InputError: one of the names is unknown.
    """
    if not isinstance(merge, Iterable):
        raise InputError(f"merge takes names such as {MERGES[0]!r}, got {merge!r}")
    names = (merge,) if isinstance(merge, str) else tuple(merge)
    found: dict[str, float | None] = {}
    for name in names:
        kind, equals, number = str(name).partition("=")
        scaling = re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,2})?", number) if equals else None
        if kind not in (*MERGES, "all") or (equals and (kind != "lora" or not scaling)):
            known = ", ".join(map(repr, (*MERGES, "all")))
            raise InputError(f"merge takes {known}, and lora=SCALING for a file, got {name!r}")
        # What was named for itself counts, whatever else is named.
        every = {**dict.fromkeys((*MERGES, "all")), **found}
        found = every if kind == "all" else found | {kind: float(number) if equals else None}
    return found


class Merged(Tree):
    """A torch model, state_dict or file in which weights that are kept as several arrays are one.

    Args:
        room: what knows the leaves of `value`.
        value: the source.
        merge: which kinds; see `MERGES`.

    Attributes:
        notes: what was merged; one sentence each.

    Raises:
        InputError: the source is not torch's, an asked-for kind is not in it, or cannot be computed.
    """

    def __init__(self, room: Any, value: Any, merge: Any):
        kinds = chosen(merge)
        if room.NAME != "torch":
            raise InputError("merge is for a source with PyTorch's names: Flax keeps nothing to be merged")
        self.NAME, self.room, self.value = "torch", room, value
        self.metadata, self.notes = getattr(room, "metadata", {}), tuple(getattr(room, "notes", ()))
        given: list[Leaf] = room.leaves(value)
        found = self.computed = [one for one in computed(given) if one.kind in kinds]
        there = {one.kind for one in found} | (set(MERGES) if "all" in kinds else set())
        problems = [f"merge={kind!r}: the source has no such arrays" for kind in kinds if kind not in {*there, "all"}]
        made, gone = dict[str, Leaf](), set[str]()
        self.kinds = {layer.path: layer.kinds for layer in reversed(self.layers(None))}
        for one in found:
            try:
                leaf, note = self.merged(one, kinds[one.kind])
            except InputError as error:
                problems.append(str(error))
                continue
            if note:
                first, *others = leaf.merged
                made[first] = leaf
                if one.kind == "recurrent biases" and is_gru(one):
                    made[others[0]] = inside_the_gate(one)
                else:
                    gone |= set(others)
                self.notes += (note,)
        if problems:
            raise InputError(listed("merge", problems))
        owners = {one.owner for one in found if one.kind == "lora"}
        self.found = [unbased(made.get(leaf.path, leaf), owners) for leaf in given if leaf.path not in gone]

    def leaves(self, value: Any) -> list[Leaf]:
        """Every array; an effective weight stands where the first of its pieces stood."""
        return self.found

    def layers(self, value: Any) -> list[Any]:
        """Those of the source; a layer with a merged adapter is what it was without."""
        bases = {join(one.owner, "base_layer"): one.owner for one in self.computed if one.kind == "lora"}
        given, adapted = self.room.layers(self.value), set(bases.values())
        return [
            replace(layer, path=bases[layer.path], own_path=bases[layer.path]) if layer.path in bases else layer
            for layer in given
            if layer.path not in adapted
        ]

    def merged(self, one: Computed, number: float | None) -> tuple[Leaf, str]:
        """The effective weight and what is said of it; nothing is said where nothing has to be merged."""
        first = one.pieces.get("weight") or one.pieces.get("v") or one.pieces["ih"]
        read, how = self.reader(one, number)
        pieces = tuple(leaf.path for role, leaf in one.pieces.items() if role != "kernel")
        leaf = replace(
            first,
            path=one.path,
            owner=one.owner,
            name=one.name,
            kinds=self.kinds.get(one.owner, first.kinds),
            identity=("merged", *(piece.identity for piece in one.pieces.values())),
            read=read,
            share=lambda axes: read().transpose(axes),
            merged=pieces,
        )
        note = f"{one.path} is merged from {' and '.join(pieces)} ({one.kind}), {how}; there is no way back"
        return leaf, note if how else ""

    def reader(self, one: Computed, number: float | None) -> tuple[Callable[[], np.ndarray], str]:
        """What computes an effective weight, tried once so that nothing is written if it cannot, and how it does."""
        if one.kind == "recurrent biases":
            return lambda: sum_of_biases(one), self.biases(one)
        if hasattr(self.room, "effective"):
            compute = functools.partial(self.room.effective, self.value, one, number)
            how = "as torch computes it"
        else:
            compute = functools.partial(effective, one, number)
            how = "computed in float64 and rounded once, so that torch's own float32 may differ in the last bits"
        return compute, how + not_finite(one, compute())

    def biases(self, one: Computed) -> str:
        """What is said of the sum of two biases."""
        first, second = one.pieces["ih"].read(), outside_the_gate(one)
        if not (second != 0).any():
            return ""
        exact = first.astype(np.float64) + second.astype(np.float64) == sum_of_biases(one).astype(np.float64)
        apart = f"; b_hn, the last third of {one.pieces['hh'].path}, stays apart inside the reset gate" if is_gru(one) else ""
        rounded = f"a sum of which {int((~exact).sum())} of {exact.size} values are rounded"
        return f"{rounded}{not_finite(one, sum_of_biases(one))}{apart}"


def not_finite(one: Computed, found: np.ndarray) -> str:
    """What is said of infinite values and NaN that come from finite arrays: a norm of 0, or a sum too large for the dtype."""
    gone = int((~np.isfinite(found.astype(np.float64))).sum())
    if not gone or not all(np.isfinite(leaf.read().astype(np.float64)).all() for leaf in one.pieces.values()):
        return ""
    return f", {gone:,} of {found.size:,} values became infinite or NaN"


def is_gru(one: Computed) -> bool:
    """Whether two biases belong to three gates, as only a GRU has them."""
    rows, width = one.pieces["kernel"].shape
    return rows == 3 * width


def sum_of_biases(one: Computed) -> np.ndarray:
    """Both biases in one, in their own dtype, but for what stands inside a gate."""
    with np.errstate(over="ignore"):
        return np.asarray(one.pieces["ih"].read() + outside_the_gate(one))


def outside_the_gate(one: Computed) -> np.ndarray:
    """The second bias as far as it is added to the first: not b_hn of n = tanh(W_in x + b_in + r * (W_hn h + b_hn))."""
    second = np.array(one.pieces["hh"].read())
    if is_gru(one):
        second[len(second) // 3 * 2 :] = 0
    return second


def inside_the_gate(one: Computed) -> Leaf:
    """The second bias of a GRU, of which the first two gates have gone into the first bias."""
    second = one.pieces["hh"]

    def read() -> np.ndarray:
        values = np.array(second.read())
        values[: len(values) // 3 * 2] = 0
        return values

    return replace(second, identity=("inside the gate", second.identity), read=read, share=lambda axes: read().transpose(axes))


def unbased(leaf: Leaf, owners: set[str]) -> Leaf:
    """The further arrays of a layer to which an adapter was merged, under the layer's own name."""
    owner = leaf.path.removesuffix(f"base_layer.{leaf.name}").rstrip(".")
    if owner in owners and leaf.path.endswith(f"base_layer.{leaf.name}"):
        return replace(leaf, path=join(owner, leaf.name), owner=owner)
    return leaf


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def effective(one: Computed, number: float | None) -> np.ndarray:
    """The weight that torch computes, from arrays of a file: in float64, rounded once.

    Against torch's own float32 (torch 2.13, up to 1024 x 1024): at most 4 ulp for `weight_norm`, 1 for `spectral_norm`.

    Raises:
        InputError: the arrays do not tell how.
    """
    arrays = {name: leaf.read() for name, leaf in one.pieces.items()}
    wide = {name: array.astype(np.float64) for name, array in arrays.items()}
    if one.kind == "weight_norm":
        g, v = wide["g"], wide["v"]
        axes = tuple(axis for axis, size in enumerate(g.shape) if size == 1) if g.ndim else None
        found = v * (g / np.sqrt((v * v).sum(axis=axes, keepdims=g.ndim > 0)))
    elif one.kind == "spectral_norm":
        matrix = as_matrix(wide["weight"], spectral_axis(one.path, wide))
        found = wide["weight"] / (wide["u"] @ (matrix @ wide["v"]))
    else:
        a, b = lora_factors(one, number)
        found = wide["weight"] + float(number or 0) * (wide[b] @ wide[a])
    return found.astype(arrays["v" if "g" in arrays else "weight"].dtype)


def lora_factors(one: Computed, number: float | None) -> tuple[str, str]:
    """The names of the two small matrices of the only adapter.

    Raises:
        InputError: there are several, they do not fit, or nobody said by what their product is multiplied.
    """
    names = sorted(one.pieces)
    a, b = names[0], names[1]
    plain = a.startswith("A ") and b == f"B {a[2:]}"
    if len(names) != 3 or not plain or any(len(leaf.shape) != 2 for leaf in one.pieces.values()):
        raise InputError(
            f"{one.path} has the adapter arrays {', '.join(one.paths[1:])}; one adapter of two matrices can be merged"
        )
    wanted = (one.pieces[b].shape[0], one.pieces[a].shape[1])
    if one.pieces["weight"].shape != wanted:
        raise InputError(f"{one.path} has shape {one.pieces['weight'].shape}, its adapter {wanted}; they must be the same")
    if number is None:
        raise InputError(
            f"nothing in the source says by what the adapter of {one.path} is multiplied; pass merge='lora=SCALING' with "
            "lora_alpha / r (rank-stabilised: lora_alpha / sqrt(r)), or give the model itself"
        )
    return a, b


def as_matrix(weight: np.ndarray, axis: int) -> np.ndarray:
    """A weight as the matrix whose largest singular value it is divided by."""
    return np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1)


def spectral_axis(path: str, arrays: Mapping[str, np.ndarray]) -> int:
    """The axis that is kept as rows: the one for which v is what the iteration made of u.

    Raises:
        InputError: none is, or several are.
    """
    weight, u, v = arrays["weight"], arrays["u"], arrays["v"]
    sizes = [axis for axis, size in enumerate(weight.shape) if (size, weight.size // size) == (u.size, v.size)]
    if len(sizes) > 1:
        ways = {axis: as_matrix(weight, axis).T @ u for axis in sizes}
        sizes = [axis for axis, way in ways.items() if np.abs(way / np.linalg.norm(way) - v).max() < 1e-2]
    if len(sizes) != 1:
        raise InputError(f"the arrays of {path} do not tell along which axis spectral_norm was taken; give the model itself")
    return sizes[0]
