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
backend = sys.argv[1]
torch.manual_seed(0)
for module, inputs, form in (
    (torch_impl.Multi_Head_Self_Attention(8, 2), 3, "keep"),
    (torch_impl.SelfAttention(8, 2), 3, "keep"),
    (torch_impl.MultiHeadAttention(8, 2, 3, 3, 5, bias=True), 3, "hide"),
    (torch_impl.FeedForwardNetwork(8, 12, p_drop=0.0), 1, None),
):
    args = [torch.randn(2, 5, 8) for _ in range(inputs)]
    if form:
        mask = torch.ones(5, 5).tril()
        args.append(mask if form == "keep" else 1 - mask)
    eager, compiled = module(*args), torch.compile(module, backend=backend, fullgraph=True)(*args)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (compiled, eager)), strict=True):
        assert b.isfinite().all()
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    print(type(module).__name__)
"""


# Not in this process: dynamo cannot trace the functions that check the shape annotations.
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile_captures_each_module_as_one_graph(backend):
    if backend == "inductor" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("torch.compile needs a C++ compiler, and there is none")
    run = subprocess.run(
        [sys.executable, "-c", COMPILE, backend],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.split()) == 4
