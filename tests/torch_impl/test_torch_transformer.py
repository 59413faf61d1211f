"""The Transformer of the torch wing against bare torch operations, bit for bit, and against torch.nn with the same weights."""

import functools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import DTYPES, assert_same_bits, fill, random, to_torch
from test_torch_documents import affine, heads_apart, heads_together, third_document_core
from test_torch_layers import turned
from transformer_cases import LT, N_SOURCE, N_TARGET, OPTIONS, PATTERNS, SIZES, ids, mask_of, states

import torch_impl
from torch_impl import TransformerConfig, greedy_decode

options = pytest.mark.parametrize("chosen", OPTIONS.values(), ids=OPTIONS)


def config(**chosen):
    return TransformerConfig(**SIZES, **chosen)


def transformer(chosen, dtype="float64", **more):
    return fill(torch_impl.Transformer(N_SOURCE, N_TARGET, config(**chosen), **more), dtype, *chosen).eval()


def tensors(arrays, dtype=None):
    return [to_torch(x, dtype) for x in arrays]


# ---------------------------------------------------------------- the oracle: a state dict and bare operations


def under(state, prefix):
    return {name.removeprefix(prefix + "."): p for name, p in state.items() if name.startswith(prefix + ".")}


def norm(state, c, name, x):
    if f"{name}.weight" not in state:
        return x
    if c.norm == "rms":
        return F.rms_norm(x, x.shape[-1:], state[f"{name}.weight"], c.eps)
    return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], c.eps)


def attention(state, c, name, query, memory, mask):
    state, groups = under(state, name), c.n_kv_heads or c.n_heads
    Q = heads_apart(affine(state, "W_q", query), c.n_heads)
    K, V = (heads_apart(affine(state, W, memory), groups) for W in ("W_k", "W_v"))
    if c.positions == "rotary" and name == "self_attention":
        Q, K = turned(Q).to(Q.dtype), turned(K).to(K.dtype)
    K, V = (x.repeat_interleave(c.n_heads // groups, 1) for x in (K, V))
    return affine(state, "W_o", heads_together(third_document_core(Q, K, V, mask)[0]))


def feed_forward(state, c, x):
    gelu = functools.partial(F.gelu, approximate="tanh" if c.activation == "gelu_tanh" else "none")
    wide = (F.relu if c.activation == "relu" else gelu)(affine(state, "feed_forward.model.0", x))
    return affine(state, "feed_forward.model.3", wide)


def residual(state, c, name, x, sublayer):
    """Section 3.1, or Xiong et al. 2020, figure 1 (b)."""
    return x + sublayer(norm(state, c, name, x)) if c.norm_first else norm(state, c, name, x + sublayer(x))


def encoder_layer(state, c, x, mask):
    x = residual(state, c, "norm1", x, lambda y: attention(state, c, "self_attention", y, y, mask))
    return residual(state, c, "norm2", x, lambda y: feed_forward(state, c, y))


def decoder_layer(state, c, x, memory, mask, memory_mask):
    x = residual(state, c, "norm1", x, lambda y: attention(state, c, "self_attention", y, y, mask))
    x = residual(state, c, "norm2", x, lambda y: attention(state, c, "cross_attention", y, memory, memory_mask))
    return residual(state, c, "norm3", x, lambda y: feed_forward(state, c, y))


def stack(state, c, layer, x, *rest):
    for i in range(c.n_layers):
        x = layer(under(state, f"layers.{i}"), c, x, *rest)
    return norm(state, c, "norm", x)


def embedded(state, c, name, tokens):
    x = F.embedding(tokens, state[f"{name}.weight"]) * math.sqrt(c.d_model)
    if c.positions == "rotary":
        return x
    # Tested against the paper's formula by itself.
    return x + torch.from_numpy(torch_impl.positions.sinusoids(c.max_len, c.d_model))[: tokens.shape[1]].to(x.dtype)


def whole(state, c, source, target):
    hidden = to_torch(mask_of("padding", source.numpy(), 1))
    memory = stack(under(state, "encoder"), c, encoder_layer, embedded(state, c, "source_embedding", source), hidden)
    mask = to_torch(mask_of("both", target.numpy(), target.shape[1]))
    x = embedded(state, c, "target_embedding", target)
    x = stack(under(state, "decoder"), c, decoder_layer, x, memory, mask, hidden)
    return affine(state, "output", x) if "output.weight" in state else x @ state["target_embedding.weight"].T


def assert_agrees(module, c, oracle, *args):
    """Outputs and gradients: every bit, but where the oracle turns with complex numbers."""
    found = []
    for call in (
        lambda state, *xs: torch.func.functional_call(module, state, xs),
        lambda state, *xs: oracle(state, c, *xs),
    ):
        state = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
        xs = [x.clone().requires_grad_(x.is_floating_point()) if x is not None else None for x in args]
        out = call(state, *xs)
        out.backward(to_torch(random("cotangent").standard_normal(out.shape)).to(out.dtype))
        leaves = [p for p in (*xs, *state.values()) if p is not None and p.requires_grad]
        assert all(p.grad is not None for p in leaves)
        found.append([out.detach(), *(p.grad for p in leaves)])
    for a, b in zip(*found, strict=True):
        assert b.isfinite().all()
        if c.positions == "rotary":
            torch.testing.assert_close(a, b, rtol=0, atol={8: 1e-11, 4: 1e-3}[a.element_size()])
        else:
            assert_same_bits(a, b)


@options
@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_encoder_layer_is_the_papers_bit_for_bit(chosen, pattern):
    c, (x, _) = config(**chosen), states()
    module = fill(torch_impl.EncoderLayer(c), "float64", *chosen)
    assert_agrees(module.eval(), c, encoder_layer, *tensors([x]), optional(mask_of(pattern, ids()[1], LT)))


@options
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_decoder_layer_is_the_papers_bit_for_bit(chosen, pattern):
    c = config(**chosen)
    source, target = ids()
    module = fill(torch_impl.DecoderLayer(c), "float64", *chosen).eval()
    masks = [optional(mask_of(pattern, target, LT)), optional(mask_of(pattern, source, LT))]
    assert_agrees(module, c, decoder_layer, *tensors(states()), *masks)


def optional(mask):
    return None if mask is None else to_torch(mask)


@options
@pytest.mark.parametrize("tied", [False, True], ids=["output", "tied"])
def test_the_transformer_is_the_papers_bit_for_bit(chosen, tied):
    assert_agrees(transformer(chosen, tied=tied), config(**chosen), whole, *tensors(ids()))


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != "float64"])
@pytest.mark.parametrize("name", ["paper", "pre-norm, gelu, bias", "rms, tanh gelu"])
def test_the_transformer_is_the_papers_bit_for_bit_in_other_dtypes(name, dtype):
    module = transformer(OPTIONS[name], dtype)
    assert_agrees(module, config(**OPTIONS[name]), whole, *tensors(ids("int32")))
    assert module(*tensors(ids())).dtype == getattr(torch, dtype)


