"""What torch offers around modules still works on the wing: autocast, torch.func, torch.compile."""

import copy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import MAIN, assert_same_bits, build, fill, mask_array, random, to_torch
from test_torch_documents import ORACLE, leaves, third_document_feed_forward
from test_torch_transformer import config, tensors, transformer, whole
from transformer_cases import N_SOURCE, N_TARGET, OPTIONS, ids

import torch_impl

main = pytest.mark.parametrize("case", MAIN, ids=[case.name for case in MAIN])


def call_of(case, dtype="float32"):
    inputs = [to_torch(x, dtype) for x in case.inputs()]
    return build(case, dtype), inputs, to_torch(mask_array(case, "(Lq,Lk)"))


@main
def test_autocast_is_bit_equal_to_the_documents_under_autocast(case):
    module, inputs, mask = call_of(case)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        out = leaves(module(*inputs, mask))
        expected = leaves(ORACLE[case.name](module.state_dict(), case.heads, inputs, mask))
    assert out[0].dtype == torch.bfloat16
    for a, b in zip(out, expected, strict=True):
        assert_same_bits(a, b)


def test_autocast_of_the_feed_forward_network():
    module = fill(torch_impl.FeedForwardNetwork(6, 10), "float32").eval()
    x = to_torch(random("autocast").standard_normal((3, 4, 6)), "float32")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(x)
        assert_same_bits(out, third_document_feed_forward(module.state_dict(), x, 0.1, False))
    assert out.dtype == torch.bfloat16


@main
def test_without_autocast_the_same_mix_of_dtypes_is_refused(case):
    module, inputs, _ = call_of(case)
    inputs = [x.bfloat16() for x in inputs]
    with pytest.raises(torch_impl.InputError, match="is bfloat16 and the weights float32"):
        module(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert leaves(module(*inputs))[0].isfinite().all()


@main
def test_functional_call_uses_the_weights_it_is_given(case):
    module, inputs, mask = call_of(case)
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    found = torch.func.functional_call(module, dict(other.named_parameters()), (*inputs, mask))
    for a, b, plain in zip(leaves(found), leaves(other(*inputs, mask)), leaves(module(*inputs, mask)), strict=True):
        assert_same_bits(a, b)
        assert not torch.equal(a, plain)


@main
def test_vmap_over_inputs_masks_and_weights_is_a_loop(case):
    module, inputs, mask = call_of(case, "float64")
    inputs = [torch.stack([x, -2 * x, x + 1]) for x in inputs]
    masks = torch.stack([mask.roll(i, 0) for i in range(3)])
    states = [{name: p.detach() * (1 + i) for name, p in module.named_parameters()} for i in range(3)]
    stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}

    def call(state, mask, *xs):
        return leaves(torch.func.functional_call(module, state, (*xs, mask)))

    found = torch.func.vmap(call)(stacked, masks, *inputs)
    for i in range(3):
        for a, b in zip(found, call(states[i], masks[i], *(x[i] for x in inputs)), strict=True):
            torch.testing.assert_close(a[i], b, rtol=0, atol=1e-13 * b.abs().max().item())


COMPILE = """
import sys, torch, torch_impl
from torch_impl import TransformerConfig
backend = sys.argv[1]
torch.manual_seed(0)
config = TransformerConfig(d_model=8, n_heads=2, n_layers=1, d_ff=12, max_len=16, p_drop=0.0)
x, memory = torch.randn(2, 5, 8), torch.randn(2, 7, 8)
keep, hide, hide_memory = torch.ones(5, 5).tril(), torch.ones(5, 5).triu(1), torch.ones(5, 7).triu(3)
for module, args in (
    (torch_impl.Multi_Head_Self_Attention(8, 2), [x, x + 1, x + 2, keep]),
    (torch_impl.SelfAttention(8, 2), [x, x + 1, x + 2, keep]),
    (torch_impl.MultiHeadAttention(8, 2, 3, 3, 5, bias=True), [x, x + 1, x + 2, hide]),
    (torch_impl.FeedForwardNetwork(8, 12, p_drop=0.0), [x]),
    (torch_impl.EncoderLayer(config), [x, hide]),
    (torch_impl.DecoderLayer(config), [x, memory, hide, hide_memory]),
):
    eager, compiled = module(*args), torch.compile(module, backend=backend, fullgraph=True)(*args)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (compiled, eager)), strict=True):
        assert b.isfinite().all()
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)
    print(type(module).__name__)
"""

