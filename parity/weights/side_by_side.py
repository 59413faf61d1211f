"""Two batches of arrays on their way at a time: one core alone does not keep the memory busy."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

Given = TypeVar("Given")
Made = TypeVar("Made")

# Not as many as there are cores: each may hold an array of its own, and the peak is to be two of them.
THREADS = 2
# Bytes that are sent in one call, unless an array alone is larger: handing over to a thread takes as long as a copy of 1 MB.
BATCH = 4 << 20


def batches(arrays: Iterable[tuple[str, Any]]) -> Iterator[dict[str, Any]]:
    """Arrays that are read as they are asked for, some at a time, so that those of a file are never all in memory."""
    batch: dict[str, Any] = {}
    size = 0
    for path, array in arrays:
        batch[path] = array
        size += getattr(array, "nbytes", 0)
        # A name that lasts until the next one is read would keep one more in memory.
        del array
        if size >= BATCH:
            yield batch
            batch, size = {}, 0
    if batch:
        yield batch


def side_by_side(
    call: Callable[[Given], Made], given: Iterable[Given], allowed: Callable[[], bool] = lambda: True
) -> Iterator[Made]:
    """The results of a call, in the order in which they come.

    Args:
        call: what is done in threads; most of its time must be spent without Python's lock.
        given: what it is called with; the next one is asked for, by the caller's own thread, when fewer
            than `THREADS` calls are running.
        allowed: whether other threads may do it, asked when the first is given; if not, the caller's own makes every call.
    """
    running: set[Future[Made]] = set()
    threads = 0
    with ThreadPoolExecutor(THREADS) as pool:
        for one in given:
            threads = threads or (THREADS if allowed() else 1)
            if threads == 1:
                made = call(one)
                del one
                yield made
                del made
                continue
            running.add(pool.submit(call, one))
            del one
            if len(running) == threads:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        yield from (future.result() for future in running)
