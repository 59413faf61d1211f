"""No later write on one side shows on the other, unless sharing was asked for; what the caller holds stays what it is."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn
from transfer_helpers import FlaxHolder, Holder, TorchNet, any_bits, bits, flax_net, rngs, scramble, snapshot, to_tensor

import parity

SHAPES = {"unequal": (6, 10), "square": (8, 8), "row": (1, 24), "column": (24, 1)}
DTYPES = ["float32", "bfloat16"]


class TorchShapes(nn.Module):
    """A transposed leaf of each shape, and leaves that are stored as they are: 0-d, 1-d, 2-d, 3-d, embedding, int, bool."""

    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleDict({name: nn.Linear(*shape) for name, shape in SHAPES.items()})
        self.embed = nn.Embedding(16, 8)
        self.zero, self.three = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(4, 4, 4))
        self.register_buffer("ints", torch.zeros(16, dtype=torch.int32))
        self.register_buffer("flags", torch.zeros(64, dtype=torch.bool))


class FlaxShapes(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linears = nnx.Dict(**{name: nnx.Linear(*shape, rngs=rngs) for name, shape in SHAPES.items()})
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.zero, self.three = nnx.Param(jnp.zeros(())), nnx.Param(jnp.zeros((4, 4, 4)))
        self.ints, self.flags = nnx.Variable(jnp.zeros(16, jnp.int32)), nnx.BatchStat(jnp.zeros(64, bool))


def flax_shapes() -> FlaxShapes:
    return nnx.eval_shape(lambda: FlaxShapes(nnx.Rngs(0)))


def filled_flax(dtype: str) -> FlaxShapes:
    model = flax_shapes()
    parity.transfer(scramble(TorchShapes(), "into flax", dtype=dtype), model, cast="source")
    return scramble(model, "flax", dtype=dtype)


def overwrite(tensors: dict[str, torch.Tensor]) -> None:
    """Change every element in place."""
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.copy_(~tensor if tensor.dtype == torch.bool else torch.full_like(tensor, 77))


def live(model: nn.Module) -> dict[str, torch.Tensor]:
    return model.state_dict(keep_vars=True)


def memory(value: Any) -> dict[str, Any]:
    """What lies in a Flax model's memory now; np.asarray would keep a copy of a transposed array from its first reading."""
    leaves = nnx.to_flat_state(nnx.state(value) if isinstance(value, nnx.Module) else value)
    return {".".join(map(str, path)): bits(torch.from_dlpack(variable.get_value())) for path, variable in leaves}


def pointers(model: Any) -> set[int]:
    return {v.get_value().unsafe_buffer_pointer() for _, v in nnx.to_flat_state(nnx.state(model))}


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["module", "tree"])
def test_writing_into_the_torch_source_leaves_the_flax_target(dtype, form):
    source, target = scramble(TorchShapes(), "safe", dtype=dtype), flax_shapes()
    target = target if form == "module" else nnx.state(target)
    value = parity.transfer(source if form == "module" else source.state_dict(), target, cast="source").value
    before = memory(value)
    overwrite(live(source))
    assert memory(value) == before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["module", "tree"])
def test_writing_into_the_torch_target_leaves_the_flax_source(dtype, form):
    source, target = filled_flax(dtype), scramble(TorchShapes(), "safe", dtype=dtype)
    before = memory(source)
    value = parity.transfer(source, target if form == "module" else target.state_dict()).value
    overwrite(live(value) if form == "module" else value)
    assert memory(source) == before


def converter_of_transformers(state: dict[str, torch.Tensor], target: nnx.Module) -> None:
    """How the converter of transformers 4 fills a model, with the array that `jnp.asarray` makes of NumPy's memory."""
    for path, node in nnx.to_flat_state(nnx.state(target)):
        name = ".".join(map(str, path))
        last = {"kernel": "weight", "embedding": "weight"}.get(path[-1], path[-1])
        found = state[".".join([*map(str, path[:-1]), last])].detach().numpy()
        node.set_value(jnp.asarray(found.T if name.endswith("kernel") else found, dtype=found.dtype))


def test_what_jax_makes_of_numpy_memory_shows_later_writes_and_what_is_transferred_does_not():
    source = TorchShapes()
    for shared, fill in ((True, converter_of_transformers), (False, parity.transfer)):
        target = flax_shapes()
        fill(source.state_dict(), target)
        before = memory(target)
        overwrite(live(source))
        changed = {path for path, leaf in memory(target).items() if leaf != before[path]}
        assert ({"embed.embedding", "three", "linears.square.bias"} <= changed) is shared
        assert shared or not changed
        source = TorchShapes()


