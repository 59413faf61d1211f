"""Every module call of a torch model on the record, and one module run again by itself under changes."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from parity.evidence.calls import Alone, Call, ModuleCall, Operation
from parity.evidence.faults import SourceLine
from parity.evidence.shelf import copied
from parity.evidence.trees import flatten, mapped
from parity.frameworks.settings import Held
from parity.frameworks.source_lines import caller
from parity.frameworks.torch.edits import Listed
from parity.frameworks.torch.leaves import from_numpy, is_array
from parity.frameworks.torch.running import Copies, evaluate, plain

# What a module below answers, by its path: one tree of NumPy arrays for each of its calls.
Replies = Mapping[str, list[Any]]


def observe(
    model: nn.Module, call: Call, *, dtype: str | None = None, keep: Callable[[np.ndarray], Any] = copied
) -> list[ModuleCall]:
    """Run a model and record every call of every submodule, in the order in which they finish.

    Args:
        model: left as it is.
        call: the arguments, in NumPy.
        dtype: as of `evaluate`.
        keep: gets every array as its module is called or returns; what it returns stands on the record.
    """
    copies = Copies(keep)

    def recorded(tree: Any) -> Any:
        return mapped(lambda _, leaf: copies.of(leaf), tree)

    records: list[ModuleCall] = []
    counts: dict[str, int] = {}
    open_calls: list[tuple[str, int]] = []
    started: list[tuple[Any, Any, SourceLine | None]] = []
    handles = []

    def enter(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            counts[path] = counts.get(path, 0) + 1
            open_calls.append((path, counts[path] - 1))
            # Before it runs: a module may write into what it is given.
            started.append((recorded(args), recorded(kwargs), caller()))

        return hook

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        path, number = open_calls.pop()
        given, named, line = started.pop()
        inside = open_calls[-1] if open_calls else None
        records.append(ModuleCall(path, number, given, named, recorded(output), inside, line))

    try:
        for path, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(enter(path), with_kwargs=True))
            handles.append(module.register_forward_hook(leave, with_kwargs=True))
        with MODULE_BY_MODULE():
            evaluate(model, call, dtype=dtype)
    finally:
        for handle in handles:
            handle.remove()
    return records


def unfused_layers() -> Callable[[], object]:
    """Let nn.MultiheadAttention and nn.TransformerEncoder call their parts; returns what restores their one fused operation."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    return lambda: torch.backends.mha.set_fastpath_enabled(before)


def unfused_attention() -> Callable[[], object]:
    """Let attention run operation by operation, so that each can be edited; returns what restores it."""
    settings = contextlib.ExitStack()
    settings.enter_context(sdpa_kernel(SDPBackend.MATH))
    return settings.close


MODULE_BY_MODULE = Held(unfused_layers)
STEP_BY_STEP = Held(unfused_attention)


def alone(
    model: nn.Module,
    path: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    replies: Replies | None = None,
    *,
    dtype: str | None = "float64",
    weights: Mapping[str, np.ndarray] | None = None,
    watch: TorchDispatchMode | None = None,
    training: bool = False,
) -> Alone:
    """Run one submodule by itself; modules below that have replies answer with those.

    Args:
        model: left as it is.
        path: of the submodule.
        args: its positional arguments, arrays in NumPy in the dtype of the run.
        kwargs: its keyword arguments likewise.
        replies: by the path, in the model, of a module below.
        dtype: floating point parameters are cast to it; None keeps the model's.
        weights: arrays in place of parameters and buffers, by their path in the model.
        watch: a dispatch mode that sees, and may change, every operation; one that counts how often it is
            `paused` is told when a module runs whose answer is known.
        training: whether the submodule runs in train mode.
    """
    module = model.get_submodule(path)
    given: dict[tuple[str, int, str], Any] = {}
    counts = dict.fromkeys(replies or {}, 0)
    prefix = f"{path}." if path else ""
    own = {name.removeprefix(prefix): array for name, array in (weights or {}).items() if name.startswith(prefix)}
    handles = []

    def answer(child: str, answers: list[Any]) -> tuple[Callable[..., None], Callable[..., Any]]:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            pause(watch, 1)
            for name, leaf in flatten((args, kwargs), is_array):
                given[child, counts[child], argument(name)] = plain(leaf)

        def reply(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            number, counts[child] = counts[child], counts[child] + 1
            if number < len(answers):
                known = answers[number]
                output = mapped(lambda _, leaf: from_numpy(np.array(leaf)) if isinstance(leaf, np.ndarray) else leaf, known)
            pause(watch, -1)
            return output

        return note, reply

    modes = {m: m.training for m in module.modules()} if training else {}
    silent = contextlib.ExitStack()
    try:
        for child, answers in (replies or {}).items():
            before, after = answer(child, answers)
            silent.enter_context(silenced(model.get_submodule(child), lambda c=child, a=answers: counts[c] < len(a)))
            handles.append(model.get_submodule(child).register_forward_pre_hook(before, with_kwargs=True))
            handles.append(model.get_submodule(child).register_forward_hook(after, with_kwargs=True))
        if training:
            module.train()
        with MODULE_BY_MODULE(), STEP_BY_STEP():
            run = evaluate(
                module, Call(args, kwargs), dtype=dtype, weights=own, watch=(lambda _: watch) if watch is not None else None
            )
    finally:
        silent.close()
        for handle in handles:
            handle.remove()
        for one, mode in modes.items():
            one.training = mode
    return Alone(run.outputs, given, counts)


@contextlib.contextmanager
def silenced(module: nn.Module, answered: Callable[[], bool]) -> Iterator[None]:
    """Let a module whose answer is known compute nothing: a hypothesis on a whole model costs its own code alone."""
    if isinstance(module, torch.jit.ScriptModule):
        yield
        return
    own, original = vars(module).get("forward"), module.forward
    vars(module)["forward"] = lambda *args, **kwargs: None if answered() else original(*args, **kwargs)
    try:
        yield
    finally:
        if own is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = own


def pause(watch: Any, step: int) -> None:
    if hasattr(watch, "paused"):
        watch.paused += step


def operations(
    model: nn.Module,
    path: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    replies: Replies | None = None,
    *,
    dtype: str | None = "float64",
) -> list[Operation]:
    """The operations of a submodule's own code: what modules below do that have replies is left out."""
    listed = Listed()
    alone(model, path, args, kwargs, replies, dtype=dtype, watch=listed)
    return listed.operations


def argument(name: str) -> str:
    """The path of a leaf of (args, kwargs) in the words of a call: `args[0]`, `kwargs['mask']`."""
    return f"args{name[3:]}" if name.startswith("[0]") else f"kwargs{name[3:]}"
