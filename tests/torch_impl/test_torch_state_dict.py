"""Names, order and shapes of the parameters are those that the documents save."""

import inspect

import pytest
import torch
from helpers import fill

import torch_impl

E, H, D = 12, 3, 4
CONFIG = torch_impl.TransformerConfig(d_model=8, n_heads=2, n_layers=2, d_ff=12)
INNER = {
    "feed_forward.model.0.weight": (12, 8),
    "feed_forward.model.0.bias": (12,),
    "feed_forward.model.3.weight": (8, 12),
    "feed_forward.model.3.bias": (8,),
}


def attention(name):
    return {f"{name}.{W}.weight": (8, 8) for W in ("W_q", "W_k", "W_v", "W_o")}


def norms(count):
    return {f"norm{i + 1}.{leaf}": (8,) for i in range(count) for leaf in ("weight", "bias")}


ENCODER_LAYER = {**attention("self_attention"), **INNER, **norms(2)}
DECODER_LAYER = {**attention("self_attention"), **attention("cross_attention"), **INNER, **norms(3)}


def grouped(layer):
    """The same with one key head for two, RMS norms, and a feed-forward network of the default width."""
    found = {}
    for name, shape in layer.items():
        if "W_k" in name or "W_v" in name:
            found[name] = (4, 8)
        elif not (name.startswith("norm") and name.endswith("bias")):
            found[name] = tuple(32 if size == 12 else size for size in shape)
    return found


LAYOUT = {
    "first": (
        lambda: torch_impl.Multi_Head_Self_Attention(E, H),
        {"queries.weight": (E, E), "keys.weight": (E, E), "values.weight": (E, E), "fc_out.weight": (E, E)},
    ),
    "second": (
        lambda: torch_impl.SelfAttention(E, H),
        {
            "values.weight": (E, D),
            "keys.weight": (E, D),
            "queries.weight": (E, D),
            "fc_out.weight": (E, E),
            "fc_out.bias": (E,),
        },
    ),
    "third": (
        lambda: torch_impl.MultiHeadAttention(10, 3, 5, 5, 4),
        {"W_q.weight": (15, 10), "W_k.weight": (15, 10), "W_v.weight": (12, 10), "W_o.weight": (10, 12)},
    ),
    "third, bias": (
        lambda: torch_impl.MultiHeadAttention(10, 3, 5, 5, 4, bias=True),
        {
            "W_q.weight": (15, 10),
            "W_q.bias": (15,),
            "W_k.weight": (15, 10),
            "W_k.bias": (15,),
            "W_v.weight": (12, 10),
            "W_v.bias": (12,),
            "W_o.weight": (10, 12),
            "W_o.bias": (10,),
        },
    ),
    "third, bias on W_o alone": (
        lambda: torch_impl.MultiHeadAttention(10, 3, 5, 5, 4, output_bias=True),
        {
            "W_q.weight": (15, 10),
            "W_k.weight": (15, 10),
            "W_v.weight": (12, 10),
            "W_o.weight": (10, 12),
            "W_o.bias": (10,),
        },
    ),
    "third, bias on all but W_o": (
        lambda: torch_impl.MultiHeadAttention(10, 3, 5, 5, 4, bias=True, output_bias=False),
        {
            "W_q.weight": (15, 10),
            "W_q.bias": (15,),
            "W_k.weight": (15, 10),
            "W_k.bias": (15,),
            "W_v.weight": (12, 10),
            "W_v.bias": (12,),
            "W_o.weight": (10, 12),
        },
    ),
    "third, no argument": (
        torch_impl.MultiHeadAttention,
        {"W_q.weight": (512, 512), "W_k.weight": (512, 512), "W_v.weight": (512, 512), "W_o.weight": (512, 512)},
    ),
    "feed-forward": (
        lambda: torch_impl.FeedForwardNetwork(6, 10),
        {"model.0.weight": (10, 6), "model.0.bias": (10,), "model.3.weight": (6, 10), "model.3.bias": (6,)},
    ),
    "feed-forward, no argument": (
        torch_impl.FeedForwardNetwork,
        {"model.0.weight": (2048, 512), "model.0.bias": (2048,), "model.3.weight": (512, 2048), "model.3.bias": (512,)},
    ),
    "encoder layer": (lambda: torch_impl.EncoderLayer(CONFIG), ENCODER_LAYER),
    "Transformer, tied": (
        lambda: torch_impl.Transformer(5, 6, CONFIG, tied=True),
        {
            "source_embedding.weight": (5, 8),
            "target_embedding.weight": (6, 8),
            **{f"encoder.layers.{i}.{name}": shape for i in (0, 1) for name, shape in ENCODER_LAYER.items()},
            **{f"decoder.layers.{i}.{name}": shape for i in (0, 1) for name, shape in DECODER_LAYER.items()},
        },
    ),
    "Transformer, with norms at the end": (
        lambda: torch_impl.Transformer(5, 6, torch_impl.TransformerConfig(8, 2, 1, norm_first=True, norm="rms", n_kv_heads=1)),
        {
            "source_embedding.weight": (5, 8),
            "target_embedding.weight": (6, 8),
            **{f"encoder.layers.0.{name}": shape for name, shape in grouped(ENCODER_LAYER).items()},
            "encoder.norm.weight": (8,),
            **{f"decoder.layers.0.{name}": shape for name, shape in grouped(DECODER_LAYER).items()},
            "decoder.norm.weight": (8,),
            "output.weight": (6, 8),
            "output.bias": (6,),
        },
    ),
}
layouts = pytest.mark.parametrize(("make", "layout"), LAYOUT.values(), ids=LAYOUT)


