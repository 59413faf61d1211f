"""Torch weights that their layer computes from other arrays: which they are, by their names, and what is said of them.

`weight_norm`, `spectral_norm` and LoRA keep several arrays for one weight, and a recurrent layer two
biases for one. Where Flax keeps the same ones they travel as they are; otherwise see `merging`.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

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

# Tells whether a path is that of one array of a weight that is kept as several, and of which.
Finder = Callable[[str, "Known"], Computed | None]

# The small arrays beside a large one that have no fixed name.
BESIDE = re.compile(r"(.*?\.|)(?:lora_\w+\..+|\d+\._u)")


class Known(dict[str, Leaf]):
    """Leaves by path."""

    @cached_property
    def beside(self) -> dict[str, list[str]]:
        """The paths that `BESIDE` fits, by what stands in front: no leaf is compared with all others."""
        found: dict[str, list[str]] = {}
        for path in self:
            if match := BESIDE.fullmatch(path):
                found.setdefault(match[1], []).append(path)
        return found


def computed(leaves: Iterable[Leaf], finders: Iterable[Finder] | None = None) -> list[Computed]:
    """The weights that are kept as several arrays, by the names of those: those that some finders know, or all."""
    known = Known((leaf.path, leaf) for leaf in leaves)
    finders = FIND if finders is None else tuple(finders)
    return [found for path in known for find in finders if (found := find(path, known))]


def normed(path: str, known: Known) -> Computed | None:
    """A weight kept as its norm and its direction, by the path of the norm."""
    owner, name, last = parametrized(path) if path.endswith("original0") else ("", "", "")
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


def spectral(path: str, known: Known) -> Computed | None:
    """A weight divided by its largest singular value, by the path of what is divided."""
    owner, name, last = parametrized(path)
    if last == "original":
        inner = path.removesuffix("original")
        left = next((p for p in known.beside.get(inner, ()) if p.endswith("._u")), "")
        right = left.removesuffix("_u") + "_v"
    elif path.endswith("_orig"):
        whole = path.removesuffix("_orig")
        (owner, name), left, right = split(whole), f"{whole}_u", f"{whole}_v"
    else:
        return None
    if left not in known or right not in known:
        return None
    return Computed("spectral_norm", owner, name, {"weight": known[path], "u": known[left], "v": known[right]})


def lora(path: str, known: Known) -> Computed | None:
    """A weight to which a product of two small matrices is added, by the path of the large one."""
    owner, tail = path.removesuffix("base_layer.weight").rstrip("."), join("base_layer", "weight")
    if not path.endswith(tail):
        return None
    pieces = {"weight": known[path]}
    front = f"{owner}." if owner else ""
    for name in known.beside.get(front, ()):
        rest = name.removeprefix(front)
        if rest.startswith("lora_"):
            # What is no matrix of a plain adapter, such as the magnitudes of DoRA, has a part in the weight too.
            match = re.fullmatch(r"lora_(A|B)\.(.+)\.weight", rest)
            pieces[f"{match[1]} {match[2]}" if match else rest] = known[name]
    return Computed("lora", owner, "weight", pieces) if len(pieces) > 1 else None


RECURRENT_BIAS = re.compile(r"bias_hh(?:_l\d+(?:_reverse)?)?$")


def second_bias(path: str, known: Known) -> Computed | None:
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
    # Of a layer that torch.ao quantised a state_dict has two numbers and no array of weights.
    ("torch", re.compile(r"(?:(.*)\.)?(_packed_params\..*|scale|zero_point)")),
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


def as_wrapped(
    leaves: list[Leaf], found: list[Computed], layers: list[Layer], asked: Callable[[Leaf], bool]
) -> tuple[list[Leaf], list[Layer]]:
    """Norms and directions under the names by which the ledger knows them, where Flax asks for the norm.

    The direction is the layer's weight, the norm an array of the function that made the layer keep both.

    Args:
        leaves: of torch.
        found: the weights that are kept as norm and direction.
        layers: of torch.
        asked: whether Flax has a place for a leaf.

    Returns:
        All leaves, and what `weight_norm` does to a layer as a layer of its own that stands where that one does.
    """
    kinds = {layer.path: layer.kinds for layer in layers}
    changed, norms = dict[str, Leaf](), list[Layer]()
    for one in found:
        g, v = one.pieces["g"], one.pieces["v"]
        norm = replace(g, owner=one.owner, name=f"{one.name}_g", kinds=(WEIGHT_NORM,))
        if asked(norm):
            changed |= {g.path: norm, v.path: replace(v, owner=one.owner, name=one.name, kinds=kinds.get(one.owner, ()))}
            axis = next((axis for axis, size in enumerate(g.shape) if size > 1), 0 if g.shape else None)
            norms.append(Layer(one.owner, (WEIGHT_NORM,), {"dim": axis}.get, one.owner))
    return [changed.get(leaf.path, leaf) for leaf in leaves], norms
