"""The mirror in Flax NNX of `torch_impl`, file by file and name by name."""

from jax_impl.checks import InputError as InputError
from jax_impl.config import TransformerConfig as TransformerConfig
from jax_impl.decoder import Decoder as Decoder
from jax_impl.decoder import DecoderLayer as DecoderLayer
from jax_impl.decoder import KeyValueCache as KeyValueCache
from jax_impl.encoder import Encoder as Encoder
from jax_impl.encoder import EncoderLayer as EncoderLayer
from jax_impl.feed_forward_network import FeedForwardNetwork as FeedForwardNetwork
from jax_impl.layers import GELU as GELU
from jax_impl.layers import Dropout as Dropout
from jax_impl.layers import Embedding as Embedding
from jax_impl.layers import LayerNorm as LayerNorm
from jax_impl.layers import Linear as Linear
from jax_impl.layers import ReLU as ReLU
from jax_impl.layers import RMSNorm as RMSNorm
from jax_impl.masks import causal_mask as causal_mask
from jax_impl.masks import padding_mask as padding_mask
from jax_impl.multi_head_attention import MultiHeadAttention as MultiHeadAttention
from jax_impl.multi_head_self_attention import Multi_Head_Self_Attention as Multi_Head_Self_Attention
from jax_impl.positions import RotaryPositions as RotaryPositions
from jax_impl.positions import SinusoidalPositions as SinusoidalPositions
from jax_impl.scaled_dot_product_attention import ScaledDotProductAttention as ScaledDotProductAttention
from jax_impl.scaled_dot_product_attention import scaled_dot_product_attention as scaled_dot_product_attention
from jax_impl.self_attention import SelfAttention as SelfAttention
from jax_impl.transformer import Transformer as Transformer
from jax_impl.transformer import greedy_decode as greedy_decode
