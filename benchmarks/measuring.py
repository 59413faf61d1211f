"""What the rows of the transfer benchmark share, whichever environment they run in: sizes, clock, peak and floors."""

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

MIB = 2**20
# Of BERT large, but for the vocabulary, so that the largest array is that of a layer.
WIDTH, VOCABULARY, POSITIONS, TYPES = 1024, 4096, 512, 2


def config(layers: int) -> dict[str, Any]:
    """The settings of transformers' BertConfig that give the models of this benchmark."""
    return {
        "model_type": "bert",
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": WIDTH // 64,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": POSITIONS,
        "type_vocab_size": TYPES,
    }


def timed(call: Callable[[], Any]) -> float:
    """Seconds that a call takes; what it returns is let go outside of them."""
    begin = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - begin
    del result
    return seconds


def copy_floor(arrays: list[np.ndarray], repeat: int) -> float:
    """Seconds of a copy of arrays into memory that is in use already, by one core; the fastest run."""
    arrays = [array for array in arrays if array.size]
    buffers = [np.ones_like(array) for array in arrays]

    def copy() -> None:
        for buffer, array in zip(buffers, arrays, strict=True):
            np.copyto(buffer, array)

    return min([timed(copy) for _ in range(repeat + 1)][1:])


def read_floor(path: Path, repeat: int) -> float:
    """Seconds of reading a file from the page cache; the fastest run.

    Into new memory, as the arrays of a model are.
    """
    return min([timed(path.read_bytes) for _ in range(repeat + 1)][1:])


def reread_floor(path: Path, repeat: int) -> float:
    """Seconds of reading a file from the page cache into memory that is in use already; the fastest run."""
    buffer = memoryview(bytearray(path.stat().st_size))

    def read() -> None:
        done = 0
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer[done:]):
                done += count

    return min([timed(read) for _ in range(repeat + 1)][1:])


def write_floor(path: Path, to: Path, repeat: int) -> float:
    """Seconds of reading a file and writing its bytes to the disk; the fastest run."""
    buffer = memoryview(bytearray(16 * MIB))

    def write() -> None:
        with path.open("rb", buffering=0) as source, to.open("wb") as target:
            while count := source.readinto(buffer):
                target.write(buffer[:count])
            target.flush()
            os.fsync(target.fileno())

    seconds = min([timed(write) for _ in range(repeat)])
    to.unlink()
    return seconds


def measured(call: Callable[[], Any], repeat: int, again: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Run a call; `again` makes things as they were, outside of the time that counts.

    Returns:
        The seconds of each run, and the bytes by which the first one's peak was above the start.
    """
    gc.collect()
    before = resident()
    with Peak() as peak:
        first = timed(call)
    seconds = []
    for _ in range(repeat):
        again()
        gc.collect()
        seconds.append(timed(call))
    return {"first": first, "seconds": seconds, "peak": peak.value - before}


def resident() -> int:
    """The bytes of this process that are in memory, mapped pages included."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssFile"))) * 1024


class Peak:
    """Watch `resident` from a thread of its own."""

    def __enter__(self) -> "Peak":
        self.value, self.stop = resident(), False
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        """Look about five hundred times a second."""
        while not self.stop:
            self.value = max(self.value, resident())
            time.sleep(0.002)

    def __exit__(self, *_: Any) -> None:
        self.stop = True
        self.thread.join()
