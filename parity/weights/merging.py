"""Torch weights that their layer computes from other arrays, and the one array that may travel in their place.

`weight_norm`, `spectral_norm` and LoRA keep several arrays for one weight, and a recurrent layer two
biases for one. Where Flax keeps the same ones they travel as they are. Otherwise the weight that torch
computes from them, the effective one, travels only if the caller asks for it: there is no way back.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from parity.errors import InputError, listed
from parity.weights.files import Tree
from parity.weights.layouts import Shape
from parity.weights.leaf import Layer, Leaf
from parity.weights.paths import join, split

MERGES = ("weight_norm", "spectral_norm", "lora", "recurrent biases")

# The torch function that makes a layer keep a norm and a direction; the ledger knows the norm by it.
WEIGHT_NORM = "torch.nn.utils.parametrizations.weight_norm"

REMOVE_PARAMETRIZATIONS = "call torch.nn.utils.parametrize.remove_parametrizations on that layer"
REMOVE = REMOVE_PARAMETRIZATIONS + " (in its older form torch.nn.utils.remove_{kind}) first"


@dataclass(frozen=True)
class Computed:
    """A weight that torch computes from other arrays.

    Attributes:
        kind: one of `MERGES`.
        owner: dotted path of the layer.
        name: the weight's name in it.
        pieces: the arrays by what they are, such as `g` and `v`.
    """

    kind: str
    owner: str
    name: str
    pieces: Mapping[str, Leaf]

    @property
    def path(self) -> str:
        """The weight's own path."""
        return join(self.owner, self.name)

    @property
    def paths(self) -> tuple[str, ...]:
        """Of its pieces."""
        return tuple(leaf.path for leaf in self.pieces.values())


# ---------------------------------------------------------------- which they are


def computed(leaves: Iterable[Leaf]) -> list[Computed]:
    """The weights that are kept as several arrays, by the names of those."""
    known = {leaf.path: leaf for leaf in leaves}
    return [found for path in known for find in FIND if (found := find(path, known))]


def normed(path: str, known: Mapping[str, Leaf]) -> Computed | None:
    """A weight kept as its norm and its direction, by the path of the norm."""
    owner, name, last = parametrized(path)
    if last == "original0":
        other = path.removesuffix("0") + "1"
    elif path.endswith("_g"):
        (owner, name), other = split(path.removesuffix("_g")), path.removesuffix("_g") + "_v"
    else:
        return None
    if other not in known or not norm_of(known[path].shape, known[other].shape) or join(owner, name) in known:
        return None
    return Computed("weight_norm", owner, name, {"g": known[path], "v": known[other]})


def norm_of(norm: Shape, weight: Shape) -> bool:
    """Whether an array may hold the norms of another along some of its axes."""
    return norm == () or (len(norm) == len(weight) and all(n in (1, w) for n, w in zip(norm, weight, strict=True)))


def spectral(path: str, known: Mapping[str, Leaf]) -> Computed | None:
    """A weight divided by its largest singular value, by the path of what is divided."""
    owner, name, last = parametrized(path)
    if last == "original":
        inner = path.removesuffix("original")
        left = next((p for p in known if re.fullmatch(re.escape(inner) + r"\d+\._u", p)), "")
        right = left.removesuffix("_u") + "_v"
    elif path.endswith("_orig"):
        whole = path.removesuffix("_orig")
        (owner, name), left, right = split(whole), f"{whole}_u", f"{whole}_v"
    else:
        return None
    if left not in known or right not in known:
        return None
    return Computed("spectral_norm", owner, name, {"weight": known[path], "u": known[left], "v": known[right]})


def lora(path: str, known: Mapping[str, Leaf]) -> Computed | None:
    """A weight to which a product of two small matrices is added, by the path of the large one."""
    owner, tail = path.removesuffix("base_layer.weight").rstrip("."), join("base_layer", "weight")
    if not path.endswith(tail):
        return None
    pieces = {"weight": known[path]}
    for name, leaf in known.items():
        match = re.fullmatch(re.escape(join(owner, "lora_")) + r"(A|B)\.(\w+)\.weight", name)
        if match:
            pieces[f"{match[1]} {match[2]}"] = leaf
    return Computed("lora", owner, "weight", pieces) if len(pieces) > 1 else None


