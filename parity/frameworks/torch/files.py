"""Files of torch.save, read without running code and written one tensor after the other."""

import ctypes
import dataclasses
import mmap
import os
import re
import struct
import sys
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from parity.errors import InputError, first_line
from parity.frameworks.torch.leaves import leaves, torch_dtype
from parity.weights.files import MAPPED, Contents, Slot, looks_like, row_major, size_of
from parity.weights.leaf import Leaf

# Under what name training scripts keep the weights beside an optimizer and an epoch.
RAW = ("state_dict", "model_state_dict", "model", "module", "net", "network", "weights")
# Averaged ones may lie beside them: a file with both does not say which are meant.
KEYS = (*RAW, "ema", "ema_state_dict", "state_dict_ema", "model_ema", "ema_model", "shadow")


def read(path: Path, key: str = "") -> Contents:
    """Open a file of torch.save; its tensors stay on disk until they are read.

    Args:
        path: the file.
        key: where in it the state_dict lies; without it the usual places are looked at.

    Raises:
        InputError: loading it would run code, it is cut short, or holds no state_dict.
    """
    value, stored = loaded(path)
    state, notes = state_in(value, path, key)
    plain = {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    others = [str(name) for name in state if name not in plain]
    if others:
        notes.append(f"{path.name}: no tensors, so left out: {', '.join(others)}")
    pages = Pages(path, stored)
    return Contents(tuple(pages.leaf(leaf, plain[leaf.path]) for leaf in leaves(plain)), "torch", {}, tuple(notes))


class Pages:
    """Gives back the pages of a mapped file that were read, so that it does not count twice against memory."""

    def __init__(self, path: Path, stored: Mapping[int, int]):
        self.path, self.stored, self.ranges = path, stored, mapped_ranges(path)
        self.first = self.last = self.touched = 0

    def leaf(self, leaf: Leaf, tensor: Tensor) -> Leaf:
        """The leaf with its pages watched. It lends nothing: what it has is the file's.

        Raises:
            InputError: the file has other bytes for it than the tensor takes.
        """
        if tensor.layout is torch.strided and tensor.device.type == "cpu":
            self.check(leaf.path, tensor.untyped_storage())

        def read() -> np.ndarray:
            self.touch(tensor.untyped_storage())
            return leaf.read()

        return dataclasses.replace(leaf, from_file=True, read=read, share=lambda axes: read().transpose(axes))

    def check(self, name: str, storage: torch.UntypedStorage) -> None:
        """Refuse a storage that is not what one entry of the archive holds: torch does not compare the two.

        Raises:
            InputError: it has other bytes.
        """
        begin = storage.data_ptr()
        base = next((first for first, last in self.ranges if first <= begin < last), None)
        if base is None or not storage.nbytes():
            return
        size = self.stored.get(begin - base, 0)
        if size != storage.nbytes():
            raise InputError(
                f"{self.path} is damaged: {name} takes {storage.nbytes():,} bytes, and {size:,} are stored for it; "
                "fetch or write it again",
                "file-unreadable",
            )

    def touch(self, storage: torch.UntypedStorage) -> None:
        begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        # Only what lies in the file's own mapping: elsewhere the call would wipe memory out.
        if begin == end or not any(first <= begin and end <= last for first, last in self.ranges):
            return
        if self.touched + end - begin > MAPPED:
            # All that was read so far: torch maps the file once, in one piece, and what was lent may have been read late.
            first, last = -(-self.first // mmap.PAGESIZE) * mmap.PAGESIZE, self.last // mmap.PAGESIZE * mmap.PAGESIZE
            if first < last:
                ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
            self.touched = 0
        self.first, self.last = min(self.first or begin, begin), max(self.last, end)
        self.touched += end - begin


def mapped_ranges(path: Path) -> list[tuple[int, int]]:
    """Where a file is mapped in this process; empty where the system does not tell."""
    try:
        lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError):
        return []
    name = os.path.realpath(path)
    spans = [parts[0].split("-") for parts in lines if len(parts) == 6 and parts[5] == name]
    return [(int(first, 16), int(last, 16)) for first, last in spans]


def loaded(path: Path) -> tuple[Any, dict[int, int]]:
    """What a file holds, and of an archive the sizes of its entries by where they begin."""
    size_of(path)
    with path.open("rb") as file:
        start = file.read(64)
    # Only the zip archives of torch 1.6 and later can be mapped.
    zipped = start.startswith(b"PK")
    try:
        stored, own_order = entries(path) if zipped else ({}, False)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped and own_order), stored
    except InputError:
        raise
    except Exception as error:
        # torch reports damage by many types: RuntimeError, EOFError, KeyError, ValueError, UnpicklingError.
        raise InputError(refusal(path, start, error), "file-unreadable") from error


def entries(path: Path) -> tuple[dict[int, int], bool]:
    """The size of each entry of an archive by where its bytes begin in the file, and whether they are in this machine's order.

    Those in the other order torch turns round in the memory that it mapped, where they are lost as soon as it is given back.

    Raises:
        InputError: something in it is compressed: torch would take compressed bytes for the array itself.
    """
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
        packed = [info.filename for info in infos if info.compress_type != zipfile.ZIP_STORED]
        if packed:
            raise InputError(
                f"{path} holds compressed entries, such as {packed[0]}, which torch.save never writes; "
                "unpack it and pack it again without compression",
                "file-unreadable",
            )
        order = next((archive.read(info) for info in infos if info.filename.endswith("/byteorder")), sys.byteorder.encode())
        return {data_offset(file, info): info.file_size for info in infos}, order == sys.byteorder.encode()


