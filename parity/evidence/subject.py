"""A pair of models and one call of both, checked, with every run made once and kept."""

import copy
import inspect
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np

from parity.errors import InputError, first_line, listed
from parity.evidence.calls import Call, Captured, Evaluation
from parity.evidence.input_sets import one_call
from parity.evidence.numerics import UNIT, Noise, alike, finite_scale, jittered, largest_gap, noise_of, wide
from parity.evidence.padding import Padding
from parity.evidence.repeatability import raises_at_times, refuse_flax, refuse_torch, refuse_unrepeatable, run_again, unequal
from parity.evidence.trees import flatten, mapped
from parity.frameworks import describe, imported, load, owner
from parity.linen import Linen
from parity.weights.pairing import Pairing, pair

# Torch runs on jittered numbers beside the plain one: with a single run instead of five the
# precision rule gave 2 false alarms in 2,016 clean trials, with five none.
JITTERED_RUNS = 4
# How often a model that draws random numbers is run again: what it draws may seldom matter.
DRAWN_RUNS = 8
# By this part of the largest of them inputs are moved where a tie or a kink is to be left.
MOVED = 2.0**-8


class Subject:
    """What every level looks at. Nothing of the caller's is changed; runs work on copies.

    Args:
        torch_model: a `torch.nn.Module` in eval mode.
        flax_model: an `nnx.Module` in eval mode, or a `parity.Linen`.
        args: positional arguments for both, arrays of any framework or NumPy; or one input set.
        kwargs: keyword arguments for both.
        rename: as in `parity.transfer`.
        ignore: as in `parity.transfer`.
        seed: of probes, cotangents and jitter.
        gradients: whether runs compute gradients too.
        pins_checked: whether a call of the same shapes has shown already that neither model pins a dtype.
        dropout: whether the models may drop: both with the masks that torch draws; see `dropping.replayed`.
        native_gradients: whether Flax computes them in its own dtype too, not in float64 alone.
        padding_mask: as in `parity.compare`.

    Raises:
        InputError: a model or an argument cannot be compared as it stands; all reasons at once.
    """

    # The sides that are read from a bundle.
    recorded: frozenset[str] = frozenset()
    # Whether it was looked for that a model does otherwise when it is run again.
    tried_again = False
    # Whether only some values of what modules took and returned are known.
    sampled = False
    # The rooms of the two sides; a bundle stands for one that was recorded.
    torch: Any
    flax: Any

    def __init__(
        self,
        torch_model: Any,
        flax_model: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        rename: Mapping[str, str] | None = None,
        ignore: Iterable[str] = (),
        seed: int = 0,
        gradients: bool = True,
        native_gradients: bool = True,
        pins_checked: bool = False,
        dropout: bool = False,
        padding_mask: Any = None,
    ):
        self.torch, self.flax = load("torch"), flax_room(flax_model)
        problems = argument_problems(kwargs, seed)
        args, kwargs = (args, kwargs) if problems else one_call(args, kwargs)
        if not self.torch.is_model(torch_model):
            problems.append(f"the first model must be a torch.nn.Module, got {described(torch_model, self)}")
        if not self.flax.is_model(flax_model):
            problems.append(f"the second model must be a flax.nnx.Module or a parity.Linen, got {described(flax_model, self)}")
        if problems:
            raise InputError(listed("cannot compare", problems))
        self.torch_model, self.flax_model, self.seed, self.gradients = torch_model, flax_model, seed, gradients
        self.native_gradients, self.pins_checked = gradients and native_gradients, pins_checked
        # Why one side runs forwards but not backwards, by its name.
        self.not_differentiable: dict[str, str] = {}
        # Why a level cannot be climbed, by its name.
        self.unavailable: dict[str, str] = {}
        # What does not fit between the drops of both, one sentence each; None if they are not to drop.
        self.dropping: list[str] | None = None
        self.call = as_call(torch_model, args, kwargs)
        self.padding = Padding(plain_masks(padding_mask))
        self.flax_model = self.flax.with_call(flax_model, self.call)
        problems += self.torch.problems_before_running(torch_model, dropout)
        problems += self.flax.problems_before_running(self.flax_model, dropout)
        problems += self.dtype_problems()
        if problems:
            raise InputError(listed("cannot compare", problems))
        self.pairing: Pairing = pair(
            torch_model, self.flax_model, rename=rename, ignore=ignore, names=("torch model", "Flax model")
        )

    @cached_property
    def dtype(self) -> str:
        """The dtype in which the torch model runs: that of its parameters, or of the inputs if it has none."""
        inputs = [str(array.dtype) for _, array in self.values()]
        return self.torch.model_dtype(self.torch_model) or (inputs[0] if inputs else "float32")

    def values(self) -> list[tuple[str, np.ndarray]]:
        """The floating point arrays that are no masks, by path."""
        return [(path, array) for path, array in arrays_of(self.call) if path in self.call.castable]

    def dtype_problems(self) -> list[str]:
        problems = [
            f"{path} is {array.dtype} and the torch model computes in {self.dtype}; cast {path} to {self.dtype}"
            for path, array in self.values()
            if str(array.dtype) != self.dtype
        ]
        if self.dtype not in UNIT:
            problems.append(f"the torch model computes in {self.dtype}; only {', '.join(UNIT)} can be compared")
        if self.dtype == "float64" and not self.flax.x64_enabled():
            problems.append(
                "the models compute in float64, but jax runs without 64-bit types; "
                'call jax.config.update("jax_enable_x64", True), or compare in float32'
            )
        return problems

    def renew(self) -> None:
        """Let go of what was compiled of a Flax model whose code is another by now."""
        if "flax" in self.recorded:
            return
        try:
            self.flax.forget_changed(self.flax_model, self.call)
        except Exception:
            # What raises here raises again where it is reported.
            return

    def check_repeatable(self) -> None:
        """Refuse models that do otherwise when they are run again. Looked for where something failed, and once.

        Raises:
            InputError: one returns other numbers, or raises.
        """
        if not self.tried_again:
            self.tried_again = True
            refuse_unrepeatable(self)

    # --- runs ---------------------------------------------------------------------------------

    @cached_property
    def torch_native(self) -> Evaluation:
        """Torch as the user runs it."""
        with self.torch.pinned():
            before = self.torch.random_state()
            run = self.torch_once()
            drawn = self.torch.random_state() != before
            again = [run_again("torch", self.torch_once) for _ in range(DRAWN_RUNS if drawn else 0)]
        for other in again:
            refuse_torch(self.torch, self.torch_model, self.call, run, other)
        refuse_complex(run)
        self.padding.check(run)
        whole = self.with_gradients(run) if self.gradients else run
        # A second run tells whether the first can be had again. Where gradients are wanted that was one, but some layers
        # run other kernels then: if it differs, only one more like the first can tell.
        if whole is run or unequal(run.outputs, whole.outputs) is not None:
            with self.torch.pinned():
                other = run_again("torch", self.torch_once)
            refuse_torch(self.torch, self.torch_model, self.call, run, other)
        return self.padding.seen(whole)

    def torch_once(self) -> Evaluation:
        """One run of torch as the user runs it."""
        return self.torch.evaluate(self.torch_model, self.call)

    def with_gradients(self, run: Evaluation) -> Evaluation:
        """The same run with gradients, or, for a model that cannot be differentiated, without.

        Raises:
            InputError: it can, but not each time.
        """
        cotangents = self.cotangents_for(run)
        try:
            with self.torch.pinned():
                return self.torch.evaluate(self.torch_model, self.call, cotangents=cotangents)
        except Exception as error:
            refused = error
        try:
            with self.torch.pinned():
                self.torch.evaluate(self.torch_model, self.call, cotangents=cotangents)
        except Exception:
            self.give_up_gradients("torch", refused)
            return run
        raise raises_at_times("torch", refused)

    def give_up_gradients(self, side: str, error: Exception) -> None:
        """Go on without gradients: a model that runs forwards only can still be compared forwards."""
        self.not_differentiable[side] = f"{type(error).__name__}: {first_line(error)}"
        self.gradients = self.native_gradients = False
        for kept in ("cotangents", "torch_wide", "flax_wide", "torch_whole", "flax_whole"):
            self.__dict__.pop(kept, None)

    def cotangents_for(self, run: Evaluation) -> dict[str, np.ndarray]:
        """One fixed random cotangent for each floating point output, small whole eighths so that every dtype holds it."""
        found = {}
        for path, array in run.outputs.items():
            if isinstance(array, np.ndarray) and "float" in str(array.dtype):
                rng = np.random.default_rng([self.seed, 3, zlib.crc32(path.encode())])
                found[path] = (rng.integers(1, 16, array.shape) * rng.choice((-1, 1), array.shape) / 8).astype(np.float32)
        # No gradient flows from padding.
        return self.padding.blank(found)

    @cached_property
    def cotangents(self) -> dict[str, np.ndarray] | None:
        return self.cotangents_for(self.torch_native) if self.gradients else None

    @cached_property
    def torch_wide(self) -> Evaluation:
        """Torch in float64 on the same numbers: the oracle."""
        return self.padding.seen(self.torch_whole)

    @cached_property
    def flax_wide(self) -> Evaluation:
        """Flax in float64 on the same numbers."""
        return self.padding.seen(self.flax_whole)

    @cached_property
    def torch_whole(self) -> Evaluation:
        """`torch_wide` with what padding holds."""
        with self.torch.pinned():
            return self.torch.evaluate(self.torch_model, self.call, dtype="float64", cotangents=self.cotangents)

    @cached_property
    def flax_whole(self) -> Evaluation:
        """`flax_wide` with what padding holds."""
        return self.flax.evaluate(self.flax_model, self.call, dtype="float64", cotangents=self.cotangents, quick=True)

    @cached_property
    def flax_native(self) -> Evaluation:
        """Flax as the user runs it, compiled."""
        self.refuse_drawing()
        try:
            return self.padding.seen(self.flax.evaluate(self.flax_model, self.call, cotangents=self.native_cotangents))
        except InputError:
            raise
        except Exception as error:
            if self.native_cotangents is None:
                raise
            forwards = self.flax.evaluate(self.flax_model, self.call)
            self.give_up_gradients("flax", error)
            return self.padding.seen(forwards)

    def refuse_drawing(self) -> None:
        """Refuse a Flax model whose outputs depend on its random keys.

        Raises:
            InputError: they do.
        """
        if not self.flax.draws(self.flax_model):
            return
        try:
            refuse_flax(self.flax, self.flax_model, self.call, reseed=True)
        except InputError:
            raise
        except Exception:
            # What raises here raises again where it is reported.
            return

    @property
    def native_cotangents(self) -> dict[str, np.ndarray] | None:
        """What Flax is run with in its own dtype, so that every such run is the same compiled program."""
        return self.cotangents if self.native_gradients else None

    @cached_property
    def flax_eager(self) -> Evaluation:
        """Flax as the user runs it, operation by operation; outputs only."""
        return self.padding.seen(self.flax.evaluate(self.flax_model, self.call, compiled=False))

    @cached_property
    def plain(self) -> list[Evaluation]:
        """Torch as the user runs it."""
        return [self.torch_native]

    @cached_property
    def ensemble(self) -> list[Evaluation]:
        """Torch as the user runs it, on the plain numbers and on jittered ones."""
        return [self.torch_native, *(self.torch_jittered(number, None) for number in range(JITTERED_RUNS))]

    @cached_property
    def shaken(self) -> list[Evaluation]:
        """Torch as the user runs it, with every intermediate result moved by at most half an ulp."""
        return [self.torch_jittered(number, None, shake=True) for number in range(JITTERED_RUNS)]

    @cached_property
    def elementary(self) -> list[Evaluation]:
        """Torch in float64, with the result of every elementary operation rounded as in its dtype."""
        return [self.torch_elementary(number) for number in range(JITTERED_RUNS)]

    @cached_property
    def elementary_more(self) -> list[Evaluation]:
        """More such runs: where noise is seldom large, few runs do not show how large."""
        return [self.torch_elementary(number) for number in range(JITTERED_RUNS, 4 * JITTERED_RUNS)]

    def torch_elementary(self, number: int) -> Evaluation:
        """One of them."""
        with self.torch.pinned():
            return self.torch.evaluate(
                *(self.torch_model, self.call),
                dtype="float64",
                cotangents=self.cotangents,
                watch=lambda names: self.torch.Elementary(UNIT, self.dtype, self.seed * 101 + number),
            )

    @cached_property
    def shaken_wide(self) -> list[Evaluation]:
        """The same in float64: how well float64 knows the result."""
        return [self.torch_jittered(number, "float64", shake=True) for number in range(JITTERED_RUNS)]

    # --- how far torch's own runs are apart ----------------------------------------------------

    def noise(self, stage: str, kind: str, path: str) -> Noise:
        """How far torch's runs of one stage are from the oracle in one array.

        The stages are `plain`, `ensemble`, `shaken`, `elementary` and `elementary_more`, in the order in which they are asked.
        Outputs are looked at in the parts that `alike` tells apart outside of padding, gradients whole.
        """
        oracle = wide(getattr(self.torch_wide, kind)[path])
        [seen] = self.padding.parts(path, oracle.shape, [...]) if kind == "outputs" else [...]
        runs = [getattr(run, kind)[path][seen] for run in getattr(self, stage)]
        return noise_of(runs, oracle[seen], alike(oracle[seen]) if kind == "outputs" else [...])

    def wide_noise(self, kind: str, path: str) -> list[float]:
        """How far torch's shaken float64 runs are from the oracle in one array, part by part."""
        oracle = wide(getattr(self.torch_wide, kind)[path])
        parts = self.padding.parts(path, oracle.shape, alike(oracle)) if kind == "outputs" else [...]
        runs = [getattr(run, kind)[path] for run in self.shaken_wide]
        return [max(largest_gap(run[part], oracle[part]) for run in runs) for part in parts]

    def unsettled(self, side: str, path: str) -> np.ndarray:
        """Where whole numbers that torch returns become others when roundings do; `side` is `wide` or `native`."""
        runs = self.shaken_wide if side == "wide" else [*self.ensemble, *self.shaken]
        plain = getattr(self, f"torch_{side}").outputs[path]
        return np.logical_or.reduce([run.outputs[path] != plain for run in runs])

    def torch_jittered(self, number: int, dtype: str | None, *, shake: bool = False) -> Evaluation:
        """Torch on parameters and inputs that are moved by at most half an ulp of the dtype; results too if asked."""
        call, moved = self.moved(number, dtype, shake=shake)
        with self.torch.pinned():
            run = self.torch.evaluate(self.torch_model, call, dtype=dtype, cotangents=self.cotangents, **moved)
        return self.padding.seen(run)

    def shaken_modules(self, keep: Callable[[np.ndarray], Any]) -> list[list[Captured]]:
        """What torch's modules return in runs like those of `shaken_wide`; `keep` puts each array aside."""
        found = []
        for number in range(JITTERED_RUNS):
            call, moved = self.moved(number, "float64", shake=True)
            with self.torch.pinned():
                found.append(self.torch.capture(self.torch_model, call, dtype="float64", keep=keep, **moved)[1])
        return found

    def moved(self, number: int, dtype: str | None, *, shake: bool) -> tuple[Call, dict[str, Any]]:
        """The call and parameters of a jittered run, moved by at most half an ulp, and what shakes its results if asked."""
        rng = np.random.default_rng([self.seed, 4, number])

        def move(array: np.ndarray) -> np.ndarray:
            return jittered(array if dtype is None else array.astype(dtype), rng)

        made: dict[object, np.ndarray] = {}
        weights = {}
        for leaf in self.torch.leaves(self.torch_model):
            if leaf.dtype in UNIT:
                if leaf.identity not in made:
                    made[leaf.identity] = move(leaf.read())
                weights[leaf.path] = made[leaf.identity]
        call = changed(self.call, lambda _, array: move(array))
        watch = (lambda names: self.torch.Shaken(UNIT, self.seed * 101 + number)) if shake else None
        return call, {"weights": weights, "watch": watch}

    @property
    def kinks(self) -> int:
        """How many values lie so near a kink or a tie that rounding in the native dtype may change a gradient."""
        return int(self.watched_kinks.near)

    @property
    def ties(self) -> int:
        """How many values tie for a maximum exactly: there frameworks choose other gradients."""
        return int(self.watched_kinks.ties)

    @property
    def on_kinks(self) -> int:
        """How many values lie on a kink exactly."""
        return int(self.watched_kinks.exact)

    @cached_property
    def off_ties(self) -> "Subject":
        """The same pair on inputs that are moved a little, each by another amount, so that nothing ties."""
        rng = np.random.default_rng([self.seed, 6])

        def move(_: str, array: np.ndarray) -> np.ndarray:
            step = rng.uniform(-1, 1, array.shape) * MOVED * (finite_scale(array) or 1.0)
            return np.asarray((wide(array) + step).astype(array.dtype))

        other = copy.copy(self)
        for name, kept in vars(Subject).items():
            if isinstance(kept, cached_property) and name not in ("dtype", "cotangents"):
                other.__dict__.pop(name, None)
        other.call = changed(self.call, move)
        return other

    @cached_property
    def watched_kinks(self) -> Any:
        watcher: list[Any] = []

        def watch(names: dict[int, str]) -> Any:
            watcher.append(self.torch.Kinks(UNIT[self.dtype]))
            return watcher[0]

        with self.torch.pinned():
            self.torch.evaluate(self.torch_model, self.call, dtype="float64", watch=watch)
        return watcher[0]

    def pinned_dtype(self, side: str) -> str | None:
        """An output that a model does not return in float64 although all it is given is; None if there is none."""
        if self.pins_checked:
            return None
        room, model = (self.torch, self.torch_model) if side == "torch" else (self.flax, self.flax_model)
        try:
            found = room.output_dtypes(model, self.call, "float64")
        except Exception:
            # A model that cannot be run on shapes alone: the run itself has to tell.
            found = {path: str(a.dtype) for path, a in getattr(self, f"{side}_wide").outputs.items() if hasattr(a, "dtype")}
        for path, dtype in found.items():
            if "float" in dtype and dtype != "float64":
                return f"output {path or 'of the model'} is {dtype} in a float64 run"
        return None


