"""What wrappers put in front of the names of the model inside: found, left out of the names, and told."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from parity.weights.leaf import Layer, Leaf
from parity.weights.paths import Rename, join

# By whom a first part of every name is put there.
WRAPPERS = {
    "_orig_mod": "torch.compile puts that there",
    "module": "torch.nn.DataParallel, DistributedDataParallel and AveragedModel put that there",
    "_fsdp_wrapped_module": "FullyShardedDataParallel puts that there",
    "_checkpoint_wrapped_module": "torch's activation checkpointing puts that there",
    "model": "Lightning modules and other trainers put that there",
    "net": "Lightning modules and other trainers put that there",
    "online_model": "trainers put that in front of raw weights beside averaged ones",
    "ema_model": "trainers put that in front of averaged weights",
    "model_ema": "trainers put that in front of averaged weights",
    "base_model": "peft puts that there",
    "shadow": "trainers put that in front of averaged weights",
}
# Names that nobody gives to a layer: left out wherever in a path they stand.
PRIVATE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
AVERAGED = ("ema_model", "model_ema", "ema", "shadow")
RAW = ("model", "module", "net", "online_model", "")
COUNT = "n_averaged"


@dataclass
class Unwrapped:
    """Both sides with the names that wrappers gave left out of the layers' paths.

    A leaf keeps its own path, by which it is read and written; only the name of its layer changes.

    Attributes:
        leaves: of the source and of the target.
        layers: likewise.
        notes: what was left out, one sentence each.
        alone: torch's counts of averaged models, which have no counterpart; one sentence each.
        aside: their paths.
        problems: why nothing was left out although it could be; one sentence each.
        shorter: what leaves it out of a name of the source.
        front: what stands before every name of the target.
    """

    leaves: list[list[Leaf]]
    layers: list[list[Layer]]
    notes: list[str]
    alone: list[str]
    aside: list[str]
    problems: list[str]
    shorter: Callable[[str], str] = str
    front: str = ""


def unwrapped(leaves: tuple[list[Leaf], list[Leaf]], layers: tuple[list[Layer], list[Layer]], rename: Rename) -> Unwrapped:
    """Leave out what wrappers put in front of all names of one side and of none of the other.

    Args:
        leaves: of the source and of the target.
        layers: likewise.
        rename: what the caller says of the names: a prefix that stands in it is left to it.
    """
    done = Unwrapped([*leaves], [*layers], [], [], [], [])
    roles = ("source", "target")
    for side in (0, 1):
        others = [leaf.path for leaf in done.leaves[1 - side]]
        done.leaves[side] = without_count(done.leaves[side], others, done, filled=side == 1)
        done.problems += both_kinds([leaf.path for leaf in done.leaves[side]], others, roles[side])
    # Both sides are looked at as they came, so that it makes no difference which is first.
    given = [side.path for entry in rename.entries for side in (entry.key, entry.value)]
    prefixes = [common(done.leaves[side], done.leaves[1 - side], given) for side in (0, 1)]
    for side, prefix in enumerate(prefixes):
        done.notes += [told(roles[side], prefix)] if prefix else []
        inner = inside(done.leaves[side], done.leaves[1 - side], prefix)
        if inner:
            done.notes.append(f"{', '.join(inner)} in names of the {roles[side]}: {why(inner)}; left out of its names")
        if prefix or inner:
            shorter = shortener(prefix, inner)
            done.shorter = shorter if side == 0 else done.shorter
            done.front = ".".join(prefix) if side == 1 else done.front
            done.leaves[side] = [replace(leaf, owner=shorter(leaf.owner)) for leaf in done.leaves[side]]
            done.layers[side] = [replace(layer, path=shorter(layer.path)) for layer in done.layers[side]]
    return done


def common(mine: list[Leaf], others: list[Leaf], given: list[str]) -> tuple[str, ...]:
    """The parts that wrappers put in front of every path, none if there are others or some path of the other side has them."""
    if not {first_part(leaf) for leaf in mine} <= WRAPPERS.keys():
        return ()
    paths = [worded(leaf).split(".") for leaf in mine]
    theirs = {path.split(".")[0] for leaf in others for path in (leaf.path, worded(leaf))}
    found: list[str] = []
    while paths and all(len(path) > len(found) + 1 for path in paths):
        first = {path[len(found)] for path in paths}
        part = next(iter(first))
        if len(first) > 1 or part not in WRAPPERS or part in theirs:
            break
        found.append(part)
    wrapped = ".".join(found)
    return () if any(path == wrapped or f"{path}.".startswith(f"{wrapped}.") for path in given) else tuple(found)


def worded(leaf: Leaf) -> str:
    """A leaf's path in torch's words, without what a file or an nnx.Sequential adds."""
    return join(leaf.owner, leaf.name)


def first_part(leaf: Leaf) -> str:
    """The first part of a leaf's path in torch's words."""
    return (leaf.owner or leaf.name).partition(".")[0]


def inside(mine: list[Leaf], others: list[Leaf], prefix: tuple[str, ...]) -> list[str]:
    """Private names of wrappers around parts of the model, behind what stands in front of all."""
    every_name = "\n".join([name for leaf in mine for name in (leaf.owner, leaf.name)])
    if not any(name in every_name for name in PRIVATE):
        return []
    theirs = {part for leaf in others for part in leaf.path.split(".")}
    parts = {part for leaf in mine for part in worded(leaf).split(".")[len(prefix) : -1]}
    return [name for name in PRIVATE if name in parts and name not in theirs]


def shortener(prefix: tuple[str, ...], inner: list[str]) -> Callable[[str], str]:
    def shorter(path: str) -> str:
        parts = path.split(".")
        rest = parts[len(prefix) :] if tuple(parts[: len(prefix)]) == prefix else parts
        return join(*(part for part in rest if part not in inner))

    return shorter


def hint(sources: list[Leaf], targets: list[Leaf], sides: Sequence[str]) -> list[str]:
    """What to do about a name in front of all of one side that might be a wrapper's, and was not left out."""
    found = []
    for role, other, mine, theirs in (("source", "target", sources, targets), ("target", "source", targets, sources)):
        first = set(map(first_part, mine))
        prefix = next(iter(first)) if len(first) == 1 else ""
        shared = [first_part(leaf) == prefix for leaf in theirs]
        if prefix in WRAPPERS and any(shared) and not all(shared):
            rename = {prefix: ""} if role == "source" or sides[0] != sides[1] else {"": prefix}
            found.append(
                f"every name of the {role} begins with {prefix!r}, and some of the {other}'s do: {WRAPPERS[prefix]}; "
                f"if that is so here, give the model inside it, .{prefix}, or pass rename={rename}"
            )
        elif prefix in WRAPPERS and not any(shared) and all(leaf.owner for leaf in mine):
            # Otherwise it would be gone from the owners.
            found.append(
                f"every name of the {role} begins with {prefix!r}: {WRAPPERS[prefix]}; it is left there because rename names "
                "it: write the names in rename without it, or add entries for all other names"
            )
    return found