def test_the_encoder_and_the_decoder_alone():
    c, (x, memory) = config(norm_first=True), tensors(states())
    encoder, decoder = (fill(kind(c), "float64").eval() for kind in (torch_impl.Encoder, torch_impl.Decoder))
    assert_same_bits(encoder(x), stack(encoder.state_dict(), c, encoder_layer, x, None))
    assert_same_bits(decoder(x, memory), stack(decoder.state_dict(), c, decoder_layer, x, memory, None, None))


# ---------------------------------------------------------------- torch.nn with the same weights

NN_OPTIONS = [
    dict(norm_first=norm_first, activation=activation, bias=True, final_norm=True, eps=eps)
    for norm_first, activation, eps in (
        (False, "relu", 1e-5),
        (True, "gelu", 1e-5),
        (False, "gelu", 1e-2),
        (True, "relu", 1e-2),
    )
]
nn_options = pytest.mark.parametrize("chosen", NN_OPTIONS, ids=["post relu", "pre gelu", "post gelu eps", "pre relu eps"])


def into_torchs_attention(state, ours, theirs):
    found = {}
    for leaf in ("weight", "bias"):
        found[f"{theirs}.in_proj_{leaf}"] = torch.cat([state[f"{ours}.{W}.{leaf}"] for W in ("W_q", "W_k", "W_v")])
        found[f"{theirs}.out_proj.{leaf}"] = state[f"{ours}.W_o.{leaf}"]
    return found


def into_torchs_layer(state, prefix=""):
    """A layer's state dict under torch.nn's names."""
    state = under(state, prefix) if prefix else state
    found = into_torchs_attention(state, "self_attention", "self_attn")
    if "cross_attention.W_q.weight" in state:
        found |= into_torchs_attention(state, "cross_attention", "multihead_attn")
    for leaf in ("weight", "bias"):
        found |= {f"linear{i}.{leaf}": state[f"feed_forward.model.{j}.{leaf}"] for i, j in ((1, 0), (2, 3))}
        found |= {f"norm{i}.{leaf}": state[f"norm{i}.{leaf}"] for i in (1, 2, 3) if f"norm{i}.{leaf}" in state}
    return found


