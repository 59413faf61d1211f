"""Running PyTorch models on copies of their parameters."""

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from parity.errors import first_line
from parity.evidence.calls import Abstract, Call, Captured, Evaluation
from parity.evidence.shelf import copied
from parity.evidence.trees import containers, flatten, mapped
from parity.frameworks.settings import Held
from parity.frameworks.torch.keeping import as_it_was, written
from parity.frameworks.torch.leaves import dtype_name, from_numpy, is_array, kinds, to_numpy, torch_dtype
from parity.frameworks.torch.modes import Together, Widened
from parity.weights.paths import split

# What else may be done about train mode.
DROPPING = ", or compare it as it drops with parity.compare(..., dropout='replay')"


def problems_before_running(model: nn.Module, dropout: bool = False) -> list[str]:
    """Why a model cannot be compared as it stands: in train mode, on several devices, without values.

    Args:
        model: left as it is.
        dropout: whether it may drop.
    """
    found = []
    depends = updates if dropout else depends_on_mode
    training = [path or "the model" for path, module in model.named_modules() if module.training and depends(module)]
    if training:
        found.append(
            f"the torch model is in train mode, and that changes what {', '.join(training[:4])}"
            f"{' and others' if len(training) > 4 else ''} computes; call .eval() on it first{DROPPING if not dropout else ''}"
        )
    devices = {str(t.device) for t in model.state_dict(keep_vars=True).values() if isinstance(t, Tensor)}
    if "meta" in devices:
        found.append("the torch model has parameters on the meta device, which hold no values; load or initialise it first")
    elif len(devices) > 1:
        found.append(f"the torch model is spread over {', '.join(sorted(devices))}; move it to one device with .to(...)")
    scripted = [path or "the model" for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        found.append(f"{scripted[0]} is compiled by torch.jit, which cannot run on copies; give the module it was made from")
    if isinstance(model, nn.DataParallel):
        found.append("the torch model is wrapped in torch.nn.DataParallel, which cannot run on copies; give its .module")
    return found


def updates(module: nn.Module) -> bool:
    """Whether a module computes with the statistics of the batch in train mode."""
    names = kinds(module)
    return "torch.nn._BatchNorm" in names or "torch.nn._NormBase" in names


def depends_on_mode(module: nn.Module) -> bool:
    names = kinds(module)
    if any("dropout" in name.lower() for name in names if name.startswith("torch.nn.")):
        return getattr(module, "p", 1) > 0
    if updates(module):
        return True
    if getattr(module, "dropout", 0) and isinstance(module.dropout, float):
        return True
    forward = type(module).forward
    # Of what torch.export made nothing tells where it was written.
    if (forward.__module__ or "").startswith("torch."):
        return False
    code = getattr(getattr(forward, "__wrapped__", forward), "__code__", None)
    return code is not None and "training" in code.co_names


def device_of(model: nn.Module) -> torch.device:
    for tensor in model.state_dict(keep_vars=True).values():
        if isinstance(tensor, Tensor):
            return tensor.device
    return torch.device("cpu")


def model_dtype(model: nn.Module) -> str | None:
    """The dtype of the floating point parameters, None if there are none."""
    floats = [dtype_name(p) for p in model.parameters() if p.is_floating_point()]
    return floats[0] if floats else None


def random_state() -> bytes:
    """Where torch's generator of random numbers stands: the same again if nothing was drawn between."""
    return bytes(torch.get_rng_state().numpy())


@contextlib.contextmanager
def pinned(threads: int | None = None) -> Iterator[dict[str, str]]:
    """Full float32 products, deterministic algorithms, no autocast; all restored afterwards.

    Args:
        threads: of torch's own inside; None leaves them. Many small models run several times
            faster with one, because OpenMP's threads and XLA's wait for each other.

    Yields:
        What was pinned, for the report.
    """
    before = torch.get_num_threads()
    if threads:
        set_threads(threads)
    try:
        with (
            EXACT(),
            torch.inference_mode(False),
            # A model that draws numbers must not move the caller's generators.
            torch.random.fork_rng(devices=range(torch.cuda.device_count())),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False) if torch.cuda.is_available() else contextlib.nullcontext(),
        ):
            yield {"torch float32 products": "highest", "torch cuDNN TF32": "off", "torch algorithms": "deterministic"}
    finally:
        if threads:
            set_threads(before)


