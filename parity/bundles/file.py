"""The file of a bundle: safetensors whose metadata is JSON. Whatever is wrong with one is told at once."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parity.bundles import form
from parity.bundles.encoding import MARK, decoded
from parity.errors import InputError, first_line, listed
from parity.weights.files import Side, Slot, beside, once
from parity.weights.leaf import Leaf, digest
from parity.weights.safetensors_file import BUNDLE, tensors
from parity.weights.safetensors_file import write as write_tensors

# Of the form described here. A later one is not guessed at.
VERSION = 1
# Names in the metadata of the file.
FACTS, FORM, SEAL = BUNDLE, f"{BUNDLE} version", f"{BUNDLE} digest"
# Problems that are told: of a file that was cut every array is missing.
TOLD = 20


@dataclass(frozen=True)
class Bundle:
    """A file that was opened and found whole.

    Attributes:
        path: of the file.
        facts: its JSON.
        tensors: its arrays, by their digests; each is read when it is needed.
    """

    path: Path
    facts: Mapping[str, Any]
    tensors: Mapping[str, Leaf]

    @property
    def side(self) -> Side:
        """`torch` or `flax`: whose model was recorded."""
        return "torch" if self.facts["side"] == "torch" else "flax"

    def array(self, name: str) -> np.ndarray:
        """An array by its digest."""
        return self.tensors[name].read()

    def value(self, told: Any, wanted: Any = Any, made: Callable[[Any], Any] | None = None) -> Any:
        """A part of the facts as it was before it was JSON.

        Args:
            told: the part.
            wanted: what it must be, as an annotation says it.
            made: what makes something else of it.

        Raises:
            InputError: it is of no form that this package writes.
        """
        try:
            found = form.checked(decoded(told, self.array), wanted)
            return made(found) if made else found
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
            raise InputError(
                f"{self.path} cannot be used: a part of it has another form than a bundle has "
                f"({type(error).__name__}: {first_line(error)}); record it anew",
                "file-unreadable",
            ) from error

    @property
    def told(self) -> str:
        """Where it comes from, in a few words."""
        versions = [
            f"{name} {self.facts['environment'][name]}" for name in ("torch", "flax") if name in self.facts["environment"]
        ]
        return f"{self.path.name}, recorded {self.facts['made']} with {' and '.join(versions)}"


def write(path: Path, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Write a bundle beside `path` and put it in its place.

    Raises:
        InputError: it cannot be written; what stood there stands there still.
    """
    problems = place_problems(path)
    if problems:
        raise InputError(listed(f"{path} could not be written", problems), "file-unwritable")
    text = json.dumps(facts, separators=(",", ":"), allow_nan=False)
    slots = [Slot((name,), array.shape, str(array.dtype)) for name, array in arrays.items()]
    with beside(path) as temporary:
        write_tensors(temporary, slots, arrays, {FACTS: text, FORM: str(VERSION), SEAL: sealed(text)})


def place_problems(path: Path) -> list[str]:
    """Why no bundle can stand at a path."""
    if path.is_dir():
        return [f"there is a folder of that name; give another name, such as {path / 'model.safetensors'}"]
    found, folder = [], path.absolute().parent
    if path.suffix != ".safetensors":
        found.append(f"a bundle is a .safetensors file; name it {path.with_suffix('.safetensors').name}")
    # The last folder is made if it is missing.
    if not folder.exists() and not folder.parent.exists():
        found.append(f"there is no folder {path.parent.parent}; make it first")
    elif folder.exists() and not folder.is_dir():
        found.append(f"{path.parent} is a file, not a folder; give a bundle another place")
    elif not os.access(folder if folder.exists() else folder.parent, os.W_OK):
        found.append(f"nothing may be written into {path.parent}; give a bundle another place")
    if path.exists() and holds_weights(path):
        found.append(f"{path} is a safetensors file that is no bundle, and is left as it is; give another name")
    return found


def holds_weights(path: Path) -> bool:
    """Whether a file holds arrays that nobody recorded."""
    try:
        _, metadata = tensors(path)
    except InputError:
        return False
    return FACTS not in metadata and FORM not in metadata