def torchs_layer(kind, chosen):
    made = dict(dim_feedforward=SIZES["d_ff"], activation=chosen["activation"], layer_norm_eps=chosen["eps"])
    made |= dict(norm_first=chosen["norm_first"], batch_first=True, dropout=0.0, dtype=torch.float64)
    return kind(SIZES["d_model"], SIZES["n_heads"], **made)


def assert_near(actual, expected):
    assert actual.dtype == expected.dtype == torch.float64
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


# Gradients stay wanted: without them torch.nn takes kernels that put zeros at padded places.
@nn_options
@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_encoder_layer_against_torch_nn(chosen, pattern):
    ours = fill(torch_impl.EncoderLayer(config(**chosen)), "float64").eval()
    theirs = torchs_layer(torch.nn.TransformerEncoderLayer, chosen).eval()
    theirs.load_state_dict(into_torchs_layer(ours.state_dict()))
    (x, _), (_, target) = tensors(states()), tensors(ids())
    given = torchs_masks(pattern, target)
    expected = theirs(x, src_mask=given[0], src_key_padding_mask=given[1])
    assert_near(ours(x, optional(mask_of(pattern, target.numpy(), LT))), expected)


def torchs_masks(pattern, keys):
    """Causal and padding mask as torch.nn takes them."""
    causal = torch.ones(LT, keys.shape[1]).triu(1).bool() if pattern in ("causal", "both") else None
    return causal, (keys == 0 if pattern in ("padding", "both") else None)


@nn_options
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_decoder_layer_against_torch_nn(chosen, pattern):
    ours = fill(torch_impl.DecoderLayer(config(**chosen)), "float64").eval()
    theirs = torchs_layer(torch.nn.TransformerDecoderLayer, chosen).eval()
    theirs.load_state_dict(into_torchs_layer(ours.state_dict()))
    (x, memory), (source, target) = tensors(states()), tensors(ids())
    (mask, padding), (memory_mask, memory_padding) = torchs_masks(pattern, target), torchs_masks(pattern, source)
    expected = theirs(x, memory, mask, memory_mask, padding, memory_padding)
    masks = [optional(mask_of(pattern, keys.numpy(), LT)) for keys in (target, source)]
    assert_near(ours(x, memory, *masks), expected)


@nn_options
@pytest.mark.parametrize("tied", [False, True], ids=["output", "tied"])
def test_the_transformer_against_torch_nn(chosen, tied):
    ours = transformer(chosen, tied=tied)
    state = ours.state_dict()
    layers = [torchs_layer(kind, chosen) for kind in (torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer)]
    norms = [torch.nn.LayerNorm(SIZES["d_model"], chosen["eps"], dtype=torch.float64) for _ in range(2)]
    encoder = torch.nn.TransformerEncoder(layers[0], SIZES["n_layers"], norms[0], enable_nested_tensor=False)
    decoder = torch.nn.TransformerDecoder(layers[1], SIZES["n_layers"], norms[1])
    theirs = torch.nn.Transformer(SIZES["d_model"], custom_encoder=encoder, custom_decoder=decoder, batch_first=True).eval()
    renamed = {}
    for side in ("encoder", "decoder"):
        for i in range(SIZES["n_layers"]):
            layer = into_torchs_layer(state, f"{side}.layers.{i}")
            renamed |= {f"{side}.layers.{i}.{name}": p for name, p in layer.items()}
        renamed |= {f"{side}.norm.{leaf}": state[f"{side}.norm.{leaf}"] for leaf in ("weight", "bias")}
    theirs.load_state_dict(renamed)
    source, target = tensors(ids())
    out = theirs(
        *(
            embedded(state, config(**chosen), name, x)
            for name, x in (("source_embedding", source), ("target_embedding", target))
        ),
        tgt_mask=theirs.generate_square_subsequent_mask(LT, dtype=torch.float64).isinf(),
        src_key_padding_mask=source == 0,
        tgt_key_padding_mask=target == 0,
        memory_key_padding_mask=source == 0,
    )
    expected = out @ state["target_embedding.weight"].T if tied else affine(state, "output", out)
    assert_near(ours(source, target), expected)


# ---------------------------------------------------------------- what the masks promise


