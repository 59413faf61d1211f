"""The torch wing against the documents' arithmetic, written again in bare torch operations: every bit must be the same."""

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    ATTENTION,
    DTYPES,
    MAIN,
    MASK_NUMBERS,
    MASK_SHAPES,
    Attention,
    assert_same_bits,
    build,
    fill,
    mask_array,
    mha,
    random,
    to_torch,
)

import torch_impl

# ---------------------------------------------------------------- the oracle


def affine(state, name, x):
    return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))


def heads_apart(x, h):
    return x.unflatten(-1, (h, x.shape[-1] // h)).permute(0, 2, 1, 3)


def heads_together(x):
    return x.permute(0, 2, 1, 3).contiguous().flatten(2)


def first_document(state, h, inputs, mask):
    q, k, v = (heads_apart(affine(state, name, x), h) for name, x in zip(("queries", "keys", "values"), inputs))
    raw = torch.div(q @ k.mT, q.shape[-1] ** 0.5)
    raw = raw if mask is None else torch.masked_fill(raw, mask.eq(0), -torch.inf)
    return affine(state, "fc_out", heads_together(raw.softmax(-1) @ v))


def second_document(state, h, inputs, mask):
    v, k, q = (x.unflatten(-1, (h, x.shape[-1] // h)) for x in inputs)
    raw = torch.einsum("bihc,bjhc->bhij", q, k)
    raw = raw if mask is None else torch.masked_fill(raw, mask.eq(0), -1e20)
    weights = torch.softmax(torch.div(raw, inputs[2].shape[-1] ** 0.5), -1)
    return affine(state, "fc_out", torch.einsum("bhij,bjhc->bihc", weights, v).flatten(2))


def third_document_core(Q, K, V, mask):
    root = torch.tensor(K.shape[-1], dtype=Q.dtype).sqrt()
    raw = torch.matmul(Q, K.mT).div(root)
    raw = raw if mask is None else raw.masked_fill(mask.to(torch.bool), -torch.inf)
    weights = raw.softmax(-1)
    return torch.matmul(weights, V), weights


def third_document(state, h, inputs, mask):
    Q, K, V = (heads_apart(affine(state, name, x), h) for name, x in zip(("W_q", "W_k", "W_v"), inputs))
    out, weights = third_document_core(Q, K, V, mask)
    return affine(state, "W_o", heads_together(out)), weights


def third_document_feed_forward(state, x, p, train):
    wide = F.dropout(F.relu(affine(state, "model.0", x)), p, train)
    return F.dropout(affine(state, "model.3", wide), p, train)


ORACLE = {
    "Multi_Head_Self_Attention": first_document,
    "SelfAttention": second_document,
    "MultiHeadAttention": third_document,
}


def leaves(result):
    return result if isinstance(result, tuple) else (result,)


def both(case: Attention, module, inputs, mask):
    """Outputs and gradients of the module and of the oracle on the same weights."""
    found = []
    for call in (
        lambda state, *xs: torch.func.functional_call(module, state, (*xs, mask)),
        lambda state, *xs: ORACLE[case.name](state, case.heads, xs, mask),
    ):
        state = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
        xs = [x.clone().requires_grad_() for x in inputs]
        out = leaves(call(state, *xs))
        rng = random("cotangents", case.id)
        torch.autograd.backward(out, [to_torch(rng.standard_normal(o.shape)).to(o.dtype) for o in out])
        gradients = {f"input {i}": x.grad for i, x in enumerate(xs)} | {name: p.grad for name, p in state.items()}
        found.append((out, gradients))
    return found


def assert_bit_equal(case, module, inputs, mask):
    (out, gradients), (expected, expected_gradients) = both(case, module, inputs, mask)
    assert len(out) == len(expected)
    for a, b in zip(out, expected):
        assert_same_bits(a, b)
    for name, gradient in expected_gradients.items():
        assert (gradient is None) == (gradients[name] is None), name
        if gradient is not None:
            assert_same_bits(gradients[name], gradient)
    return out, gradients


# ---------------------------------------------------------------- attention

case_ids = {"argvalues": ATTENTION, "ids": [case.id for case in ATTENTION]}
main_ids = {"argvalues": MAIN, "ids": [case.name for case in MAIN]}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", **case_ids)
@pytest.mark.parametrize("style", ["normal", "shifted"])
def test_bit_equal_without_a_mask(case, dtype, style):
    inputs = [to_torch(x, dtype) for x in case.inputs(style)]
    assert_bit_equal(case, build(case, dtype), inputs, None)


@pytest.mark.parametrize("form", MASK_SHAPES)
@pytest.mark.parametrize("mask_dtype", MASK_NUMBERS)
@pytest.mark.parametrize("case", **case_ids)
def test_bit_equal_under_every_mask_form(case, mask_dtype, form):
    mask = to_torch(mask_array(case, form, mask_dtype))
    inputs = [to_torch(x, "float32") for x in case.inputs()]
    out, _ = assert_bit_equal(case, build(case, "float32"), inputs, mask)
    assert out[0].isfinite().all()


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("case", **main_ids)
def test_bit_equal_under_a_mask_in_other_dtypes(case, dtype):
    if case.name == "SelfAttention" and dtype == "float16":
        pytest.skip("float16 cannot hold -1e20: that it is refused is tested below")
    inputs = [to_torch(x, dtype) for x in case.inputs()]
    assert_bit_equal(case, build(case, dtype), inputs, to_torch(mask_array(case, "(N,1,Lq,Lk)")))


@pytest.mark.parametrize("form", MASK_SHAPES)
@pytest.mark.parametrize("case", **main_ids)
def test_bit_equal_where_every_key_is_hidden(case, form):
    mask = to_torch(mask_array(case, form, fully_hidden=True))
    out, _ = assert_bit_equal(case, build(case, "float32"), [to_torch(x, "float32") for x in case.inputs()], mask)
    every_query = form in ("(Lk,)", "(N,1,1,Lk)")
    hidden = out[0] if every_query else out[0][:, 1]
    assert hidden.isfinite().all() if case.name == "SelfAttention" else hidden.isnan().all()
    if not every_query:
        assert out[0][:, 0].isfinite().all()


def test_a_mask_changes_the_output():
    for case in MAIN:
        module, inputs = build(case, "float32"), [to_torch(x, "float32") for x in case.inputs()]
        plain = leaves(module(*inputs, None))[0]
        assert not torch.equal(plain, leaves(module(*inputs, to_torch(mask_array(case, "(N,h,Lq,Lk)"))))[0])


def test_fully_hidden_query_of_the_second_document_averages_the_raw_values():
    case = MAIN[1]
    module, (values, keys, query) = build(case, "float32"), [to_torch(x, "float32") for x in case.inputs()]
    out = module(values, keys, query, torch.zeros(case.lq, case.lk))
    average = module.fc_out(values.mean(1, keepdim=True).expand(-1, case.lq, -1))
    torch.testing.assert_close(out, average, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", [MAIN[0], MAIN[2]], ids=["first", "third"])
def test_nan_gradients_of_a_fully_hidden_query_are_where_the_docstring_says(case):
    inputs = [to_torch(x, "float32") for x in case.inputs()]
    mask = to_torch(mask_array(case, "(Lq,Lk)", fully_hidden=True))
    _, gradients = assert_bit_equal(case, build(case, "float32"), inputs, mask)
    value, out = ("values.weight", "fc_out.weight") if case.hides_zero else ("W_v.weight", "W_o.weight")
    nan = {name for name, gradient in gradients.items() if gradient.isnan().all()}
    assert {"input 2", value, out} <= nan <= {"input 2", value, out, "W_v.bias"}
    assert all(g.isfinite().all() for name, g in gradients.items() if name not in nan)
    assert (gradients["input 0"][:, 1] == 0).all()
    assert (gradients["input 0"] != 0).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bit_equal_at_the_documents_demo_shape(dtype):
    for case in (
        Attention("Multi_Head_Self_Attention", {"embed_size": 512, "heads": 8}, 64, 10, 10),
        Attention("SelfAttention", {"embed_size": 512, "heads": 8}, 64, 10, 10),
        Attention("MultiHeadAttention", {"d_model": 512, "n_heads": 8}, 64, 10, 10),
    ):
        module, inputs = build(case, dtype), [to_torch(x, dtype) for x in case.inputs()]
        with torch.no_grad():
            out = leaves(module(*inputs, None))
            expected = leaves(ORACLE[case.name](module.state_dict(), 8, inputs, None))
        assert out[0].shape == (64, 10, 512)
        for a, b in zip(out, expected, strict=True):
            assert_same_bits(a, b)


# Heads one wide can be merged without a copy, but a product with the uncopied view has other last bits in float16.
@pytest.mark.parametrize(
    "case",
    [
        Attention("Multi_Head_Self_Attention", {"embed_size": 64, "heads": 64}, 1, 70, 70),
        Attention("MultiHeadAttention", mha(64, 64, 1, 1), 1, 70, 70),
    ],
    ids=["first", "third"],
)
def test_merged_heads_are_copied_as_in_the_documents(case):
    assert_bit_equal(case, build(case, "float16"), [to_torch(x, "float16") for x in case.inputs()], None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_core_function_is_bit_equal_and_leaves_its_arguments_alone(dtype):
    rng = random("core")
    Q, K, V = (to_torch(rng.standard_normal(s), dtype) for s in ((2, 3, 5, 48), (2, 3, 7, 48), (2, 3, 7, 4)))
    mask = to_torch(rng.random((2, 3, 5, 7)) < 0.4)
    before = [x.clone() for x in (Q, K, V, mask)]
    for a, b in zip(torch_impl.scaled_dot_product_attention(Q, K, V, mask), third_document_core(Q, K, V, mask)):
        assert_same_bits(a, b)
    assert all(torch.equal(x, y) for x, y in zip((Q, K, V, mask), before))


def test_the_core_function_broadcasts_batch_and_heads_as_the_document_does():
    rng = random("core broadcast")
    Q, K, V = (to_torch(rng.standard_normal(s), "float32") for s in ((2, 3, 5, 4), (1, 3, 7, 4), (2, 1, 7, 6)))
    for a, b in zip(torch_impl.scaled_dot_product_attention(Q, K, V), third_document_core(Q, K, V, None)):
        assert_same_bits(a, b)


def test_the_root_is_rounded_to_half_precision_before_it_divides():
    root = torch_impl.operations.rounded_sqrt(48, torch.zeros(1, dtype=torch.bfloat16))
    assert root.item() == 6.9375


def test_the_quirk_projections_of_the_second_document_change_nothing():
    case = MAIN[1]
    module, inputs = build(case, "float32"), [to_torch(x, "float32") for x in case.inputs()]
    out = module(*inputs, None)
    with torch.no_grad():
        for layer in (module.values, module.keys, module.queries):
            layer.weight.fill_(float("nan"))
    assert_same_bits(module(*inputs, None), out)
    out.sum().backward()
    assert [name for name, p in module.named_parameters() if p.grad is not None] == ["fc_out.weight", "fc_out.bias"]


def test_float16_with_a_mask_is_refused_by_the_second_document():
    case = MAIN[1]
    module, inputs = build(case, "float16"), [to_torch(x, "float16") for x in case.inputs()]
    assert module(*inputs, None).isfinite().all()
    with pytest.raises(RuntimeError, match="-1e\\+20, which float16 cannot hold"):
        module(*inputs, torch.ones(case.lq, case.lk))


@pytest.mark.parametrize("case", **main_ids)
def test_train_mode_of_attention_is_eval_mode(case):
    module, inputs = build(case, "float32"), [to_torch(x, "float32") for x in case.inputs()]
    for a, b in zip(leaves(module.train()(*inputs, None)), leaves(module.eval()(*inputs, None))):
        assert_same_bits(a, b)


# ---------------------------------------------------------------- feed-forward

FEED_FORWARD = [(6, 10, 0.1), (8, None, 0.5), (8, 8, 0.0), (4, 3, 1.0)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", FEED_FORWARD, ids=str)
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_feed_forward_is_bit_equal_with_the_same_draws(sizes, dtype, train, seed):
    module = fill(torch_impl.FeedForwardNetwork(*sizes), dtype, sizes).train(train)
    x = to_torch(random("ffn", sizes).standard_normal((3, 4, sizes[0])), dtype)
    found = []
    for call in (
        lambda state, x: torch.func.functional_call(module, state, (x,)),
        lambda state, x: third_document_feed_forward(state, x, sizes[2], train),
    ):
        state = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
        leaf = x.clone().requires_grad_()
        torch.manual_seed(seed)
        out = call(state, leaf)
        (out * out.detach().cos()).sum().backward()
        found.append([out, leaf.grad, *(p.grad for p in state.values())])
    for a, b in zip(*found, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_feed_forward_with_no_argument_is_the_documents(train, seed):
    module = fill(torch_impl.FeedForwardNetwork(), "float32").train(train)
    x = to_torch(random("ffn default").standard_normal((2, 5, 512)), "float32")
    torch.manual_seed(seed)
    out = module(x)
    torch.manual_seed(seed)
    expected = third_document_feed_forward(module.state_dict(), x, 0.1, train)
    assert_same_bits(out, expected)
    dropped = (out == 0).double().mean().item()
    assert abs(dropped - 0.1 * train) < 0.05


def test_feed_forward_has_dropout_behind_both_projections():
    module = torch_impl.FeedForwardNetwork(6, 10, p_drop=0.3)
    assert [type(layer) for layer in module.model] == [
        torch_impl.Linear,
        torch_impl.ReLU,
        torch_impl.Dropout,
        torch_impl.Linear,
        torch_impl.Dropout,
    ]
    assert [module.model[i].p for i in (2, 4)] == [0.3, 0.3]


# ---------------------------------------------------------------- the oracle can fail


def test_a_few_ulps_in_one_weight_are_seen():
    case = MAIN[0]
    module, inputs = build(case, "float64"), [to_torch(x, "float64") for x in case.inputs()]
    expected = first_document({k: v.clone() for k, v in module.state_dict().items()}, case.heads, inputs, None)
    with torch.no_grad():
        # One ulp alone may be rounded away in all ten rows.
        w = module.fc_out.weight.view(-1)
        w[w.abs().argmax()] *= 1 + 2.0**-49
    with pytest.raises(AssertionError, match="largest difference"):
        assert_same_bits(module(*inputs, None), expected)