def exact_products() -> Callable[[], object]:
    """Set for the process what makes torch exact and deterministic; returns what restores it."""
    settings = contextlib.ExitStack()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings.callback(set_deterministic, deterministic, warn_only=warn_only)
    settings.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    settings.enter_context(torch.backends.cudnn.flags(deterministic=True, benchmark=False, allow_tf32=False))
    torch.set_float32_matmul_precision("highest")
    set_deterministic(True, warn_only=True)
    return settings.close


EXACT = Held(exact_products)


@contextlib.contextmanager
def flushing() -> Iterator[bool]:
    """Turn denormal numbers to zero, as XLA does on the CPU; yields whether this machine can."""
    threads = torch.get_num_threads()
    # The setting is the calling thread's own.
    set_threads(1)
    try:
        yield torch.set_flush_denormal(True)
    finally:
        torch.set_flush_denormal(False)
        set_threads(threads)


def set_threads(count: int) -> None:
    if count != torch.get_num_threads():
        torch.set_num_threads(count)


def set_deterministic(mode: bool, *, warn_only: bool) -> None:
    """`torch.use_deterministic_algorithms`, less its import of torch's compiler: three seconds, and nothing is compiled."""
    if hasattr(torch._C, "_set_deterministic_algorithms"):
        torch._C._set_deterministic_algorithms(mode, warn_only=warn_only)
    else:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)


# Layers that leave their fused path, and so return other values at padding, where anything watches the functions that are
# called (torch 2.13). What torch.compile made is left to itself too.
FUSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