@options
def test_what_is_hidden_changes_nothing(chosen):
    model = transformer(chosen)
    source, target = tensors(ids())
    scores = model(source, target)
    later = target.clone()
    later[:, 4] = target[:, 4] % 12 + 1
    # The row without padding: its last token is seen by the last query alone.
    torch.testing.assert_close(model(source, later)[1, :4], scores[1, :4], rtol=0, atol=1e-12)
    assert not torch.allclose(model(source, later)[1, 4], scores[1, 4])
    longer = F.pad(source, (0, 3))
    torch.testing.assert_close(model(longer, target), scores, rtol=0, atol=1e-12)
    # A source without its padding, alone.
    torch.testing.assert_close(model(source[1:2, :4], target[1:2]), scores[1:2], rtol=0, atol=1e-12)


def test_a_source_of_padding_alone_gives_nan_in_its_own_row():
    source, target = tensors(ids())
    source[1] = 0
    scores = transformer({})(source, target)
    assert scores[1].isnan().all()
    assert scores[[0, 2]].isfinite().all()


def test_another_padding_token():
    model, (source, target) = transformer({}, pad=9), tensors(ids())
    source, target = (torch.where(x == 9, 1, x) for x in (source, target))
    plain = transformer({})
    plain.load_state_dict(model.state_dict())
    moved = [torch.where(x == 0, 9, x) for x in (source, target)]
    hidden = target == 0
    torch.testing.assert_close(model(*moved)[~hidden], plain(source, target)[~hidden], rtol=0, atol=1e-12)


# ---------------------------------------------------------------- dropout


def test_dropout_stands_where_the_paper_has_it(seed):
    """Behind each embedding, behind each sublayer, and behind the hidden layer of each feed-forward network."""
    model = transformer(dict(p_drop=0.5, p_attention=0.25)).train()
    drops = {name for name, m in model.named_modules() if isinstance(m, torch_impl.Dropout)}
    each = {"encoder": ["dropout"], "decoder": ["dropout1", "dropout2"]}
    each["encoder"] += ["self_attention.attention.dropout", "feed_forward.model.2", "feed_forward.model.4"]
    each["decoder"] += [*each["encoder"][1:], "cross_attention.attention.dropout"]
    layers = {f"{side}.layers.{i}.{name}" for side, names in each.items() for i in (0, 1) for name in names}
    assert drops == {"source_dropout", "target_dropout"} | layers
    assert {m.p for m in model.modules() if isinstance(m, torch_impl.Dropout)} == {0.5, 0.25}
    torch.manual_seed(seed)
    first = model(*tensors(ids()))
    assert not torch.equal(first, model(*tensors(ids())))
    torch.manual_seed(seed)
    assert_same_bits(model(*tensors(ids())), first)


class ContiguousDropout(torch.nn.Dropout):
    """A mask is drawn in the order of memory, and torch.nn's attention returns a transposed view."""

    def forward(self, input):
        return super().forward(input.contiguous())


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
def test_a_layer_in_train_mode_is_torch_nns_under_the_same_draws(norm_first, seed):
    """The masks are drawn in the same order from the same stream, so that the layers drop the same elements."""
    chosen = dict(norm_first=norm_first, activation="relu", bias=True, eps=1e-5)
    (x, memory), drops = tensors(states()), 0.3
    for ours, kind, args in (
        (torch_impl.EncoderLayer, torch.nn.TransformerEncoderLayer, [x]),
        (torch_impl.DecoderLayer, torch.nn.TransformerDecoderLayer, [x, memory]),
    ):
        layer = fill(ours(config(**chosen, p_drop=drops)), "float64").train()
        theirs = torchs_layer(kind, chosen)
        theirs.load_state_dict(into_torchs_layer(layer.state_dict()))
        # torch.nn gives its rate to the attention weights too; that has an option of its own here.
        for name, m in theirs.named_children():
            if isinstance(m, torch.nn.Dropout):
                setattr(theirs, name, ContiguousDropout(drops))
        torch.manual_seed(seed)
        expected = theirs(*args)
        torch.manual_seed(seed)
        assert_near(layer(*args), expected)


# ---------------------------------------------------------------- decoding


@options
def test_token_by_token_the_cache_gives_the_scores_of_the_whole_target(chosen):
    model, (source, target) = transformer(chosen), tensors(ids())
    with torch.no_grad():
        memory, hidden = model.encode(source), torch_impl.padding_mask(source, 0)
        expected = model.decode(target, memory, hidden)
        caches, masks = model.decoder.start(memory, LT), mask_of("both", target.numpy(), LT)
        for i in range(LT):
            x = model.embed(model.target_embedding, target[:, i : i + 1], i)
            x, caches = model.decoder.step(x, caches, i, to_torch(masks[:, :, i : i + 1]), hidden)
            torch.testing.assert_close(model.scores(x), expected[:, i : i + 1], rtol=0, atol=1e-12)


