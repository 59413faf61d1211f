"""Torch's drops on the record, and run with given masks."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from parity.dropout.keys import Keyed
from parity.dropout.masks import DropoutMasks
from parity.dropout.player import Player
from parity.errors import InputError, listed
from parity.evidence.calls import Call
from parity.frameworks.torch.leaves import kinds
from parity.frameworks.torch.modes import Mode
from parity.frameworks.torch.running import evaluate
from parity.weights.wrappers import PRIVATE

aten = torch.ops.aten

# Which of torch's functions draws which kind of mask. A module's forward calls one of them.
FUNCTIONS = {
    "dropout": "element",
    "dropout_": "element",
    "dropout1d": "channels",
    "dropout2d": "channels",
    "dropout3d": "channels",
    "feature_dropout": "channels",
    "feature_dropout_": "channels",
    "alpha_dropout": "alpha",
    "alpha_dropout_": "alpha",
    "feature_alpha_dropout": "alpha channels",
    "feature_alpha_dropout_": "alpha channels",
    "scaled_dot_product_attention": "attention",
    "multi_head_attention_forward": "attention",
    "lstm": "recurrent",
    "gru": "recurrent",
    "rnn_tanh": "recurrent",
    "rnn_relu": "recurrent",
}
SCALED = ("element", "channels", "attention", "recurrent")
# Arguments by which an operation that may be random says that this time it is not.
SWITCHES = {"dropout_p": 0.0, "dropout": 0.0, "train": False, "training": False}


@dataclass
class Frame:
    """A module while it is called."""

    module: nn.Module
    path: str
    call: int


class Paths:
    """The innermost module of a model that is being called, by hooks for all modules: nothing of the model is changed."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.known: dict[int, str] = {}
        self.modules: dict[str, str] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            bare = ".".join(part for part in path.split(".") if part not in PRIVATE)
            self.known.setdefault(id(module), bare)
            self.modules[bare] = self.known[id(module)]
        self.counts: dict[str, int] = {}
        self.frames: list[Frame] = []

    @contextlib.contextmanager
    def followed(self, player: Player | Keyed | None = None) -> Iterator[None]:
        """Follow the calls meanwhile; a player is told when the whole model is called."""

        def enter(module: nn.Module, _: Any) -> None:
            path = self.known.get(id(module))
            if player is not None and module is self.model and not self.frames:
                player.enter()
            if path is not None:
                number = self.counts[path] = self.counts.get(path, -1) + (not recomputing())
                self.frames.append(Frame(module, path, number))

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            if id(module) in self.known:
                self.frames.pop()
            if player is not None and module is self.model and not self.frames:
                player.leave()

        with contextlib.ExitStack() as hooks:
            hooks.callback(register_module_forward_pre_hook(enter).remove)
            hooks.callback(register_module_forward_hook(leave, always_call=True).remove)
            yield

    @property
    def convolutional(self) -> bool:
        """Whether the model has convolutions."""
        return any("torch.nn._ConvNd" in kinds(module) for module in self.model.modules())