def refusal(path: Path, start: bytes, error: Exception) -> str:
    """Why a file was not loaded, and what to do."""
    words = str(error)
    if "TorchScript" in words:
        return f"{path} is a TorchScript program, not weights; save model.state_dict() instead"
    found = re.search(r"(?:GLOBAL|global|class|function) ([\w.]*\w\.\w+)", words)
    if "Weights only load failed" in words and found:
        return (
            f"{path} holds {found.group(1)}, and loading that would run code; nothing of it was run. "
            "Ask its author for safetensors, or save model.state_dict() where you trust it"
        )
    known = "" if start.startswith((b"PK\x03\x04", b"\x80\x02")) else looks_like(start)
    reason = next((line for line in reversed(words.splitlines()) if line.strip() and "http" not in line), first_line(error))
    return f"{path} is no file of torch.save, or is damaged: {reason.strip()[:200]}{known or '; fetch or write it again'}"


def state_in(value: Any, path: Path, key: str) -> tuple[dict[str, Any], list[str]]:
    """The state_dict in what was loaded, and how it was found.

    Raises:
        InputError: there is none, or there are several.
    """
    if not isinstance(value, Mapping):
        raise InputError(f"{path} holds a {type(value).__name__}, not a state_dict; save model.state_dict()", "file-unreadable")
    if key:
        return under(value, path, key)
    known = [key for key in KEYS if tensors_in(value.get(key))]
    nested = known or [str(key) for key, entry in value.items() if tensors_in(entry)]
    if not nested and tensors_in(value):
        return {str(key): entry for key, entry in value.items()}, []
    if len(known) != 1:
        keys = ", ".join(map(str, value)) or "nothing"
        what = f"tensors under {', '.join(nested)}" if nested else f"no tensors: {keys}"
        do = f"say which are meant with key, such as key={nested[0]!r} (--key)" if nested else "save model.state_dict()"
        raise InputError(f"{path} holds {what}; {do}", "file-unreadable")
    others = [str(key) for key in value if key != known[0]]
    left = f"; left out: {', '.join(others)}" if others else ""
    return dict(value[known[0]]), [f"{path.name}: the weights are under {known[0]!r}{left}"]


def under(value: Mapping[Any, Any], path: Path, key: str) -> tuple[dict[str, Any], list[str]]:
    """The tensors under a dotted key: first down the dicts that lie in one another, then by how their names begin.

    Raises:
        InputError: there are none.
    """
    node, rest = value, key
    while rest:
        name = next(
            (str(own) for own in sorted(map(str, node), key=len, reverse=True) if f"{rest}.".startswith(f"{own}.")), None
        )
        inner = next((entry for own, entry in node.items() if str(own) == name), None)
        if not isinstance(inner, Mapping):
            break
        node, rest = inner, rest.removeprefix(name or "").removeprefix(".")
    start = f"{rest}." if rest else ""
    found = {str(own).removeprefix(start): entry for own, entry in node.items() if str(own).startswith(start)}
    if not tensors_in(found):
        tops = ", ".join(map(str, [*value][:20]))
        raise InputError(
            f"{path} has no tensors under the key {key!r}; at its top it has {tops or 'nothing'}", "file-unreadable"
        )
    return found, []


def tensors_in(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(entry, Tensor) for entry in value.values())


def write(path: Path, slots: list[Slot], arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> list[Path]:
    """Write a state_dict, one tensor after the other; tied names share one storage, as torch.save has it."""
    # Never touched, so that this memory is only promised.
    empty = {slot.paths[0]: torch.empty(slot.shape, dtype=torch_dtype(slot.dtype)) for slot in slots}
    whole = {name: empty[slot.paths[0]] for slot in slots for name in slot.paths}
    try:
        with torch.serialization.skip_data():
            torch.save(whole, path)
    except RuntimeError as error:
        # So torch reports a full disk.
        raise OSError(first_line(error)) from error
    del empty, whole
    with zipfile.ZipFile(path) as archive:
        infos, central = {info.filename: info for info in archive.infolist()}, archive.start_dir
    prefix = next(name for name in infos if name.endswith("/data.pkl")).removesuffix("data.pkl")
    sums = {}
    with path.open("r+b") as file:
        # Storages are numbered in the order in which the pickle meets them.
        for number, slot in enumerate(slots):
            info = infos[f"{prefix}data/{number}"]
            file.seek(data_offset(file, info))
            sums[info.filename] = 0
            for piece in row_major(arrays[slot.paths[0]]):
                file.write(piece)
                sums[info.filename] = zlib.crc32(piece, sums[info.filename])
        write_sums(file, central, sums)
    return []


def data_offset(file: BinaryIO, info: zipfile.ZipInfo) -> int:
    """Where an entry's bytes begin: behind its local header, whose padding the directory does not tell."""
    file.seek(info.header_offset)
    name, extra = struct.unpack("<26x2H", file.read(30))
    return info.header_offset + 30 + name + extra


def write_sums(file: BinaryIO, central: int, sums: Mapping[str, int]) -> None:
    """Put the checksums into the archive's directory: torch left them out together with the data."""
    file.seek(central)
    while True:
        at, header = file.tell(), file.read(46)
        if header[:4] != b"PK\x01\x02":
            break
        name, extra, comment = struct.unpack_from("<3H", header, 28)
        filename = file.read(name).decode()
        if filename in sums:
            file.seek(at + 16)
            file.write(struct.pack("<I", sums[filename]))
        file.seek(at + 46 + name + extra + comment)
    file.seek(0, os.SEEK_END)
