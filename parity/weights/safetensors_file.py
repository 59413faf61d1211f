"""Safetensors: parsed here, so that one tensor at a time is in memory.

Source:
    https://github.com/huggingface/safetensors#format
"""

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from parity.errors import InputError, listed
from parity.weights.files import (
    Contents,
    Mapped,
    Slot,
    impossible,
    in_flax_words,
    looks_like,
    make_leaf,
    once,
    put,
    side_of,
    size_of,
    unwritable,
)
from parity.weights.leaf import DTYPES, Leaf
from parity.weights.paths import natural

NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
    "BOOL": "bool",
    **{f"{sign.upper()}{width}": f"{sign.replace('i', '')}int{width}" for sign in ("i", "u") for width in (8, 16, 32, 64)},
}
CODES = {name: code for code, name in NAMES.items()}
# In the metadata of a bundle: the facts of a recorded model.
BUNDLE = "parity bundle"
# The limit of the format's own reader: more is an attack, not a header.
LONGEST_HEADER = 100_000_000


def read(path: Path) -> Contents:
    """Open one safetensors file.

    Raises:
        InputError: it is not one, is cut short, or its header lies.
    """
    found, metadata = tensors(path)
    return contents(found, metadata, path)


def contents(found: dict[str, Leaf], metadata: dict[str, str], path: Path) -> Contents:
    """The tensors with the ties that the metadata records, in natural order; of a bundle the parameters of its model."""
    if BUNDLE in metadata:
        return recorded(path)
    # As safetensors.torch.save_model has it: the name that was left out, and the name that was kept.
    tied = {name: kept for name, kept in metadata.items() if name not in found and kept in found and name != "format"}
    for name, kept in tied.items():
        leaf = found[kept]
        found[name] = make_leaf(name, leaf.shape, leaf.dtype, leaf.identity, leaf.read)
    side, why = side_of(found, metadata)
    rest = {key: value for key, value in metadata.items() if key not in tied}
    notes = (f"{path.name}: the names are {'PyTorch' if side == 'torch' else 'Flax'}'s, {why}",)
    leaves = [found[name] for name in sorted(found, key=natural)]
    if side == "flax":
        leaves = [in_flax_words(leaf, tuple(leaf.path.split("."))) for leaf in leaves]
    return Contents(tuple(leaves), side, rest, notes)


def recorded(path: Path) -> Contents:
    """The parameters of the model that a bundle holds.

    Raises:
        InputError: the bundle cannot be used, or keeps digests of them.
    """
    # A bundle is made of what this room has; only here the way leads back.
    from parity.bundles.file import read as opened

    bundle, leaves = opened(path), list[Leaf]()
    told = [one for one in bundle.facts["leaves"] if one["role"] in ("parameter", "buffer")]
    lost = [one["path"] for one in told if one["values"] is None]
    if lost:
        raise InputError(f"{path} holds digests of parameters ({lost[0]} first), not their values; record with keep='all'")
    for one in told:
        leaf = bundle.tensors[one["values"]["of"]]
        leaves.append(make_leaf(one["path"], leaf.shape, leaf.dtype, (str(path), one["identity"]), leaf.read))
    if bundle.side == "flax":
        leaves = [in_flax_words(leaf, tuple(leaf.path.split("."))) for leaf in leaves]
    return Contents(tuple(leaves), bundle.side, {}, (f"{path.name} is a bundle: its model's parameters are taken",))


def tensors(path: Path) -> tuple[dict[str, Leaf], dict[str, str]]:
    """Every tensor of one file by its name, and the metadata."""
    size = size_of(path)
    with path.open("rb") as file:
        header, start = parse_header(file, size, path)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InputError(
            f"{path} is corrupt: its __metadata__ is no mapping from text to text; fetch or write it again", "file-unreadable"
        )
    problems = [problem for name, entry in header.items() if (problem := entry_problem(name, entry))]
    problems = problems or overlaps(header, size - start)
    if problems:
        raise InputError(listed(f"{path} is corrupt, fetch or write it again", problems), "file-unreadable")
    data = Mapped(path)

    def reader(begin: int, shape: tuple[int, ...], dtype: str) -> Callable[[], np.ndarray]:
        return lambda: data.array(begin, shape, dtype)

    found = {}
    for name, entry in header.items():
        shape, dtype, begin = tuple(entry["shape"]), NAMES[entry["dtype"]], start + entry["data_offsets"][0]
        found[name] = make_leaf(name, shape, dtype, (str(path), name), reader(begin, shape, dtype))
    return found, metadata