def refuse_complex(run: Evaluation) -> None:
    """Refuse what no level measures: it would pass unseen."""
    found = [path for path, array in run.outputs.items() if isinstance(array, np.ndarray) and array.dtype.kind == "c"]
    if found:
        raise InputError(
            f"the torch model returns complex numbers at output {found[0] or 'of the model'}; "
            "return their real and imaginary parts instead, as torch.view_as_real does"
        )


def argument_problems(kwargs: Any, seed: Any) -> list[str]:
    found = []
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        found.append(f"kwargs must map argument names to values, got {describe(kwargs)}")
    if not isinstance(seed, int) or seed < 0:
        found.append(f"seed must be a whole number, at least 0, got {seed!r}")
    return found


def flax_room(flax_model: Any) -> ModuleType:
    """The room that owns a Flax model; that of NNX for what no room owns."""
    found = owner(flax_model)
    return found if found is not None and found.NAME == "flax" else load("nnx")


def described(value: Any, subject: Subject) -> str:
    room: ModuleType | None = owner(value)
    if room is not None and not room.is_model(value):
        return f"{describe(value)}, which holds arrays but computes nothing"
    if room is not None:
        return f"{describe(value)}; the torch model comes first, the Flax model second"
    return describe(value)


def arrays_of(call: Call) -> list[tuple[str, np.ndarray]]:
    def is_array(value: Any) -> bool:
        return isinstance(value, np.ndarray)

    leaves = [*flatten(call.args, is_array, "args"), *flatten(dict(call.kwargs), is_array, "kwargs")]
    return [(path, leaf) for path, leaf in leaves if is_array(leaf)]