def told(role: str, prefix: tuple[str, ...]) -> str:
    return f"every name of the {role} begins with {'.'.join(prefix)!r}: {why(prefix)}; left out of its names"


def why(parts: tuple[str, ...] | list[str]) -> str:
    return ", and ".join(dict.fromkeys(WRAPPERS[part] for part in parts))


def without_count(leaves: list[Leaf], others: list[str], done: Unwrapped, *, filled: bool) -> list[Leaf]:
    """The leaves without the count that torch.optim.swa_utils.AveragedModel keeps beside the model."""
    rest = [leaf for leaf in leaves if leaf.path != COUNT]
    averaged = all(leaf.path.startswith("module.") for leaf in rest)
    if not rest or len(rest) == len(leaves) or not averaged or COUNT in others:
        return leaves
    done.aside.append(COUNT)
    what = "stays as it is" if filled else "is left out"
    done.alone.append(f"{COUNT} {what}: AveragedModel counts there how many models it has averaged; no other model has it")
    return rest


def both_kinds(paths: list[str], others: list[str], role: str) -> list[str]:
    """Why raw and averaged weights of one model cannot both travel; none if the other side has both too."""
    fronts = {path.partition(".")[0] for path in paths}
    for mean in AVERAGED:
        if mean not in fronts:
            continue
        averaged = {path.removeprefix(f"{mean}.") for path in paths if path.startswith(f"{mean}.")}
        if not averaged or any(path.startswith(f"{mean}.") for path in others):
            continue
        for raw in RAW:
            front = f"{raw}." if raw else ""
            if averaged <= {path.removeprefix(front) for path in paths if path.startswith(front)}:
                choose = f"pass ignore=('{raw}.*',)" if raw else f"give a tree of the names below {mean} alone"
                return [
                    f"the {role} holds raw weights ({f'{raw}.*' if raw else 'without a prefix'}) and averaged ones "
                    f"({mean}.*); {choose} for the averaged, or pass ignore=('{mean}.*',) for the raw ones"
                ]
    return []