# Batch and lengths stay open: the ids of the second call have other shapes, up to max_len.
WHOLE = """
import sys, torch
from torch_impl import Transformer, TransformerConfig
torch.manual_seed(0)
sizes = dict(d_model=8, n_heads=2, n_layers=1, d_ff=12, max_len=16)
def ids(n, ls, lt):
    source, target = torch.randint(1, 11, (n, ls)), torch.randint(1, 13, (n, lt))
    source[0, ls - 2:] = 0
    return source, target
def compiled(model):
    return torch.compile(model, backend=sys.argv[1], fullgraph=True)
def exported(model):
    every = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    return torch.export.export(model, ids(2, 7, 5), dynamic_shapes=dict(source=every, target=every)).module()
for transformed, options in (
    (compiled, {}),
    (exported, dict(positions="rotary", n_kv_heads=1, norm="rms", norm_first=True, activation="gelu")),
):
    model = Transformer(11, 13, TransformerConfig(**sizes, **options)).eval()
    other = transformed(model)
    for shape in ((2, 7, 5), (3, 9, 16)):
        given = ids(*shape)
        assert model(*given).isfinite().all()
        torch.testing.assert_close(other(*given), model(*given), rtol=0, atol=2e-6)
    print("agrees")
"""


def output_of(script, backend):
    """What a script prints in a process of its own: dynamo cannot trace the functions that check the shape annotations."""
    if backend == "inductor" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("torch.compile needs a C++ compiler, and there is none")
    run = subprocess.run(
        [sys.executable, "-c", script, backend],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


backends = pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])


@backends
def test_compile_captures_each_module_as_one_graph(backend):
    assert len(output_of(COMPILE, backend)) == 6


@backends
def test_the_transformer_is_compiled_as_one_graph_and_exported_with_lengths_left_open(backend):
    assert output_of(WHOLE, backend) == ["agrees", "agrees"]


# ---------------------------------------------------------------- the Transformer


def test_autocast_of_the_transformer_is_that_of_the_bare_operations():
    for chosen in (OPTIONS["paper"], OPTIONS["rms, tanh gelu"]):
        model = transformer(chosen, "float32")
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            assert_same_bits(model(*tensors(ids())), whole(model.state_dict(), config(**chosen), *tensors(ids())))


@pytest.mark.parametrize("name", ["paper", "rotary, one key head"])
def test_copies_and_casts_of_the_transformer(name):
    model = transformer(OPTIONS[name])
    expected = model(*tensors(ids()))
    copied = copy.deepcopy(model)
    assert_same_bits(copied(*tensors(ids())), expected)
    with torch.no_grad():
        copied.source_embedding.weight.add_(1)
    assert_same_bits(model(*tensors(ids())), expected)
    assert_same_bits(copy.deepcopy(model).bfloat16()(*tensors(ids())), transformer(OPTIONS[name], "bfloat16")(*tensors(ids())))
    with torch.device("meta"):
        empty = torch_impl.Transformer(N_SOURCE, N_TARGET, config(**OPTIONS[name]))
    empty = empty.to_empty(device="cpu").double().eval()
    empty.load_state_dict(model.state_dict())
    assert_same_bits(empty(*tensors(ids())), expected)


def test_gradients_of_each_sequence_by_vmap():
    model, (source, target) = transformer(OPTIONS["paper"]), tensors(ids())
    state = {name: p.detach() for name, p in model.named_parameters()}

    def loss(state, source, target):
        return torch.func.functional_call(model, state, (source[None], target[None])).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(state, source, target)
    for i in range(3):
        for name, gradient in torch.func.grad(loss)(state, source[i], target[i]).items():
            torch.testing.assert_close(found[name][i], gradient, rtol=0, atol=1e-11 * gradient.abs().max().item() + 1e-11)