RECURRENT_BIAS = re.compile(r"bias_hh(?:_l\d+(?:_reverse)?)?$")


def second_bias(path: str, known: Mapping[str, Leaf]) -> Computed | None:
    """The two biases of a recurrent layer, by the path of the second."""
    leaf = known[path]
    if not RECURRENT_BIAS.match(leaf.name):
        return None
    first, kernel = (path.replace("bias_hh", name) for name in ("bias_ih", "weight_hh"))
    if first not in known or kernel not in known:
        return None
    pieces = {"ih": known[first], "hh": leaf, "kernel": known[kernel]}
    return Computed("recurrent biases", leaf.owner, known[first].name, pieces)


FIND = (normed, spectral, lora, second_bias)


def parametrized(path: str) -> tuple[str, str, str]:
    """The layer, the weight and the piece of it that a path of torch.nn.utils.parametrize names; empty if it is none."""
    match = re.fullmatch(r"(?:(.*)\.)?parametrizations\.(\w+)\.(original[01]?)", path)
    return (match[1] or "", match[2], match[3]) if match else ("", "", "")


# ---------------------------------------------------------------- what is said of those that do not travel


def explained(leaves: list[Leaf], *, filled: bool) -> tuple[list[str], set[str]]:
    """Why torch's leaves without counterpart have none, where it is known: sentences, and the leaves that they are about.

    Args:
        leaves: without counterpart.
        filled: whether torch is the target.
    """
    sentences, about = [], set[str]()
    for one in computed(leaves):
        if one.kind != "recurrent biases":
            sentences.append(unpaired(one, filled=filled))
            about |= set(one.paths)
    for owner, (maker, names) in quantised(leaves).items():
        sentences.append(
            f"{', '.join(join(owner, name) for name in names)}: the weight was quantised by {maker} and is not there as "
            "numbers; let that library dequantise the model, save it in a floating point dtype, and transfer that"
        )
    other = [leaf.path for leaf in leaves if ".parametrizations." in f".{leaf.path}" and leaf.path not in about]
    if other:
        sentences.append(f"{other[0]} is what a parametrization computes a parameter from; {REMOVE_PARAMETRIZATIONS} first")
    loose = [leaf.path for leaf in leaves if "lora_" in leaf.path and leaf.path not in about]
    if loose:
        sentences.append(
            f"{loose[0]} is part of a LoRA adapter, without which the weight below is another; give the model with the adapter "
            'in it and merge="lora", or let peft merge it (merge_and_unload) first'
        )
    return sentences, about


def unpaired(one: Computed, *, filled: bool) -> str:
    """Why the pieces of a weight have no counterpart, and what to do."""
    start = f"torch computes {one.path} from {' and '.join(one.paths)} ({one.kind})"
    remove = "let peft merge the adapter (merge_and_unload) first" if one.kind == "lora" else REMOVE.format(kind=one.kind)
    if filled:
        return f"{start}, which cannot be told from one array of Flax's; {remove}"
    reason = {
        "weight_norm": "neither alone is the weight; wrap the Flax layer in nnx.WeightNorm(..., epsilon=0.0), ",
        "spectral_norm": "and nnx.SpectralNorm has no place for them: it iterates once more, in evaluation too, and keeps "
        "the divided weight; ",
        "lora": "the large one alone would be another function; ",
    }[one.kind]
    return f'{start}: {reason}pass merge="{one.kind}" to send the computed weight, or {remove}'


QUANTISED = (
    ("bitsandbytes", re.compile(r"(?:(.*)\.)?(weight\.(?:absmax|quant_map|nested_absmax|quant_state\.\w+)|SCB|weight_format)")),
    ("GPTQ or AWQ", re.compile(r"(?:(.*)\.)?(qweight|qzeros|scales|g_idx)")),
    ("compressed-tensors", re.compile(r"(?:(.*)\.)?(weight_packed|weight_scale|weight_zero_point|weight_shape)")),
    ("torch", re.compile(r"(?:(.*)\.)?(_packed_params\..*)")),
)