def test_threads_change_nothing():
    """More arrays than are on their way at a time, of all sizes; with settings of one thread alone too."""
    sizes = [(1500, 1200), (900, 1000), (1, 7), (1300, 1100), (5, 3), (1024, 1024)]
    source = nn.ModuleDict({f"l{i}": nn.Linear(a, b) for i, (a, b) in enumerate(sizes)})
    for context in (contextlib.nullcontext(), jax.enable_x64(True), jax.default_device(jax.devices()[0])):
        with context:
            target = parity.empty(
                lambda rngs: nnx.Dict(
                    {f"l{i}": nnx.Linear(a, b, rngs=rngs, param_dtype="float32") for i, (a, b) in enumerate(sizes)}
                )
            )
            parity.transfer(source, target, verify=True)
            back = nn.ModuleDict({name: nn.Linear(*layer.weight.shape[::-1]) for name, layer in source.items()})
            parity.transfer(target, back, verify=True)
        assert snapshot(back) == snapshot(source)


def test_a_wide_dtype_set_for_one_thread_arrives():
    source = nn.Linear(3, 5, dtype=torch.float64)
    with jax.enable_x64(True):
        target = parity.empty(nnx.Linear, 3, 5, param_dtype="float64")
        parity.transfer(source, target)
        assert target.kernel[...].dtype == jnp.float64
        assert np.array_equal(np.asarray(target.kernel[...]), source.weight.detach().numpy().T)


def test_torch_to_torch_shares_nothing_in_either_direction():
    for make in (lambda m: m, lambda m: m.state_dict()):
        source, target = scramble(TorchShapes(), "a"), scramble(TorchShapes(), "b")
        value = parity.transfer(make(source), make(target)).value
        before = snapshot(value)
        overwrite(live(source))
        assert snapshot(value) == before
        source_before = snapshot(source)
        overwrite(value if isinstance(value, dict) else live(value))
        assert snapshot(source) == source_before


def test_flax_to_flax_shares_nothing():
    source, target = filled_flax("float32"), flax_shapes()
    parity.transfer(source, target)
    assert not pointers(source) & pointers(target)
    assert not pointers(source) & pointers(parity.transfer(source, nnx.state(flax_shapes())).value)


def test_a_source_that_lies_in_transposed_memory_is_copied_too():
    stored = torch.randn(8, 6)
    source, target = nn.Linear(8, 6, bias=False), nnx.Linear(8, 6, use_bias=False, rngs=rngs())
    source.weight = nn.Parameter(stored.T)
    parity.transfer(source, target)
    before = memory(target)
    with torch.no_grad():
        stored.fill_(5)
        source.weight.fill_(6)
    assert memory(target) == before


# ---------------------------------------------------------------- sharing where it is asked for