def changed(call: Call, change: Callable[[str, np.ndarray], np.ndarray]) -> Call:
    """The call with its values changed; masks, indices and flags stay."""

    def apply(path: str, value: Any) -> Any:
        return change(path, value) if path in call.castable else value

    return replace(call, args=mapped(apply, call.args, "args"), kwargs=mapped(apply, dict(call.kwargs), "kwargs"))


def as_call(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """Arguments of any framework as NumPy, told apart into values and masks.

    Args:
        model: whose arguments they are; their names tell which are masks.
        args: positional arguments.
        kwargs: keyword arguments.

    Raises:
        InputError: an array holds no values, or other things than numbers.
    """

    def plain(path: str, value: Any) -> Any:
        for room in imported():
            if room.is_array(value):
                try:
                    # A copy: a model that writes into its input must not change the caller's.
                    return np.array(room.to_numpy(value))
                except InputError as error:
                    raise InputError(f"{path}: {first_line(error)}") from None
                except Exception as error:
                    raise InputError(f"{path} is no array of numbers: {first_line(error)}") from None
        return np.array(value) if isinstance(value, np.ndarray) else value

    new_args, new_kwargs = mapped(plain, tuple(args), "args"), mapped(plain, dict(kwargs), "kwargs")
    masks = tuple(mask_paths(model, args, kwargs))
    call = Call(new_args, new_kwargs, masks=masks)
    strange = [problem for path, array in arrays_of(call) if (problem := strangeness(path, array))]
    if strange:
        raise InputError(listed("cannot compare", strange))
    floats = frozenset(path for path, array in arrays_of(call) if "float" in str(array.dtype))
    paired = frozenset(path for path, array in arrays_of(call) if array.dtype.kind == "c")
    values = frozenset(path for path in floats if not path.startswith(masks))
    return replace(call, castable=values, added=(floats - values) | paired)


def strangeness(path: str, array: np.ndarray) -> str:
    """Why neither framework takes an array, '' if nothing speaks against it."""
    # Small floats such as bfloat16 are of kind V to NumPy too.
    if array.dtype.kind in "OSUTMm" or array.dtype.type is np.void:
        held = "records" if array.dtype.names else array.dtype.name
        return f"{path} holds {held}, which are no numbers; give an array of numbers"
    if not array.dtype.isnative:
        native = array.dtype.newbyteorder("=").name
        return f"{path} has the byte order of another kind of machine; give it as .astype({native!r})"
    return ""


def plain_masks(given: Any) -> Any:
    """A padding mask of any framework, or several by path, as NumPy."""
    if isinstance(given, Mapping):
        return {path: plain_masks(mask) for path, mask in given.items()}
    return next((room.to_numpy(given) for room in imported() if room.is_array(given)), given)


def called(model: Any) -> Any:
    """The function that a model is."""
    if isinstance(model, Linen):
        named = model.method or "__call__"
        return getattr(model.module, named if isinstance(named, str) else named.__name__)
    return model.forward if hasattr(model, "forward") else model.__call__


def mask_paths(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Paths of the arguments that a model calls a mask: they are switches, not values."""
    try:
        names = list(inspect.signature(called(model)).parameters)
    except (AttributeError, TypeError, ValueError):
        names = []
    found = [f"args[{i}]" for i, name in enumerate(names[: len(args)]) if "mask" in name.lower()]
    return found + [f"kwargs[{name!r}]" for name in kwargs if "mask" in name.lower()]
