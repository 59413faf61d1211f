"""PyTorch in the words of this package: leaves, layers, writing, running, capturing."""

import contextlib
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from parity.errors import InputError, first_line
from parity.evidence.calls import Abstract, Call, Captured, Evaluation
from parity.evidence.trees import flatten, mapped
from parity.frameworks.exactness import NotProvableError, Prover  # noqa: F401  reached through this room
from parity.weights.leaf import Layer, Leaf, Role, Shared
from parity.weights.paths import split

NAME = "torch"

# NumPy has no such dtypes: their bits travel as integers of the same width.
BITS = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
    torch.float8_e4m3fnuz: (torch.uint8, ml_dtypes.float8_e4m3fnuz),
    torch.float8_e5m2fnuz: (torch.uint8, ml_dtypes.float8_e5m2fnuz),
    torch.float8_e8m0fnu: (torch.uint8, ml_dtypes.float8_e8m0fnu),
}


def is_model(value: Any) -> bool:
    return isinstance(value, nn.Module)


def owns(value: Any) -> bool:
    """Whether `value` is a module, or a state_dict: a flat mapping from names to tensors."""
    if is_model(value):
        return True
    flat = isinstance(value, Mapping) and len(value) > 0
    return flat and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in value.items())


def is_array(value: Any) -> bool:
    return isinstance(value, Tensor)


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def unreadable(tensor: Tensor) -> str:
    """Why a tensor has no values that NumPy could hold, '' if it has."""
    if tensor.is_meta:
        return "is on the meta device and holds no values; load or initialise the model first"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return f"is not dense, it has layout {tensor.layout} and dtype {dtype_name(tensor)}; use .to_dense() or .dequantize()"
    return ""


def to_numpy(tensor: Tensor) -> np.ndarray:
    """The tensor as NumPy, sharing its memory where that is on the host.

    Raises:
        InputError: the tensor holds no values, or is sparse or quantised.
    """
    if unreadable(tensor):
        raise InputError(f"a tensor {unreadable(tensor)}")
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.dtype in BITS:
        bits, dtype = BITS[tensor.dtype]
        return tensor.view(bits).numpy().view(dtype)
    return tensor.numpy()


def from_numpy(array: np.ndarray) -> Tensor:
    """The array as a tensor that shares its memory; never write into it."""
    # Positive strides are all that torch knows, and at least one axis order.
    array = np.asarray(array) if all(s >= 0 for s in array.strides) else array.copy()
    with warnings.catch_warnings():
        # torch warns that a read-only array could be written through the tensor.
        warnings.simplefilter("ignore", UserWarning)
        for torch_dtype, (bits, dtype) in BITS.items():
            if array.dtype == dtype:
                carrier = np.dtype(str(bits).removeprefix("torch."))
                return torch.from_numpy(array.view(carrier)).view(torch_dtype)
        return torch.from_numpy(array)


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def kinds(module: nn.Module) -> tuple[str, ...]:
    """Public names of a module's classes, nearest first."""
    names = []
    for cls in type(module).__mro__:
        builtin = cls.__module__.startswith("torch.nn.modules")
        names.append(f"torch.nn.{cls.__name__}" if builtin else f"{cls.__module__}.{cls.__qualname__}")
    return tuple(names)


def make_leaf(path: str, tensor: Tensor, names: tuple[str, ...], role: Role) -> Leaf:
    owner, name = split(path)

    def share(axes: tuple[int, ...]) -> Shared | np.ndarray:
        if not dense(tensor):
            return to_numpy(tensor).transpose(axes)
        # jax cannot permute without a copy, but it takes the strides of a permuted array as they come.
        return Shared(tensor.detach().permute(axes), tuple(range(tensor.ndim)))

    def read() -> np.ndarray:
        return to_numpy(tensor)

    dtype, reason = dtype_name(tensor), unreadable(tensor)
    return Leaf(path, owner, name, names, tuple(tensor.shape), dtype, role, identity_of(tensor), read, share, reason)


def dense(tensor: Tensor) -> bool:
    """Whether the elements lie without gaps or overlaps, in whatever order of the axes: others cannot be lent to jax."""
    strides = tensor.stride()
    return tensor.permute(sorted(range(tensor.ndim), key=lambda axis: -strides[axis])).is_contiguous()


def identity_of(tensor: Tensor) -> Hashable:
    """Equal for two tensors exactly if they are the same elements of one memory."""
    memory = tensor.untyped_storage().data_ptr() if not unreadable(tensor) else 0
    return (memory, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()) if memory else id(tensor)