class Functions(TorchFunctionMode):
    """Knows which of torch's functions is being called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.names.append(getattr(func, "__name__", ""))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.names.pop()

    @property
    def kind(self) -> str:
        """Of the mask that is drawn by it."""
        return next((FUNCTIONS[name] for name in reversed(self.names) if name in FUNCTIONS), "function")


# Gets the kind and the rate of a drop, and what draws its mask; returns the mask to use.
Draw = Callable[[str, float, Tensor], Tensor | None]


class Drawing(Mode):
    """Sends every Bernoulli mask that torch draws through `draw`.

    Args:
        paths: where torch is.
        functions: likewise.
        draw: gets kind, rate and the mask that torch drew, 0 and 1; returns one to use instead, or None.
        draws: whether torch's own mask is looked at. If not, it is drawn only where `draw` has none.
    """

    def __init__(self, paths: Paths, functions: Functions, draw: Draw):
        super().__init__()
        self.paths, self.functions, self.draw = paths, functions, draw
        self.problems: list[str] = []
        self.last: tuple[Tensor, Callable[[float], None]] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        last, self.last = self.last, None
        divides = func in (aten.div_.Scalar, aten.div_.Tensor) and last is not None and last[0] is args[0]
        if divides and last is not None and getattr(args[1], "ndim", 0) == 0:
            last[1](float(args[1]))
        if torch.Tag.nondeterministic_seeded not in func.tags or idle(func, args, kwargs) or not self.paths.frames:
            return func(*args, **kwargs)
        return self.drawn(func, args, kwargs)

    def drawn(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a random operation returns."""
        output = func(*args, **kwargs)
        given = named(func, args, kwargs)
        if func is aten.native_dropout.default:
            own = self.draw("element", given["p"], output[1])
            return output if own is None else (given["input"] * own.to(given["input"].dtype) * (1 / (1 - given["p"])), own)
        if func._schema.name.split("::")[1] not in ("bernoulli", "bernoulli_"):
            where = self.paths.frames[-1].path or "the model"
            self.tell(
                f"{where} draws random numbers by {func._schema.name.replace('::', '.')}, which are no dropout mask; "
                f"{ADVICE.get(func._schema.name, 'turn it off, or draw a mask by torch.bernoulli')}"
            )
            return output
        rate = self.rate_of(given.get("p", given["self"]))
        own = None if rate is None else self.draw(self.functions.kind, rate, output)
        return output if own is None else output.copy_(own)

    def rate_of(self, keep: Any) -> float | None:
        """The rate of a mask, None if it is not the same for all elements."""
        if not isinstance(keep, Tensor):
            return 1.0 - float(keep)
        values = keep.detach().double().unique() if keep.numel() else keep.new_zeros(1)
        if values.numel() == 1:
            return 1.0 - float(values)
        where = self.paths.frames[-1].path or "the model"
        self.tell(f"{where} keeps its elements with {values.numel()} different probabilities; only masks of one rate are known")
        return None

    def tell(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


ADVICE = {
    "aten::_cudnn_rnn": "cuDNN drops between its layers inside one kernel; set torch.backends.cudnn.enabled = False meanwhile",
    "aten::rrelu_with_noise": "use nn.LeakyReLU, or put the module into eval mode",
}


def named(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operation by their names; torch leaves out those that have their default value."""
    defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    return defaults | dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)


def idle(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation that may be random is not, by its arguments; or repeats in the backward pass what was drawn."""
    given = named(func, args, kwargs)
    off = [name for name, value in SWITCHES.items() if name in given and given[name] == value]
    return bool(off) or recomputing()


def recomputing() -> bool:
    """Whether this is the backward pass: activation checkpointing runs modules again there."""
    return bool(torch._C._current_graph_task_id() != -1)


def checkpointed() -> bool:
    """Whether what is running will run again in the backward pass."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch.utils.checkpoint":
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def unfused() -> Iterator[None]:
    """Let attention draw its mask where it can be seen: fused kernels on a GPU draw it inside."""
    if not torch.cuda.is_available():
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        yield


def refuse(model: nn.Module) -> None:
    """Refuse models whose drops cannot be seen.

    Raises:
        InputError: some part is compiled.
    """
    found = [path or "the model" for path, module in model.named_modules() if compiled(module)]
    if found:
        raise InputError(
            f"{', '.join(found[:4])} is compiled by torch.jit or torch.compile, and draws its masks inside; "
            "give the module it was made from"
        )


def compiled(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule"


def modules_of(model: nn.Module) -> dict[str, str]:
    """The first path of every module by all paths that it has."""
    return Paths(model).modules


@contextlib.contextmanager
def recording(model: nn.Module) -> Iterator[DropoutMasks]:
    """Put every drop of a model on the record; see `parity.record_dropout`."""
    refuse(model)
    paths, functions = Paths(model), Functions()
    masks = DropoutMasks("torch", paths.modules, paths.convolutional)

    def draw(kind: str, rate: float, mask: Tensor) -> None:
        frame, number = paths.frames[-1], len(masks.drops)
        scale = 1.0 / (1.0 - rate) if kind in SCALED and rate < 1 else None
        masks.add(frame.path, frame.call, kind, rate, scale, as_outside(frame.module, kind, mask != 0).cpu().numpy())
        if kind == "function":
            mode.last = mask, lambda divisor: masks.scaled(number, 1.0 / divisor)

    mode = Drawing(paths, functions, draw)
    with paths.followed(), unfused(), functions, mode:
        yield masks
    if mode.problems:
        raise InputError(listed("the run cannot be replayed", mode.problems))


@contextlib.contextmanager
def replaying(model: nn.Module, player: Player | Keyed) -> Iterator[None]:
    """Let a model drop by given masks; see `parity.replay_dropout`."""
    refuse(model)
    paths, functions = Paths(model), Functions()

    def draw(kind: str, rate: float, mask: Tensor) -> Tensor | None:
        frame = paths.frames[-1]
        if checkpointed():
            player.tell(
                f"{frame.path or 'the model'} drops inside torch.utils.checkpoint, which draws the mask again in the backward "
                "pass; turn activation checkpointing off meanwhile"
            )
        outside = as_outside(frame.module, kind, mask)
        found = player.take(frame.path, tuple(outside.shape), rate)
        if found is None:
            return None
        own = torch.from_numpy(np.ascontiguousarray(found.mask)).to(mask.device)
        return as_outside(frame.module, kind, own)

    mode = Drawing(paths, functions, draw)
    with paths.followed(player), unfused(), functions, mode:
        yield
    for problem in mode.problems:
        player.tell(problem)
    player.finish()


def masks_of(model: nn.Module, call: Call, seed: int) -> DropoutMasks:
    """The masks that a model draws in one call, by random numbers of this seed. To be called under `pinned`."""
    torch.manual_seed(seed)
    with recording(model) as masks:
        evaluate(model, call)
    return masks


def as_outside(module: nn.Module, kind: str, mask: Tensor) -> Tensor:
    """A mask between recurrent layers in the layout of what the module returns, or that back: torch draws it time first."""
    return mask.transpose(0, 1) if kind == "recurrent" and getattr(module, "batch_first", False) and mask.ndim == 3 else mask