def by_hand(model, c, source, start, max_new):
    """One sequence after another, longer by one token at each step: no padding, no cache, and not the model's own code."""
    state, rows = model.state_dict(), []
    for row in source:
        tokens = [start]
        for _ in range(max_new):
            tokens.append(int(whole(state, c, row[row != 0][None], torch.tensor([tokens]))[0, -1].argmax()))
        rows.append(tokens)
    return torch.tensor(rows)


def ended_by(stop, tokens):
    """Padding behind the first token that ends each row, the start apart."""
    behind = (tokens[:, 1:-1] == stop).cumsum(1) > 0
    tokens = tokens.clone()
    tokens[:, 2:][behind] = 0
    return tokens


NEVER = 12  # a token that `speaking` models do not say


def speaking(chosen, **more):
    """A model that says many tokens, but neither padding nor `NEVER`."""
    model = transformer(chosen, **more)
    with torch.no_grad():
        for name, p in model.named_parameters():
            # Random shifts would outshout what is read: one token would be the likeliest everywhere.
            if name.endswith("bias"):
                p.zero_()
            elif ".W_" in name:
                p.mul_(3)
        silent = [0, NEVER]
        if model.output is None:
            model.target_embedding.weight[silent] = 0
        else:
            model.output.weight[silent], model.output.bias[silent] = 0, -20
    return model


@pytest.mark.parametrize("name", ["paper", "pre-norm, no final norm", "rms, tanh gelu", "rotary, one key head"])
@pytest.mark.parametrize("tied", [False, True], ids=["output", "tied"])
def test_greedy_decoding_with_and_without_a_cache_is_decoding_by_hand(name, tied):
    model, source = speaking(OPTIONS[name], tied=tied), tensors(ids())[0]
    said = by_hand(model, config(**OPTIONS[name]), source, 1, 6)
    assert (said != 0).all()
    # A token that is never said, and one that is; where it begins the target it does not end it.
    for stop, use_cache in ((NEVER, True), (NEVER, False), (int(said[0, 3]), True), (int(said[0, 3]), False), (1, True)):
        found = greedy_decode(model, source, start=1, stop=stop, max_new=6, use_cache=use_cache)
        assert found.dtype == source.dtype
        assert torch.equal(found, ended_by(stop, said))


def test_the_models_of_these_tests_say_more_than_one_token():
    source = tensors(ids())[0]
    said = [by_hand(speaking(chosen), config(**chosen), source, 1, 6) for chosen in OPTIONS.values()]
    assert np.mean([len(tokens.unique()) for tokens in said]) >= 3


def test_padding_that_the_model_chooses_ends_a_target():
    model, source = transformer({}), tensors(ids())[0]
    with torch.no_grad():
        model.output.bias[0] = 1e3
    for use_cache in (True, False):
        found = greedy_decode(model, source, start=1, stop=2, max_new=4, use_cache=use_cache)
        assert found.tolist() == [[1, 0, 0, 0, 0]] * 3


def test_a_cache_takes_as_many_tokens_as_the_model_has_positions():
    model, source = speaking({}), tensors(ids())[0]
    found = greedy_decode(model, source, start=1, stop=1, max_new=16)
    assert found.shape == (3, 17)
    with pytest.raises(torch_impl.InputError, match="17 positions are wanted and max_len is 16"):
        greedy_decode(model, source, start=1, stop=1, max_new=17)


def test_decoding_keeps_no_graph_and_leaves_source_and_caches_alone():
    model, source = speaking({}), tensors(ids())[0]
    before = source.clone()
    assert not greedy_decode(model, source, start=1, stop=2, max_new=3).requires_grad
    assert torch.equal(source, before)
    memory = model.encode(source)
    cache = model.decoder.start(memory, 4)
    x = model.embed(model.target_embedding, source[:, :1])
    model.decoder.step(x, cache, 0, torch.zeros(1, 1, 1, 4, dtype=torch.bool))
    assert not cache[0].keys.any()
    assert [c.keys.shape for c in cache] == [(3, 3, 4, 4)] * 2


def test_a_grouped_cache_holds_the_shared_heads_alone():
    model = transformer(OPTIONS["rotary, one key head"])
    cache = model.decoder.start(model.encode(tensors(ids())[0]), 4)[0]
    assert cache.keys.shape == cache.values.shape == (3, 1, 4, 4)
    assert cache.memory_keys.shape == (3, 1, 7, 4)