def leaves(value: Any) -> list[Leaf]:
    """Parameters and persistent buffers in the order of the state_dict, tied ones under each name.

    Raises:
        InputError: a lazy module has not seen an input yet.
    """
    if not is_model(value):
        return [make_leaf(path, tensor, (), "parameter") for path, tensor in value.items()]
    modules = dict(value.named_modules(remove_duplicate=False))
    parameters = {path for path, _ in value.named_parameters(remove_duplicate=False)}
    found = []
    lazy = [path for path, tensor in value.state_dict(keep_vars=True).items() if is_lazy(tensor)]
    if lazy:
        raise InputError(f"{', '.join(lazy)} of a lazy module has no shape yet; run the model once on an example first")
    for path, tensor in value.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            owner = modules.get(split(path)[0])
            role: Role = "parameter" if path in parameters else "buffer"
            found.append(make_leaf(path, tensor, kinds(owner) if owner is not None else (), role))
    return found


def layers(value: Any) -> list[Layer]:
    """Every module under its path, the root as ''."""
    if not is_model(value):
        return []
    modules = value.named_modules(remove_duplicate=False)
    return [Layer(path, kinds(module), setting_reader(module), path) for path, module in modules]


def setting_reader(module: nn.Module) -> Callable[[str], Any]:
    def read(name: str) -> Any:
        if name == "parameter dtype":
            floats = [dtype_name(p) for p in module.parameters(recurse=False) if p.is_floating_point()]
            return floats[0] if floats else None
        return getattr(module, name, None)

    return read


def refusals(value: Any, dtypes: Mapping[str, str]) -> list[str]:
    """Why a module cannot take arrays of these dtypes, by path; one sentence each. A tree can take any."""
    if not is_model(value):
        return []
    existing = value.state_dict(keep_vars=True)
    found = []
    for path in dtypes:
        tensor = existing[path]
        if tensor.is_meta:
            found.append(f'{path} of the target is on the meta device; call .to_empty(device="cpu") on the model first')
        elif tensor.layout != torch.strided or tensor.is_quantized:
            found.append(f"{path} of the target {unreadable(tensor)}")
        elif tensor.numel() and any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
            found.append(f"{path} of the target holds one element for several; make it a .clone() first")
        elif tensor.is_inference() and not torch.is_inference_mode_enabled():
            found.append(f"{path} of the target was made in inference mode and cannot be written; make it outside")
    return found


def fill(value: Any, arrays: Mapping[str, Any]) -> tuple[Any, set[str]]:
    """Write arrays into a module in place, or make a state_dict of them.

    Args:
        value: the target.
        arrays: by path; NumPy arrays are copied, `Shared` ones keep their memory where that can be.

    Returns:
        The filled module or the new state_dict, and the paths whose memory is shared.
    """
    shared = {path for path, array in arrays.items() if isinstance(array, Shared)}
    tensors = {
        path: torch.utils.dlpack.from_dlpack(a.array).permute(a.axes) if path in shared else from_numpy(a)
        for path, a in arrays.items()
    }
    if not is_model(value):
        return new_state_dict(value, tensors, shared), shared
    existing = value.state_dict(keep_vars=True)
    done: set[str] = set()
    with torch.no_grad():
        for path, tensor in tensors.items():
            target = existing[path]
            if path in shared and target.device == tensor.device:
                target.data = tensor
                done.add(path)
            elif target.dtype != tensor.dtype:
                # Only by cast: the parameter takes on the dtype in which the array arrives.
                target.data = tensor.to(target.device, copy=True).contiguous()
            else:
                target.copy_(tensor)
    return value, done


def new_state_dict(value: Mapping[str, Tensor], tensors: Mapping[str, Tensor], shared: set[str]) -> dict[str, Tensor]:
    """A state_dict like `value` with new values, contiguous and on the old devices; what was tied is tied again."""
    made: dict[Hashable, Tensor] = {}
    for path, tensor in tensors.items():
        old = value[path]
        device = tensor.device if old.is_meta else old.device
        # The clone is wanted also where the device is the same: `tensor` is the source's own memory.
        copied = tensor.clone(memory_format=torch.contiguous_format).to(device)
        made[identity_of(old)] = tensor if path in shared else copied
    for tensor in value.values():
        made.setdefault(identity_of(tensor), tensor.detach().clone())
    return {path: made[identity_of(tensor)] for path, tensor in value.items()}


def problems_before_running(model: nn.Module) -> list[str]:
    """Why a model cannot be compared as it stands: in train mode, on several devices, without values."""
    found = []
    training = [path or "the model" for path, module in model.named_modules() if module.training and depends_on_mode(module)]
    if training:
        found.append(
            f"the torch model is in train mode, and that changes what {', '.join(training[:4])}"
            f"{' and others' if len(training) > 4 else ''} computes; call .eval() on it first"
        )
    devices = {str(t.device) for t in model.state_dict(keep_vars=True).values() if isinstance(t, Tensor)}
    if "meta" in devices:
        found.append("the torch model has parameters on the meta device, which hold no values; load or initialise it first")
    elif len(devices) > 1:
        found.append(f"the torch model is spread over {', '.join(sorted(devices))}; move it to one device with .to(...)")
    return found