def sealed(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read(given: str | os.PathLike[str]) -> Bundle:
    """Open a bundle and look at every byte of it.

    Raises:
        InputError: it is no bundle, of another version, cut short or edited; all that is wrong with it.
    """
    path = Path(given)
    found, metadata = tensors(path)
    if FACTS not in metadata and FORM not in metadata:
        raise InputError(
            f"{path} is a safetensors file, but no bundle of parity's: it holds {len(found)} arrays and no recording; "
            "make one with parity record",
            "no-bundle",
        )
    check_version(path, metadata.get(FORM, ""))
    text = metadata.get(FACTS, "")
    problems = []
    if sealed(text) != metadata.get(SEAL):
        problems.append("its facts are not those that were written: somebody has edited them")
    facts = parsed(text, problems)
    if facts is not None:
        problems += form.problems(facts)
        if not problems:
            problems += [*array_problems(facts, found), *leaf_problems(facts, found)]
    problems += [
        f"array {name} is not what was recorded: it was edited, or damaged on its way"
        for name, leaf in found.items()
        if recorded_digest(leaf, facts) != name
    ]
    if problems or facts is None:
        more = [f"and {len(problems) - TOLD} more problems"] if len(problems) > TOLD else []
        said = listed(f"{path} cannot be used, fetch it again or record it anew", [*problems[:TOLD], *more])
        raise InputError(said, "file-unreadable")
    return Bundle(path, facts, found)


def check_version(path: Path, told: str) -> None:
    """Refuse a file of another form than this one.

    Raises:
        InputError: it is from a newer or from an older version.
    """
    number = int(told) if told.isdecimal() else None
    if number == VERSION:
        return
    if number is None:
        raise InputError(
            f"{path} is a bundle of version {told!r}, which is none; record it anew with parity record", "file-unreadable"
        )
    if number > VERSION:
        raise InputError(
            f"{path} is a bundle of version {number}, and this parity knows versions up to {VERSION}; "
            "update torch-flax-parity here, or record with the version that is installed here",
            "bundle-newer",
        )
    raise InputError(
        f"{path} is a bundle of version {number}, which this parity no longer reads (it reads version {VERSION}); "
        "record it anew with parity record, where its framework is installed",
        "bundle-older",
    )


def parsed(text: str, problems: list[str]) -> dict[str, Any] | None:
    """The facts; what prevents that is added to the problems."""
    try:
        facts = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        problems.append(f"its facts are no valid JSON ({error})")
        return None
    if not isinstance(facts, dict):
        problems.append(f"its facts are a {type(facts).__name__}, not an object")
        return None
    return facts


def array_problems(facts: Mapping[str, Any], found: Mapping[str, Leaf]) -> list[str]:
    """Arrays that the facts name and the file has not, and those that nothing names."""
    named = set(names_in(facts))
    lost = [f"array {name} is missing" for name in sorted(named - set(found))]
    return lost + [f"array {name} belongs to nothing that was recorded" for name in sorted(set(found) - named)]


def leaf_problems(facts: Mapping[str, Any], found: Mapping[str, Leaf]) -> list[str]:
    """Arrays of the model that are told to be otherwise than they lie in the file."""
    told = []
    for leaf in facts["leaves"]:
        array = found.get(str(leaf["values"].get("of"))) if is_array(leaf["values"]) else None
        if array is None and leaf["values"] is not None:
            told.append(f"the values of {leaf['path']} are no array")
        elif array is not None:
            halves = leaf["values"].get("halves")
            shape, dtype = (array.shape[:-1], "complex128") if halves else (array.shape, array.dtype)
            if (list(shape), dtype) != (leaf["shape"], leaf["dtype"]):
                facts_say = f"{leaf['dtype']} {tuple(leaf['shape'])}"
                told.append(f"{leaf['path']} is {facts_say} by its facts, and {dtype} {shape} in the file")
    return told


def is_array(told: Any) -> bool:
    return isinstance(told, dict) and told.get(MARK) == "array"


def names_in(value: Any) -> Iterator[str]:
    """The digests of the arrays that a part of the facts names."""
    if isinstance(value, list):
        for part in value:
            yield from names_in(part)
    elif isinstance(value, dict):
        if is_array(value):
            yield str(value.get("of"))
        else:
            for part in value.values():
                yield from names_in(part)


def recorded_digest(leaf: Leaf, facts: Mapping[str, Any] | None) -> str:
    """The digest of an array as it was recorded."""
    array = leaf.read()
    plain = digest(array)
    if plain == leaf.path or array.dtype != np.float64 or array.shape[-1:] != (2,):
        return plain
    return digest(np.asarray(array[..., 0] + 1j * array[..., 1]))