def quantised(leaves: Iterable[Leaf]) -> dict[str, tuple[str, list[str]]]:
    """The layers whose weight is kept in a few bits: who made it so, and its arrays."""
    found: dict[str, tuple[str, list[str]]] = {}
    for leaf in leaves:
        for maker, pattern in QUANTISED:
            match = pattern.fullmatch(leaf.path)
            if match:
                found.setdefault(match[1] or "", (maker, []))[1].append(match[2])
    # One name alone may be anybody's.
    return {
        owner: (maker, names)
        for owner, (maker, names) in found.items()
        if len(names) > 1 or names[0][0] in "S_" or "." in names[0]
    }


# ---------------------------------------------------------------- where Flax keeps the same pieces


def as_wrapped(leaves: list[Leaf], layers: list[Layer], asked: Callable[[Leaf], bool]) -> tuple[list[Leaf], list[Layer]]:
    """Norms and directions under the names by which the ledger knows them, where Flax asks for the norm.

    The direction is the layer's weight, the norm an array of the function that made the layer keep both.

    Args:
        leaves: of torch.
        layers: of torch.
        asked: whether Flax has a place for a leaf.

    Returns:
        All leaves, and what `weight_norm` does to a layer as a layer of its own that stands where that one does.
    """
    kinds = {layer.path: layer.kinds for layer in layers}
    changed, norms = dict[str, Leaf](), list[Layer]()
    for one in computed(leaves):
        g, v = one.pieces.get("g"), one.pieces.get("v")
        if g is None or v is None:
            continue
        norm = replace(g, owner=one.owner, name=f"{one.name}_g", kinds=(WEIGHT_NORM,))
        if asked(norm):
            changed |= {g.path: norm, v.path: replace(v, owner=one.owner, name=one.name, kinds=kinds.get(one.owner, ()))}
            axis = next((axis for axis, size in enumerate(g.shape) if size > 1), 0 if g.shape else None)
            settings = {"dim": axis, "kinds": kinds.get(one.owner, ())}
            norms.append(Layer(one.owner, (WEIGHT_NORM,), settings.get, one.owner))
    return [changed.get(leaf.path, leaf) for leaf in leaves], norms


# ---------------------------------------------------------------- the effective weight