@layouts
def test_keys_order_and_shapes(make, layout):
    module = make()
    assert [(name, tuple(p.shape)) for name, p in module.state_dict().items()] == list(layout.items())
    assert [name for name, _ in module.named_parameters()] == list(layout)


@layouts
def test_a_documents_state_dict_loads_strictly(make, layout):
    saved = {name: torch.randn(shape) for name, shape in layout.items()}
    module = make()
    assert str(module.load_state_dict(saved, strict=True)) == "<All keys matched successfully>"
    assert all(torch.equal(module.state_dict()[name], value) for name, value in saved.items())


def test_strict_loading_notices_a_missing_and_a_foreign_key():
    saved = dict(torch_impl.SelfAttention(E, H).state_dict())
    saved["queries.bias"] = saved.pop("queries.weight")
    with pytest.raises(RuntimeError, match=r"Missing key.*queries\.weight.*\n.*Unexpected key.*queries\.bias"):
        torch_impl.SelfAttention(E, H).load_state_dict(saved, strict=True)


@pytest.mark.parametrize(
    ("call", "order"),
    [
        (torch_impl.Multi_Head_Self_Attention.forward, ["queries", "keys", "values", "mask"]),
        (torch_impl.SelfAttention.forward, ["values", "keys", "query", "mask"]),
        (torch_impl.MultiHeadAttention.forward, ["query", "key", "value", "mask"]),
        (torch_impl.scaled_dot_product_attention, ["Q", "K", "V", "mask"]),
        (torch_impl.FeedForwardNetwork.forward, ["x"]),
        (torch_impl.EncoderLayer.forward, ["x", "mask"]),
        (torch_impl.DecoderLayer.forward, ["x", "memory", "mask", "memory_mask"]),
        (torch_impl.Transformer.forward, ["source", "target"]),
        (torch_impl.Multi_Head_Self_Attention.__init__, ["embed_size", "heads"]),
        (torch_impl.SelfAttention.__init__, ["embed_size", "heads"]),
    ],
)
def test_call_order_is_the_documents(call, order):
    ours = {"self", "need_weights", "dropout"}
    assert [name for name in inspect.signature(call).parameters if name not in ours] == order


def test_untouched_weights_are_torchs_own_draws(seed):
    torch.manual_seed(seed)
    module = torch_impl.MultiHeadAttention(10, 2, 3, 3, 4, bias=True)
    torch.manual_seed(seed)
    plain = [torch.nn.Linear(10, 6), torch.nn.Linear(10, 6), torch.nn.Linear(10, 8), torch.nn.Linear(8, 10)]
    drawn = [p for layer in plain for p in (layer.weight, layer.bias)]
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), drawn, strict=True))


def test_deep_copy_and_round_trip_through_a_file(tmp_path):
    module = fill(torch_impl.MultiHeadAttention(10, 2, 3, 3, 4, bias=True), "float32")
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    other = torch_impl.MultiHeadAttention(10, 2, 3, 3, 4, bias=True)
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))