def parse_header(file: BinaryIO, size: int, path: Path) -> tuple[dict[str, Any], int]:
    """The header as JSON, and where the data begins."""
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 2 <= length <= min(size - 8, LONGEST_HEADER):
        known = looks_like(start + file.read(32))
        raise InputError(
            f"{path} is no safetensors file, or is cut short: its header would be {length:,} bytes long, "
            f"the file has {size:,}{known or '; fetch or write it again'}",
            "file-unreadable",
        )
    try:
        header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path} is corrupt: its header is no valid JSON ({error}); fetch or write it again", "file-unreadable"
        ) from error
    if not isinstance(header, dict):
        raise InputError(
            f"{path} is corrupt: its header is a {type(header).__name__}, not an object; fetch or write it again",
            "file-unreadable",
        )
    return header, 8 + length


def entry_problem(name: str, entry: Any) -> str:
    """What is wrong with a tensor's entry in the header, '' if nothing is."""
    if problem := unwritable([name]):
        return problem[0]
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        return f"{name} is described by {str(entry)[:60]}, not by dtype, shape and data_offsets"
    if entry["dtype"] not in NAMES:
        return f"{name} has dtype {entry['dtype']!r}, and only {', '.join(NAMES)} are known"
    shape, offsets = entry["shape"], entry["data_offsets"]
    whole = isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2
    # bool is an int to Python.
    if not whole or not all(type(number) is int and 0 <= number < 2**63 for number in [*shape, *offsets]):
        return f"{name} has shape {shape} and data_offsets {offsets}, which are no sizes"
    wanted = math.prod(shape) * DTYPES[NAMES[entry["dtype"]]].itemsize
    if (reason := impossible(tuple(shape), NAMES[entry["dtype"]])) and offsets[1] - offsets[0] == wanted:
        return f"{name} {reason}"
    if offsets[1] - offsets[0] != wanted:
        return f"{name} takes {wanted:,} bytes by its shape and dtype, but {offsets[1] - offsets[0]:,} by its data_offsets"
    return ""


def overlaps(header: dict[str, Any], size: int) -> list[str]:
    """Tensors that overlap, leave gaps, or lie outside the file; the first of them."""
    end, last = 0, "the header"
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = entry["data_offsets"]
        if begin != end:
            kind = "overlaps" if begin < end else "leaves a gap after"
            return [f"{name} {kind} {last}: it begins at byte {begin:,} of the data, which must be {end:,}"]
        end, last = stop, name
    if end > size:
        return [f"{last} ends at byte {end:,}, but the file has only {size:,} bytes of data: it is cut short"]
    return [f"{size - end:,} bytes at the end belong to no tensor"] if end < size else []


# ---------------------------------------------------------------- writing


def ordered(slots: Iterable[Slot]) -> list[Slot]:
    # Widest first, so that each begins at a multiple of its width.
    return sorted(slots, key=lambda slot: (-DTYPES[slot.dtype].itemsize, natural(slot.paths[0])))


def write(path: Path, slots: list[Slot], arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> list[Path]:
    """Write one file, one array after the other; of tied names the first is kept and the others go into the metadata."""
    end, header = 0, dict[str, Any]()
    ties = {name: slot.paths[0] for slot in slots for name in slot.paths[1:]}
    if metadata or ties:
        header["__metadata__"] = {**metadata, **ties}
    for slot in ordered(slots):
        entry = {"dtype": CODES[slot.dtype], "shape": list(slot.shape), "data_offsets": [end, end + slot.bytes]}
        header[slot.paths[0]] = entry
        end += slot.bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for slot in ordered(slots):
            put(file, arrays[slot.paths[0]])
    return []