def chosen(merge: Any) -> dict[str, float | None]:
    """What may be merged, and the number given with it.

    Raises:
        InputError: one of the names is unknown.
    """
    names = (merge,) if isinstance(merge, str) else tuple(merge)
    found: dict[str, float | None] = {}
    for name in names:
        kind, equals, number = str(name).partition("=")
        scaling = re.fullmatch(r"[0-9.eE+-]+", number) if equals else None
        if kind not in (*MERGES, "all") or (equals and (kind != "lora" or not scaling)):
            known = ", ".join(map(repr, (*MERGES, "all")))
            raise InputError(f"merge takes {known}, and lora=SCALING for a file, got {name!r}")
        found |= dict.fromkeys(MERGES) if kind == "all" else {kind: float(number) if equals else None}
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
        problems = [
            f"merge={kind!r}: the source has no such arrays"
            for kind in ([] if merge in ("all", ("all",), ["all"]) else kinds)
            if kind not in {one.kind for one in found}
        ]
        made: dict[str, Leaf] = {}
        gone: set[str] = set()
        for one in found:
            try:
                leaf, note = self.merged(one, kinds[one.kind])
            except InputError as error:
                problems.append(str(error))
                continue
            if note:
                first = "ih" if one.kind == "recurrent biases" else next(iter(one.pieces))
                made[one.pieces[first].path] = leaf
                gone |= {p.path for role, p in one.pieces.items() if role not in (first, "kernel")}
                self.notes += (note,)
        if problems:
            raise InputError(listed("merge", problems))
        self.found = [unbased(made.get(leaf.path, leaf), found) for leaf in given if leaf.path not in gone]

    def leaves(self, value: Any) -> list[Leaf]:
        """Every array; an effective weight stands where the first of its pieces stood."""
        return self.found

    def layers(self, value: Any) -> list[Any]:
        """Those of the source; a layer with a merged adapter is what it was without."""
        bases = {join(one.owner, "base_layer"): one.owner for one in self.computed if one.kind == "lora"}
        given: list[Layer] = self.room.layers(self.value)
        return [
            replace(layer, path=bases[layer.path], own_path=bases[layer.path]) if layer.path in bases else layer
            for layer in given
            if layer.path not in bases.values()
        ]

    def merged(self, one: Computed, number: float | None) -> tuple[Leaf, str]:
        """The effective weight and what is said of it; nothing is said where nothing has to be merged."""
        first = one.pieces.get("weight") or one.pieces.get("v") or one.pieces["ih"]
        if one.kind == "recurrent biases":
            how = self.biases(one)
            read = lambda: sum_of_biases(one)  # noqa: E731
        elif hasattr(self.room, "effective"):
            self.room.effective(self.value, one, number)
            how = "as torch computes it"
            read = lambda: self.room.effective(self.value, one, number)  # noqa: E731
        else:
            effective(one, number)
            how = "computed in float64 and rounded once, so that torch's own float32 may differ in the last bits"
            read = lambda: effective(one, number)  # noqa: E731
        kinds = next((layer.kinds for layer in self.layers(None) if layer.path == one.owner), first.kinds)
        leaf = replace(
            first,
            path=one.path,
            owner=one.owner,
            name=one.name,
            kinds=kinds,
            identity=("merged", *(piece.identity for piece in one.pieces.values())),
            read=read,
            share=lambda axes: read().transpose(axes),
            merged=tuple(path for path in one.paths if not path.endswith("weight_hh")),
        )
        pieces = " and ".join(one.pieces[role].path for role in one.pieces if role != "kernel")
        return leaf, f"{one.path} is merged from {pieces} ({one.kind}), {how}; there is no way back" if how else ""

    def biases(self, one: Computed) -> str:
        """What is said of the sum of two biases.

        Raises:
            InputError: the bias inside the reset gate of a GRU is not 0.
        """
        first, second = one.pieces["ih"].read(), one.pieces["hh"].read()
        if not (second != 0).any():
            return ""
        third = len(second) // 3
        if is_gru(one) and (second[2 * third :] != 0).any():
            raise InputError(
                f"the last third of {one.pieces['hh'].path} (b_hn) stands inside the reset gate and no other bias can hold it: "
                "n = tanh(W_in x + b_in + r * (W_hn h + b_hn)); write a cell of your own that adds b_hn there, "
                "or train torch with it at 0"
            )
        exact = first.astype(np.float64) + second.astype(np.float64) == sum_of_biases(one).astype(np.float64)
        return f"a sum of which {int((~exact).sum())} of {exact.size} values are rounded"


def is_gru(one: Computed) -> bool:
    """Whether two biases belong to three gates, as only a GRU has them."""
    rows, width = one.pieces["kernel"].shape
    return rows == 3 * width


def sum_of_biases(one: Computed) -> np.ndarray:
    """Both biases in one, in their own dtype; the last third of a GRU's second one is 0 and adds nothing."""
    return np.asarray(one.pieces["ih"].read() + one.pieces["hh"].read())


def unbased(leaf: Leaf, found: list[Computed]) -> Leaf:
    """The further arrays of a layer to which an adapter was merged, under the layer's own name."""
    owner = leaf.path.removesuffix(f"base_layer.{leaf.name}").rstrip(".")
    if any(one.kind == "lora" and one.owner == owner for one in found) and leaf.path.endswith(f"base_layer.{leaf.name}"):
        return replace(leaf, path=join(owner, leaf.name), owner=owner)
    return leaf


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
    if len(names) != 3 or not b.startswith("B") or any(len(leaf.shape) != 2 for leaf in one.pieces.values()):
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