@pytest.mark.parametrize("dtype", DTYPES)
def test_shared_torch_memory_shows_in_flax_exactly_where_the_plan_says_so(dtype):
    source, target = scramble(TorchShapes(), "share", dtype=dtype), flax_shapes()
    for tensor in live(source).values():
        # torch's own memory begins where jax can use it; that of NumPy, which `scramble` left, only by chance.
        tensor.data = tensor.data.clone()
    plan = parity.transfer(source, target, cast="source", copy=False).plan
    assert not any(entry.shared for entry in plan if dtype == "bfloat16" and entry.dtype != entry.target_dtype)
    target = flax_shapes() if dtype == "float32" else filled_flax(dtype)
    plan = parity.transfer(source, target, copy=False).plan
    before = memory(target)
    overwrite(live(source))
    changed = {path for path, leaf in memory(target).items() if leaf != before[path]}
    assert changed == {entry.target for entry in plan if entry.shared}
    assert {entry.layout for entry in plan if entry.shared} == {"as is", "transposed"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_shared_flax_memory_shows_in_torch_exactly_where_the_plan_says_so(dtype):
    source, target = filled_flax(dtype), scramble(TorchShapes(), "share", dtype=dtype)
    plan = parity.transfer(source, target, copy=False).plan
    before = memory(source)
    overwrite(live(target))
    changed = {path for path, leaf in memory(source).items() if leaf != before[path]}
    assert changed == {entry.source for entry in plan if entry.shared}
    assert {entry.layout for entry in plan if entry.shared} == {"as is", "transposed"}


def test_memory_that_jax_cannot_take_is_not_called_shared():
    whole = torch.arange(64.0)
    source = Holder(offset=whole[1:17], strided=whole[::4].view(4, 4), aligned=torch.arange(16.0))
    target = FlaxHolder(offset=jnp.zeros(16), strided=jnp.zeros((4, 4)), aligned=jnp.zeros(16))
    plan = parity.transfer(source, target, copy=False).plan
    assert {entry.source: entry.shared for entry in plan} == {"offset": False, "strided": False, "aligned": True}
    before = memory(target)
    overwrite(live(source))
    assert {path for path, leaf in memory(target).items() if leaf != before[path]} == {"aligned"}


def test_what_is_cast_is_not_shared():
    source, target = Holder(a=torch.randn(16)), FlaxHolder(a=jnp.zeros(16, jnp.bfloat16))
    assert not parity.transfer(source, target, cast="target", copy=False).plan[0].shared


@pytest.mark.parametrize("form", ["torch", "state_dict"])
def test_torch_to_torch_can_share(form):
    source, target = Holder(a=torch.randn(3, 5)), Holder(a=torch.zeros(3, 5))
    made = parity.transfer(source, target if form == "torch" else target.state_dict(), copy=False)
    assert made.plan[0].shared
    overwrite(live(source))
    assert bits(made.value.a if form == "torch" else made.value["a"]) == bits(source.a)


def test_flax_to_flax_can_share():
    source, target = FlaxHolder(a=jnp.arange(15.0).reshape(3, 5)), FlaxHolder(a=jnp.zeros((3, 5)))
    assert parity.transfer(source, target, copy=False).plan[0].shared
    assert pointers(source) == pointers(target)


def test_a_shared_model_outlives_its_source():
    target = nnx.Linear(64, 64, rngs=rngs())
    source = scramble(nn.Linear(64, 64), "outlive")
    expected = bits(source.weight.detach().T)
    parity.transfer(source, target, copy=False)
    del source
    _ = [torch.full((64, 64), 3.0) for _ in range(8)]
    assert bits(target.kernel[...]) == expected


# ---------------------------------------------------------------- what the caller holds


def test_parameters_stay_the_same_objects_with_their_settings():
    target = TorchNet()
    target.embed.weight.requires_grad_(False)
    target.heads["right"].weight = nn.Parameter(torch.zeros(5, 5).T)
    held, addresses = live(target), {path: t.data_ptr() for path, t in live(target).items()}
    settings = {path: (t.requires_grad, t.stride(), t.device, type(t)) for path, t in held.items()}
    parity.transfer(scramble(flax_net(), "held"), target)
    assert all(live(target)[path] is tensor for path, tensor in held.items())
    assert {path: t.data_ptr() for path, t in held.items()} == addresses
    assert {path: (t.requires_grad, t.stride(), t.device, type(t)) for path, t in held.items()} == settings


def test_gradients_of_the_target_are_left():
    target = nn.Linear(3, 2)
    target(torch.ones(1, 3)).sum().backward()
    before = target.weight.grad.clone()
    parity.transfer(nnx.Linear(3, 2, rngs=rngs()), target)
    assert torch.equal(target.weight.grad, before)


@pytest.mark.parametrize("options", [{}, {"copy": False}, {"cast": "bfloat16"}], ids=str)
def test_an_optimizer_made_before_still_trains_the_model(options):
    target = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(target.parameters(), lr=1.0)
    parity.transfer(nnx.Linear(3, 2, rngs=rngs()), target, **options)
    before = target.weight.detach().clone()
    target(torch.ones(1, 3, dtype=target.weight.dtype)).sum().backward()
    optimizer.step()
    assert torch.equal(target.weight, before - 1)


def test_variables_stay_the_same_objects():
    target = nnx.Linear(3, 2, rngs=rngs())
    kernel = target.kernel
    kernel.set_metadata(note="mine")
    parity.transfer(nn.Linear(3, 2), target)
    assert target.kernel is kernel
    assert target.kernel.get_metadata()["note"] == "mine"


def test_a_new_state_keeps_kinds_and_metadata():
    model = nnx.Linear(3, 2, rngs=rngs())
    model.kernel.set_metadata(note="mine")
    value = parity.transfer(nn.Linear(3, 2), nnx.state(model)).value
    assert isinstance(value["kernel"], nnx.Param)
    assert value["kernel"].get_metadata()["note"] == "mine"
    nnx.update(model, value)
    assert bits(model.kernel[...]) == bits(value["kernel"][...])


def test_a_new_state_dict_is_contiguous_and_loads():
    source = scramble(flax_net(), "loads")
    made = parity.transfer(source, TorchNet().state_dict()).value
    assert all(tensor.is_contiguous() for tensor in made.values())
    assert not any(tensor.requires_grad for tensor in made.values())
    fresh = TorchNet()
    fresh.load_state_dict(made)
    assert snapshot(fresh) == snapshot(parity.transfer(source, TorchNet()).value)


def test_a_state_dict_without_values_is_enough_of_a_target():
    with torch.device("meta"):
        shapes = TorchNet().state_dict()
    made = parity.transfer(scramble(flax_net(), "meta"), shapes).value
    assert {tensor.device.type for tensor in made.values()} == {"cpu"}


def test_a_committed_array_stays_on_its_device():
    import jax

    device = jax.devices()[0]
    target = FlaxHolder(a=jax.device_put(jnp.zeros(3), device))
    parity.transfer({"a": torch.ones(3)}, target)
    assert target.a[...].committed
    assert target.a[...].devices() == {device}


def test_a_model_copied_onto_itself_stays():
    for model in (scramble(TorchNet(), "self"), scramble(flax_net(), "self")):
        before = snapshot(model)
        parity.transfer(model, model)
        assert snapshot(model) == before


def test_arguments_are_not_written_into():
    rename, ignore = {"w": "kernel"}, ["b*"]
    tensors = {"w": to_tensor(any_bits(np.random.default_rng(0), (2, 3), "float32"), "float32"), "b": torch.ones(1)}
    before = {path: bits(t) for path, t in tensors.items()}
    parity.transfer(tensors, nnx.Linear(3, 2, use_bias=False, rngs=rngs()), rename=rename, ignore=ignore)
    assert (rename, ignore) == ({"w": "kernel"}, ["b*"])
    assert {path: bits(t) for path, t in tensors.items()} == before
