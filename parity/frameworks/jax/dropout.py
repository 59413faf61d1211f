"""Masks drawn by jax: every one of Flax's, and of most other code, comes from `jax.random.bernoulli`."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval

from parity.dropout.masks import DropoutMasks, Place
from parity.dropout.player import Player

# Gets a module, its path in torch's words, and its call with arguments; returns what the caller gets.
Around = Callable[[Any, str, Callable[..., Any], Any, Any], Any]
# Sends every call of a module of one model through such a function.
Followed = Callable[[Around], contextlib.AbstractContextManager[None]]
# Gets what draws a mask, its shape and the probability to keep; returns the mask.
Draw = Callable[[Callable[[], Any], tuple[int, ...], Any], Any]

# Compiled functions are found again only under the same value: what was compiled with other masks, or none, is not.
MASKS = jax.make_user_context(None) if hasattr(jax, "make_user_context") else None
# The value under which a module is tried by itself: always with the same mask.
TRIAL = 0


class Programs:
    """Which compiled functions are found again: inside none that has other masks in it, behind it those from before."""

    # A value under which nothing that draws a mask has been compiled so far.
    unused = TRIAL + 1

    def __init__(self) -> None:
        self.outer, self.inner = contextlib.ExitStack(), contextlib.ExitStack()

    def __enter__(self) -> "Programs":
        only_under(Programs.unused, self.outer)
        return self

    def __exit__(self, *_: object) -> None:
        self.rewind()
        self.outer.close()

    def drawn(self) -> None:
        """A mask was drawn. If that was for a program, the program is not found again, for the next drop has another mask.

        Operations that run one by one stay compiled: they draw nothing.
        """
        if isinstance(jnp.zeros(()), jax.core.Tracer):
            Programs.unused += 1
            only_under(Programs.unused, self.inner)

    def rewind(self) -> None:
        """Find those again that were found at the beginning: the next drop has the first mask."""
        self.inner.close()


def only_under(value: int, contexts: contextlib.ExitStack) -> None:
    """Find only such compiled functions again that were compiled under this value, until these contexts are left."""
    if MASKS is not None:
        contexts.enter_context(MASKS(value))
        return
    jax.clear_caches()
    contexts.callback(jax.clear_caches)


@dataclass
class Frame:
    """A module while it is called.

    Attributes:
        path: in torch's words.
        call: which call of it this is, from 0.
        module: itself.
        drawn: drops that it made itself, with their masks, and the rates at which it asked for them.
    """

    path: str
    call: int
    module: Any = None
    drawn: list[tuple[Place, Any, float | None]] = field(default_factory=list)


class Frames:
    """Where a model is in its run; a player is told when the whole of it is called."""

    def __init__(self, player: Player | None = None) -> None:
        self.player, self.programs = player, Programs()
        self.open: list[Frame] = []
        self.counts: dict[str, int] = {}
        # A mask for every drop while a module is tried by itself, and the paths of those that were.
        self.pattern: Any = None
        self.tried: set[str] = set()
        # The body of a scan while it is traced.
        self.scan: Any = None

    @contextlib.contextmanager
    def inside(self, path: str, module: Any) -> Iterator[Frame]:
        """A call of a module."""
        number = self.counts[path] = self.counts.get(path, -1) + 1
        whole = self.player if path == "" and not self.open else None
        if whole is not None:
            whole.enter()
        self.open.append(Frame(path, number, module))
        try:
            yield self.open[-1]
        finally:
            self.open.pop()
        if whole is not None:
            whole.leave()
            if whole.repeats:
                self.programs.rewind()

    @property
    def here(self) -> Frame | None:
        """The innermost call; None where none of the model's modules is called: what is drawn then is not its own."""
        return self.open[-1] if self.open else None


@contextlib.contextmanager
def drawing(draw: Draw, programs: Programs) -> Iterator[None]:
    """Send every `jax.random.bernoulli` through `draw`.

    Args:
        draw: gets what draws a mask, its shape and the probability to keep; returns the mask.
        programs: what is compiled in between; a function that is called again draws again.
    """
    original = jax.random.bernoulli

    @functools.wraps(original)
    def bernoulli(key: Any, p: Any = 0.5, shape: Any = None, *args: Any, **kwargs: Any) -> Any:
        whole = tuple(map(int, jnp.shape(p) if shape is None else shape))
        mask = draw(lambda: original(key, p, shape, *args, **kwargs), whole, p)
        programs.drawn()
        return mask

    jax.random.bernoulli = bernoulli
    try:
        with programs:
            yield
    finally:
        jax.random.bernoulli = original


