"""Settings of a whole process, changed while any thread wants them changed."""

import contextlib
import threading
from collections.abc import Callable, Iterator


class Held:
    """Changed by the first thread that comes in, restored by the last one that leaves.

    If every thread restored what it found, one could leave behind what another had set.

    Args:
        change: changes the settings and returns what restores them.
    """

    def __init__(self, change: Callable[[], Callable[[], object]]):
        self.change, self.lock, self.inside = change, threading.Lock(), 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Hold the settings changed."""
        with self.lock:
            if not self.inside:
                self.restore = self.change()
            self.inside += 1
        try:
            yield
        finally:
            with self.lock:
                self.inside -= 1
                if not self.inside:
                    self.restore()