def depends_on_mode(module: nn.Module) -> bool:
    names = kinds(module)
    if any("dropout" in name.lower() for name in names if name.startswith("torch.nn.")):
        return getattr(module, "p", 1) > 0
    if "torch.nn._BatchNorm" in names or "torch.nn._NormBase" in names:
        return True
    if getattr(module, "dropout", 0) and isinstance(module.dropout, float):
        return True
    forward = type(module).forward
    if forward.__module__.startswith("torch."):
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


@contextlib.contextmanager
def pinned(threads: int | None = None) -> Iterator[dict[str, str]]:
    """Full float32 products, deterministic algorithms, no autocast; all restored afterwards.

    Args:
        threads: of torch's own inside; None leaves them. Many small models run several times
            faster with one, because OpenMP's threads and XLA's wait for each other.

    Yields:
        What was pinned, for the report.
    """
    precision = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with (
            torch.backends.cudnn.flags(deterministic=True, benchmark=False, allow_tf32=False),
            torch.inference_mode(False),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False) if torch.cuda.is_available() else contextlib.nullcontext(),
        ):
            yield {"torch float32 products": "highest", "torch cuDNN TF32": "off", "torch algorithms": "deterministic"}
    finally:
        torch.set_num_threads(before)
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


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
    state = dict(model.state_dict(keep_vars=True))
    # Non-persistent buffers are not in the state_dict, but the forward pass needs them in the same dtype.
    state |= dict(model.named_buffers(remove_duplicate=False))
    originals: dict[int, Tensor] = {}
    replaced: dict[str, Tensor] = {}
    for path, tensor in state.items():
        if not isinstance(tensor, Tensor):
            continue
        given = None if weights is None else weights.get(path)
        key = id(tensor) if given is None else id(given)
        if key not in originals:
            originals[key] = fresh(tensor if given is None else from_numpy(given), dtype, device)
            if wants_gradients and originals[key].is_floating_point() and tensor.requires_grad:
                originals[key].requires_grad_()
        replaced[path] = originals[key]
    inputs: dict[str, Tensor] = {}
    arrays: dict[str, Tensor] = {}

    def as_tensor(path: str, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        tensor = fresh(from_numpy(value), dtype if path in call.castable else None, device)
        arrays[path] = tensor
        if wants_gradients and tensor.is_floating_point() and path in call.castable:
            tensor.requires_grad_()
            inputs[path] = tensor
        return tensor

    args = mapped(as_tensor, call.args, "args")
    kwargs = mapped(as_tensor, dict(call.kwargs), "kwargs")
    names = {id(tensor): f"parameter {path}" for path, tensor in replaced.items()}
    names |= {id(tensor): f"input {path}" for path, tensor in arrays.items()}
    watched = watch(names) if watch else contextlib.nullcontext()
    widened = Widened(model_dtype(model)) if dtype == "float64" and not meta else contextlib.nullcontext()
    with torch.enable_grad() if wants_gradients else torch.no_grad(), widened, watched:
        output = torch.func.functional_call(model, replaced, args, kwargs, tie_weights=False)
        outputs = dict(flatten(output, is_array))
        gradients = backward(outputs, cotangents, inputs, replaced) if cotangents is not None else {}
    if meta:
        return Evaluation({p: Abstract(tuple(v.shape), dtype_name(v)) if is_array(v) else v for p, v in outputs.items()})
    return Evaluation({path: plain(value) for path, value in outputs.items()}, gradients)


def fresh(tensor: Tensor, dtype: str | None, device: torch.device) -> Tensor:
    """A copy that no caller holds, floating point values in the asked dtype."""
    wanted = torch_dtype(dtype) if dtype and tensor.is_floating_point() else tensor.dtype
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


def capture(model: nn.Module, call: Call, *, dtype: str | None = None) -> tuple[Evaluation, list[Captured]]:
    """Run a model and record every submodule's output, in the order in which they finish."""
    records: list[Captured] = []
    counts: dict[str, int] = {}
    handles = []

    def hook(path: str) -> Callable[..., None]:
        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            counts[path] = counts.get(path, 0) + 1
            values = {name: plain(value) for name, value in flatten(output, is_array)}
            records.append(Captured(path, counts[path] - 1, values))

        return record

    try:
        for path, module in model.named_modules():
            handles.append(module.register_forward_hook(hook(path)))
        result = evaluate(model, call, dtype=dtype)
    finally:
        for handle in handles:
            handle.remove()
    return result, records


def output_dtypes(model: nn.Module, call: Call, dtype: str) -> dict[str, str]:
    """The dtypes of a model's outputs, by path, when parameters and arguments are cast: a pinned dtype stays.

    Nothing is computed.
    """
    outputs = evaluate(model, call, dtype=dtype, meta=True).outputs
    return {path: leaf.dtype for path, leaf in outputs.items() if isinstance(leaf, Abstract)}


class Widened(TorchDispatchMode):
    """Leave out casts that would cut a float64 run to the dtype in which the model is deployed, or a wider one.

    Where the model is deployed such a cast does nothing. A cast to a narrower dtype rounds there
    too, and stays.
    """

    def __init__(self, deployed: str | None):
        super().__init__()
        self.kept_from = {torch_dtype(deployed or "float32"), torch.float32} - {torch.float64}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        cast = func.overloadpacket is torch.ops.aten._to_copy and args[0].dtype == torch.float64
        if cast and kwargs.get("dtype") in self.kept_from:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


class Kinks(TorchDispatchMode):
    """Count values that lie so close to a kink that rounding decides on which side.

    There two correct implementations may differ by a whole gradient.

    Attributes:
        near: how many values lie within `units` * u * scale of a kink.
    """

    # Operation and the place of its kink; clamp and hardtanh have theirs in the arguments.
    PLACES = ("relu", "leaky_relu", "abs", "threshold", "hardtanh", "clamp", "clamp_min", "clamp_max", "elu", "sign")

    def __init__(self, unit: float, units: float = 64.0):
        super().__init__()
        self.unit, self.units, self.near = unit, units, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.rstrip("_") in self.PLACES and isinstance(args[0], Tensor) and args[0].is_floating_point() and args[0].numel():
            x = args[0].detach()
            bounds = [a for a in args[1:] if isinstance(a, int | float)] if "clamp" in name or name == "hardtanh" else [0.0]
            finite = x[x.isfinite()].abs()
            margin = self.units * self.unit * float(finite.max()) if finite.numel() else 0.0
            # An exact zero on both sides is no question of rounding: dead units feed no gradient.
            self.near += sum(int((((x - b).abs() <= margin) & (x != b)).sum()) for b in bounds)
        return func(*args, **(kwargs or {}))


class Shaken(TorchDispatchMode):
    """Move every computed value, forward and backward, by at most half an ulp of its dtype.

    Two correct implementations differ in how intermediate results are rounded; this shows how
    much such roundings matter at the end, also where a plain run cancels them exactly.

    Source:
        Parker 1997, "Monte Carlo arithmetic".
    """

    # Their results are copies of what they were given: nobody rounds there.
    COPIES: tuple[str, ...] = (
        "clone",
        "copy",
        "_to_copy",
        "where",
        "masked_fill",
        "relu",
        "cat",
        "stack",
        "index",
        "index_select",
        "gather",
    )
    COPIES += ("embedding", "constant_pad_nd", "flip", "threshold_backward", "zeros", "zeros_like", "full", "full_like", "ones")
    COPIES += ("ones_like", "new_zeros", "empty", "empty_like", "scalar_tensor", "lift_fresh", "repeat", "arange", "neg", "abs")

    def __init__(self, units: Mapping[str, float], seed: int):
        super().__init__()
        self.units = units
        self.seed, self.drawn = seed, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        views = any(r.alias_info is not None for r in func._schema.returns)
        if views or func.overloadpacket.__name__ in self.COPIES:
            return result
        if isinstance(result, tuple):
            return tuple(self.moved(r) for r in result)
        return self.moved(result)

    def moved(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or dtype_name(value) not in self.units:
            return value
        self.drawn += 1
        generator = torch.Generator(device=value.device).manual_seed(self.seed * 1_000_003 + self.drawn)
        noise = torch.rand(value.shape, generator=generator, dtype=torch.float64, device=value.device) * 2 - 1
        wide = value.double() * (1 + self.units[dtype_name(value)] * noise)
        return wide.to(value.dtype)


def raises(model: nn.Module, call: Call, dtype: str | None = None) -> str | tuple[tuple[int, ...], ...]:
    """What a model does with arguments, without computing: the error, or the shapes of its outputs."""
    try:
        outputs = evaluate(model, call, dtype=dtype, meta=True).outputs
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    return tuple(leaf.shape for leaf in outputs.values() if isinstance(leaf, Abstract))


def environment() -> dict[str, str]:
    """Versions and devices, for the report."""
    devices = ["cpu"] + [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"torch": str(torch.__version__), "torch devices": ", ".join(devices)}


def gpu_missing() -> str | None:
    """Why no GPU can be used, None if one can."""
    return None if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device"