def evaluate(
    model: nn.Module,
    call: Call,
    *,
    dtype: str | None = None,
    weights: Mapping[str, np.ndarray] | None = None,
    cotangents: Mapping[str, np.ndarray] | None = None,
    watch: Callable[[dict[int, str]], TorchDispatchMode] | None = None,
    meta: bool = False,
) -> Evaluation:
    """Run a model on copies of its parameters.

    Args:
        model: left as it is.
        call: the arguments, in NumPy.
        dtype: floating point parameters and arguments are cast to it; None keeps the model's.
        weights: arrays to use in place of parameters and buffers, by path.
        cotangents: by output path; if given, gradients are computed.
        watch: makes a dispatch mode, from the names of parameters and inputs by `id`, that sees
            every operation, forward and backward.
        meta: compute shapes and dtypes only; the outputs are `Abstract`.

    Returns:
        Outputs by path, and gradients by `input ...` and parameter path.
    """
    device = torch.device("meta") if meta else device_of(model)
    wants_gradients = cotangents is not None
    held = dict(model.state_dict(keep_vars=True))
    # Non-persistent buffers are not in the state_dict, but the forward pass needs them in the same dtype.
    own_buffers = dict(model.named_buffers(remove_duplicate=False))
    held |= own_buffers
    originals: dict[int, Tensor] = {}
    replaced: dict[str, Tensor] = {}
    for path, tensor in held.items():
        if not isinstance(tensor, Tensor):
            continue
        other = None if weights is None else weights.get(path)
        key = id(tensor) if other is None else id(other)
        if key not in originals:
            originals[key] = fresh(tensor if other is None else from_numpy(other), dtype, device)
            if wants_gradients and originals[key].is_floating_point() and tensor.requires_grad:
                originals[key].requires_grad_()
        replaced[path] = originals[key]
    inputs: dict[str, Tensor] = {}
    arrays: dict[str, Tensor] = {}
    given: dict[str, Tensor] = {}

    def as_tensor(path: str, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        tensor = fresh(from_numpy(value), dtype if call.cast(path) else None, device)
        arrays[path] = tensor
        if wants_gradients and tensor.is_floating_point() and path in call.castable:
            inputs[path] = tensor.requires_grad_()
            # A model may write into what it is given, but not into a leaf of autograd.
            with torch.enable_grad():
                tensor = tensor.clone()
        given[path] = tensor
        return tensor

    args = mapped(as_tensor, call.args, "args")
    kwargs = mapped(as_tensor, dict(call.kwargs), "kwargs")
    parts = containers(args, kwargs)
    names = {id(tensor): f"parameter {path}" for path, tensor in replaced.items()}
    names |= {id(tensor): f"input {path}" for path, tensor in arrays.items()}
    watched = watch(names) if watch else contextlib.nullcontext()
    widened = Widened(model_dtype(model)) if dtype == "float64" else contextlib.nullcontext()
    # Of whole numbers a model may make floats of its own dtype.
    whole = any(not tensor.is_floating_point() and tensor.dtype != torch.bool for tensor in arrays.values())
    free = dtype == "float64" and whole and not is_compiled(model) and not any(isinstance(m, FUSED) for m in model.modules())
    together = Together(model_dtype(model)) if free else contextlib.nullcontext()
    grad = torch.enable_grad() if wants_gradients else torch.no_grad()
    with grad, widened, together, watched, as_it_was(model) as attributes, deployed_epsilon(model, dtype):
        state = once(model, replaced)
        fresh_versions = {path: tensor._version for path, tensor in state.items()}
        output = torch.func.functional_call(model, state, args, kwargs, tie_weights=False)
        outputs = dict(flatten(output, is_array))
        gradients = backward(outputs, cotangents, inputs, replaced) if cotangents is not None else {}
    if meta:
        return Evaluation({p: Abstract(tuple(v.shape), dtype_name(v)) if is_array(v) else v for p, v in outputs.items()})
    wrote = (*written(given), *(path for path, before in parts.items() if containers(args, kwargs).get(path) != before))
    # Written into, or another array under the name.
    buffers = {
        path: plain(tensor)
        for path, tensor in state.items()
        if path in own_buffers and (tensor is not replaced[path] or tensor._version != fresh_versions[path])
    }
    return Evaluation({path: plain(value) for path, value in outputs.items()}, gradients, wrote, tuple(attributes), buffers)


@contextlib.contextmanager
def deployed_epsilon(model: nn.Module, dtype: str | None) -> Iterator[None]:
    """Let a norm whose epsilon is that of the machine keep, in a run in another dtype, that of the dtype it is deployed in."""
    norms = [m for m in model.modules() if isinstance(m, nn.RMSNorm) and m.eps is None] if dtype else []
    # Half precision is normalised in float32.
    deployed = torch.float64 if model_dtype(model) == "float64" else torch.float32
    try:
        for norm in norms:
            norm.eps = torch.finfo(deployed).eps
        yield
    finally:
        for norm in norms:
            norm.eps = None


def once(model: nn.Module, replaced: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The replacements, each array of each module under one name.

    `functional_call` does not put back what it replaced twice, under two names of one module.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[tuple[int, str], str] = {}
    for path in replaced:
        owner, name = split(path)
        found.setdefault((id(modules[owner]), name), path)
    return {path: replaced[path] for path in found.values()}


def fresh(tensor: Tensor, dtype: str | None, device: torch.device) -> Tensor:
    """A copy that no caller holds, floating point values in the asked dtype."""
    wanted = torch_dtype(dtype) if dtype and tensor.is_floating_point() else tensor.dtype
    if dtype == "float64" and tensor.is_complex():
        wanted = torch.complex128
    return tensor.detach().to(device=device, dtype=wanted, copy=True)


def plain(value: Any) -> Any:
    # The tensor may be a view of a copy that this function made: copy out of it.
    return np.array(to_numpy(value)) if isinstance(value, Tensor) else value


def backward(
    outputs: Mapping[str, Any], cotangents: Mapping[str, np.ndarray], inputs: dict[str, Tensor], state: dict[str, Tensor]
) -> dict[str, np.ndarray]:
    """Gradients of sum(output * cotangent); zero where torch says that nothing depends on a leaf."""
    leaves = {f"input {path}": tensor for path, tensor in inputs.items()}
    leaves |= {path: tensor for path, tensor in state.items() if tensor.requires_grad}
    heads = [(t, cotangents[p]) for p, t in outputs.items() if isinstance(t, Tensor) and t.requires_grad and p in cotangents]
    if not heads or not leaves:
        return {path: np.zeros(tuple(t.shape), np.float64) for path, t in leaves.items()}
    found = torch.autograd.grad(
        [tensor for tensor, _ in heads],
        list(leaves.values()),
        [from_numpy(np.array(cotangent)).to(tensor.device, tensor.dtype) for tensor, cotangent in heads],
        allow_unused=True,
        materialize_grads=True,
    )
    return {path: np.array(to_numpy(gradient)) for path, gradient in zip(leaves, found, strict=True)}


class Copies:
    """Copies of tensors in NumPy; a tensor that is seen again is copied again only if it was written into.

    Args:
        keep: gets each tensor's values, in its memory where they can be read there: what it keeps of them it copies. What
            it returns stands for the tensor.
    """

    def __init__(self, keep: Callable[[np.ndarray], Any]):
        self.keep = keep
        self.known: dict[int, tuple[weakref.ref[Tensor], int, Any]] = {}

    def of(self, value: Any) -> Any:
        """What stands for a tensor; anything else is itself."""
        if not isinstance(value, Tensor):
            return value
        if value.is_inference():
            # Nobody counts what is written into those.
            return self.keep(to_numpy(value))
        there, version, kept = self.known.get(id(value), (None, 0, None))
        if there is None or there() is not value or version != value._version:
            kept = self.keep(to_numpy(value))
            self.known[id(value)] = weakref.ref(value), value._version, kept
        return kept


def capture(
    model: nn.Module,
    call: Call,
    *,
    dtype: str | None = None,
    weights: Mapping[str, np.ndarray] | None = None,
    watch: Callable[[dict[int, str]], TorchDispatchMode] | None = None,
    keep: Callable[[np.ndarray], Any] = copied,
) -> tuple[Evaluation, list[Captured]]:
    """Run a model and record every submodule's output, in the order in which they finish.

    Args:
        model: left as it is.
        call: the arguments, in NumPy.
        dtype: as of `evaluate`, and so `weights` and `watch`.
        weights: see there.
        watch: see there.
        keep: gets every array as its module returns; what it returns stands on the record.
    """
    records: list[Captured] = []
    copies = Copies(keep)
    counts: dict[str, int] = {}
    handles = []

    def hook(path: str) -> Callable[..., None]:
        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            counts[path] = counts.get(path, 0) + 1
            values = {name: copies.of(value) for name, value in flatten(output, is_array)}
            given = {number: copies.of(value) for number, value in enumerate(inputs) if is_array(value)}
            records.append(Captured(path, counts[path] - 1, values, given))

        return record

    try:
        for path, module in model.named_modules():
            handles.append(module.register_forward_hook(hook(path)))
        result = evaluate(model, call, dtype=dtype, weights=weights, watch=watch)
    finally:
        for handle in handles:
            handle.remove()
    return result, records


def output_dtypes(model: nn.Module, call: Call, dtype: str) -> dict[str, str]:
    """The dtypes of a model's outputs, by path, when parameters and arguments are cast: a pinned dtype stays,
    but for that in which the model is deployed.

    Nothing is computed.
    """
    outputs = evaluate(model, call, dtype=dtype, meta=True).outputs
    return {path: leaf.dtype for path, leaf in outputs.items() if isinstance(leaf, Abstract)}


def as_written(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Let what torch.compile made run as it was written: compiling for what does not fit writes tracebacks to the screen."""
    return torch.compiler.set_stance("force_eager") if is_compiled(model) else contextlib.nullcontext()


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile made any part of a model."""
    return any(type(module).__name__ == "OptimizedModule" for module in model.modules())


def raises(model: nn.Module, call: Call, dtype: str | None = None) -> str | tuple[tuple[int, ...], ...]:
    """What a model does with arguments, without computing: the error, or the shapes of its outputs."""
    try:
        with as_written(model):
            outputs = evaluate(model, call, dtype=dtype, meta=True).outputs
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    return tuple(leaf.shape for leaf in outputs.values() if isinstance(leaf, Abstract))


def environment() -> dict[str, str]:
    """Version, devices and settings as they are now, for the report."""
    devices = ["cpu"] + [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    with warnings.catch_warnings():
        # Which of its two ways of setting TF32 was used is not looked into; reading the other one may warn.
        warnings.simplefilter("ignore")
        products, tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    tiny = torch.full((1,), torch.finfo(torch.float32).tiny / 4, dtype=torch.float32, device="cpu")
    return {
        "torch": str(torch.__version__),
        "torch build": f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU",
        "torch devices": ", ".join(devices),
        "torch threads": str(torch.get_num_threads()),
        "torch default dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "torch float32 products, as set": products,
        "torch cuDNN TF32, as set": "on" if tf32 else "off",
        "torch algorithms, as set": "deterministic" if torch.are_deterministic_algorithms_enabled() else "any",
        "torch denormals": "kept" if bool((tiny * 1.0 != 0).any()) else "turned to zero",
        "torch and NumPy": bridge(),
    }


def bridge() -> str:
    """Whether torch takes arrays from NumPy: one that was built for another NumPy does not."""
    try:
        torch.from_numpy(np.zeros(1, np.float32)).numpy()
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    return "work together"


def gpu_missing() -> str | None:
    """Why no GPU can be used, None if one can."""
    return None if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device"
