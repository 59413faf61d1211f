"""Masks that jax would draw from its keys, for a run of torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from parity.dropout.masks import Place
from parity.dropout.player import Waiting
from parity.dropout.threefry import Key, bernoulli, fold_in
from parity.errors import DivergenceError, listed

# Gets the path of a module and the number of its drop, from 0; returns a key, None if there is none.
KeyOf = Callable[[str, int], Key | None]


@dataclass(frozen=True)
class Stream:
    """A stream of keys as NNX has it: key after key by folding in a count.

    Attributes:
        key: of the stream.
        count: how many keys have been taken from it.
        name: equal for modules that take their keys from one stream.
    """

    key: Key
    count: int
    name: int


class Keyed:
    """Hands out the masks of keys, as a `Player` does those of a record.

    Args:
        key_of: gets the path of a module and the number of its drop.
        wide: whether jax has 64-bit types on.
        partitionable: jax's `jax_threefry_partitionable`.
    """

    def __init__(self, key_of: KeyOf, *, wide: bool, partitionable: bool):
        self.key_of, self.partitionable = key_of, partitionable
        self.dtype = "float64" if wide else "float32"
        self.counts: dict[str, int] = {}
        self.problems: list[str] = []

    def take(self, path: str, shape: Sequence[int], rate: float | None) -> Waiting | None:
        """The mask that jax draws there; None if there is no key."""
        number = self.counts[path] = self.counts.get(path, -1) + 1
        key, keep = self.key_of(path, number), 1.0 - (rate or 0.0)
        if key is None:
            self.tell(
                f"there is no key for {path or 'the model'}; the Flax model draws nothing there, so name its place or give keys"
            )
            return None
        mask = bernoulli(key, keep, shape, dtype=self.dtype, partitionable=self.partitionable)
        return Waiting(Place(path, number, "function", 1.0 - keep, None, tuple(shape)), mask)

    def enter(self) -> None:
        """The whole model is called."""

    def leave(self) -> None:
        """That call is over."""

    def tell(self, problem: str) -> None:
        """Keep what does not fit."""
        if problem not in self.problems:
            self.problems.append(problem)

    def finish(self) -> None:
        """Tell everything that did not fit.

        Raises:
            DivergenceError: something did not.
        """
        if self.problems:
            raise DivergenceError(listed("torch's model has no masks for all that it drops", self.problems))


def one_after_another(key: Key) -> KeyOf:
    """Fold the number of the drop, counted over the whole run, into one key."""
    taken = iter(range(2**32))
    return lambda _path, _number: fold_in(key, next(taken))


def of_streams(streams: Mapping[str, Stream], renamed: Callable[[str], str]) -> KeyOf:
    """Take the keys that the modules of an NNX model would take next."""
    counts = {stream.name: stream.count for stream in streams.values()}

    def key_of(path: str, _number: int) -> Key | None:
        stream = streams.get(renamed(path))
        if stream is None:
            return None
        count = counts[stream.name]
        counts[stream.name] += 1
        return fold_in(stream.key, count)

    return key_of