@contextlib.contextmanager
def recording(masks: DropoutMasks, followed: Followed, kind_of: Callable[[Any], tuple[str, bool]]) -> Iterator[DropoutMasks]:
    """Put every drop of a followed model on the record."""
    frames = Frames()
    draw, finish = recorded(masks, frames, kind_of)

    def around(module: Any, path: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with frames.inside(path, module):
            return call(*args, **kwargs)

    with drawing(draw, frames.programs), followed(around):
        yield masks
    finish()


@contextlib.contextmanager
def replaying(
    player: Player, followed: Followed, stock: Callable[[Any], bool], alone: Callable[[Any, Any, Any], Any]
) -> Iterator[None]:
    """Let a followed model drop by given masks.

    Args:
        player: gives them.
        followed: sends every call through a function.
        stock: whether a module drops by Flax's own arithmetic.
        alone: what a module without parameters returns, outside of its model, for an argument and keyword arguments.
    """
    frames = Frames(player)

    def around(module: Any, path: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if path in player.silent:
            return args[0] if args else kwargs["inputs"]
        with frames.inside(path, module) as frame:
            output = call(*args, **kwargs)
            if stock(module) and len(frame.drawn) == 1:
                place, mask, _ = frame.drawn[0]
                return torch_dropout(jnp.asarray(args[0] if args else kwargs["inputs"]), place, mask)
            problem = factor_problem(frames, path, args, output, lambda ones: alone(module, ones, kwargs))
            if problem:
                player.tell(problem)
        return output

    with drawing(replayed(player, frames), frames.programs), scans_replayed(player, frames), followed(around):
        yield
    player.finish()


@contextlib.contextmanager
def scans_replayed(player: Player, frames: Frames) -> Iterator[None]:
    """Let every step of a `jax.lax.scan` inside the model have masks of its own, in the order of its steps."""
    original = jax.lax.scan

    @functools.wraps(original)
    def scan(f: Any, init: Any, xs: Any = None, length: int | None = None, reverse: bool = False, **kwargs: Any) -> Any:
        plain = functools.partial(original, length=length, reverse=reverse, **kwargs)
        if frames.here is None or frames.pattern is not None:
            return plain(f, init, xs)
        if frames.scan is not None:
            with inside_scan(frames, Free()) as free:
                found = plain(f, init, xs)
            frames.scan.nested |= free.drew
            return found
        steps = int(jnp.shape(jax.tree.leaves(xs)[0])[0]) if length is None else int(length)
        first = jax.tree.map(lambda array: jax.ShapeDtypeStruct(jnp.shape(array)[1:], jnp.result_type(array)), xs)
        with inside_scan(frames, Probe()) as probe:
            varying = drawn_anew(f, probe, init, first)
        if probe.nested:
            player.tell("dropout in a scan inside a scan cannot be replayed; write the outer one as a Python loop meanwhile")
            with inside_scan(frames, Free()):
                return plain(f, init, xs)
        if not varying:
            # No mask, or one for all steps: what torch drops besides is told as missing.
            return plain(f, init, xs)
        order = reversed(range(steps)) if reverse else range(steps)
        taken = {step: [player.take(path, shape, rate) for path, shape, rate in probe.asked] for step in order}

        def body(carry: Any, given: Any) -> Any:
            with inside_scan(frames, Handing(given[1], stacks)):
                return f(carry, given[0])

        stacks = [
            stacked([taken[step][place] for step in range(steps)], probe.asked[place][1]) for place in range(len(probe.asked))
        ]
        return plain(body, init, (xs, jnp.arange(steps)))

    jax.lax.scan = scan  # type: ignore[assignment]
    try:
        yield
    finally:
        jax.lax.scan = original


@contextlib.contextmanager
def inside_scan(frames: Frames, scan: Any) -> Iterator[Any]:
    """Let masks be drawn by the body of a scan meanwhile; its modules are called once more than the model says."""
    before, counts = frames.scan, dict(frames.counts)
    frames.scan = scan
    try:
        yield scan
    finally:
        frames.scan, frames.counts = before, counts


def stacked(found: Sequence[Any], shape: tuple[int, ...]) -> tuple[Place | None, Any]:
    """The masks of one drop in every step; where there is none, which is told, all is kept."""
    place = next((one.place for one in found if one is not None), None)
    return place, jnp.stack([jnp.ones(shape, bool) if one is None else jnp.asarray(one.mask, bool) for one in found])


class Free:
    """Leaves Flax its own masks."""

    nested = False

    def __init__(self) -> None:
        self.drew = False

    def draw(self, own: Callable[[], Any], frame: Frame, shape: tuple[int, ...], rate: float | None) -> Any:
        """Flax's own mask."""
        self.drew = True
        return own()


class Probe:
    """Sees what the body of a scan draws.

    Attributes:
        asked: path, shape and rate of each of its drops.
        masks: Flax's own, traced.
        nested: whether a scan inside it drops.
    """

    def __init__(self) -> None:
        self.nested = False
        self.asked: list[tuple[str, tuple[int, ...], float | None]] = []
        self.masks: list[Any] = []

    def draw(self, own: Callable[[], Any], frame: Frame, shape: tuple[int, ...], rate: float | None) -> Any:
        """Flax's own mask."""
        self.asked.append((frame.path, shape, rate))
        self.masks.append(own())
        return self.masks[-1]


class Handing:
    """Hands out the masks of one step of a scan.

    Args:
        index: of the step, traced.
        stacks: for each drop of the body its place and its masks in all steps.
    """

    nested = False

    def __init__(self, index: Any, stacks: Sequence[tuple[Place | None, Any]]):
        self.index, self.rest = index, iter(stacks)

    def draw(self, own: Callable[[], Any], frame: Frame, shape: tuple[int, ...], rate: float | None) -> Any:
        """The mask of the next drop."""
        place, masks = next(self.rest)
        mask = masks[self.index]
        if place is not None:
            frame.drawn.append((place, mask, rate))
        return mask


def drawn_anew(f: Callable[..., Any], probe: Probe, init: Any, first: Any) -> bool:
    """Trace the body of a scan; whether its masks are others in every step: whether keys come from what changes with it."""

    def traced(carry: Any, x: Any) -> Any:
        carry, _ = f(carry, x)
        return carry, list(probe.masks)

    closed = jax.make_jaxpr(traced)(init, first)
    jaxpr, carried = closed.jaxpr, len(jax.tree.leaves(init))
    masks = [False] * carried + [True] * (len(jaxpr.outvars) - carried)
    _, used = partial_eval.dce_jaxpr(jaxpr, masks)
    still = [place < carried and jaxpr.outvars[place] is var for place, var in enumerate(jaxpr.invars)]
    return any(yes and not same for yes, same in zip(used, still, strict=True))


def rate_of(keep: Any) -> float | None:
    """The rate of a mask, None if it is not known before the run or not the same for all elements."""
    if isinstance(keep, jax.core.Tracer) or jnp.size(keep) != 1:
        return None
    return 1.0 - float(keep)


def replayed(player: Player, frames: Frames) -> Draw:
    """Draws masks from a player."""

    def draw(own: Callable[[], Any], shape: tuple[int, ...], keep: Any) -> Any:
        if frames.pattern is not None:
            return frames.pattern(shape)
        if frames.scan is not None and frames.here is not None and 0 not in shape:
            return frames.scan.draw(own, frames.here, shape, rate_of(keep))
        frame, rate = frames.here, rate_of(keep)
        found = player.take(frame.path, shape, rate) if frame is not None and 0 not in shape else None
        if found is None or frame is None:
            return own()
        mask = jnp.asarray(found.mask, bool)
        frame.drawn.append((found.place, mask, rate))
        return mask

    return draw


def recorded(
    masks: DropoutMasks, frames: Frames, kind_of: Callable[[Any], tuple[str, bool]]
) -> tuple[Draw, Callable[[], None]]:
    """Puts masks on the record, those of compiled functions too.

    Args:
        masks: the record.
        frames: where the model is.
        kind_of: the kind of mask that a module draws, and whether it scales by 1 / (1 - rate).

    Returns:
        What sees the masks, and what is to be called after the run.
    """
    # In the order in which they are drawn; a compiled function tells its masks when it runs.
    sites: list[tuple[str, int, str, float, float | None]] = []
    found: list[tuple[int, int, np.ndarray]] = []
    rounds: dict[int, int] = {}

    def keep_mask(site: int, mask: Any) -> None:
        number = rounds[site] = rounds.get(site, -1) + 1
        found.append((number, site, np.array(mask, bool)))

    def draw(own: Callable[[], Any], shape: tuple[int, ...], keep: Any) -> Any:
        mask, frame, rate = own(), frames.here, rate_of(keep)
        if frame is None:
            return mask
        kind, scales = kind_of(frame.module)
        sites.append(
            (frame.path, frame.call, kind, float("nan") if rate is None else rate, 1 / (1 - rate) if scales and rate else None)
        )
        if isinstance(mask, jax.core.Tracer):
            jax.debug.callback(functools.partial(keep_mask, len(sites) - 1), mask)
        else:
            keep_mask(len(sites) - 1, mask)
        return mask

    def finish() -> None:
        jax.effects_barrier()
        for _, site, mask in sorted(found, key=lambda one: one[:2]):
            masks.add(*sites[site], mask)

    return draw, finish


def torch_dropout(inputs: Any, place: Place, mask: Any) -> Any:
    """Drop as torch does, to the last bit: the mask is scaled and rounded, then the input multiplied by it."""
    wide = jnp.promote_types(inputs.dtype, jnp.float32).type
    scale = (wide(1) / wide(1 - place.rate)).astype(inputs.dtype)
    return inputs * (mask.astype(inputs.dtype) * scale)


def factor_problem(frames: Frames, path: str, args: Any, output: Any, call: Callable[[Any], Any]) -> str:
    """Why a module that only drops does it by another factor than torch, '' if it does not, or does more than that.

    It is tried by itself, once, on ones and with every other element kept.

    Args:
        frames: where the model is: in the call of that module.
        path: of the module.
        args: what it was given.
        output: what it returned.
        call: calls it on other arrays. What it raises only says that it cannot be tried.
    """
    frame = frames.here
    if (
        frame is None
        or path in frames.tried
        or len(frame.drawn) != 1
        or len(args) != 1
        or jnp.shape(args[0]) != jnp.shape(output)
    ):
        return ""
    place, mask, rate = frame.drawn[0]
    if place.scale is None or place.kind not in ("element", "channels"):
        return ""
    frames.tried.add(path)
    frames.pattern = every_other
    try:
        with jax.ensure_compile_time_eval(), contextlib.ExitStack() as contexts:
            only_under(TRIAL, contexts)
            found = np.asarray(call(jnp.ones(jnp.shape(args[0]), args[0].dtype)), np.float64)
            kept = np.broadcast_to(np.asarray(every_other(np.shape(mask))), found.shape)
    except Exception:
        return ""
    finally:
        frames.pattern = None
    # Another rate is told where it is asked for.
    return told_factor(path, place.scale if rate is None or rate == 1 else 1 / (1 - rate), found, kept)


def every_other(shape: tuple[int, ...]) -> jax.Array:
    return jnp.arange(int(np.prod(shape))).reshape(shape) % 2 == 0


def told_factor(path: str, scale: float, found: np.ndarray, kept: np.ndarray) -> str:
    """What a module makes of ones, in words, if it is not what torch makes of them."""
    if kept.all() or not kept.any():
        return ""
    here, there = (np.unique(found[where]) for where in (kept, ~kept))
    name = path or "the model"
    if len(here) != 1 or len(there) != 1:
        return ""
    if here[0] == 0 and there[0] != 0:
        return f"{name} drops what its mask keeps: True in jax.random.bernoulli's mask keeps in torch; swap the two"
    if there[0] != 0 or np.isclose(here[0], scale, rtol=2e-2):
        return ""
    what = "does not scale what it keeps" if here[0] == 1 else "scales what it keeps by another factor"
    return f"{name} {what}: expected (torch) times {scale:g}, actual (flax) times {here[0]:g}; divide by 1 - rate"
