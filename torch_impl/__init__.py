"""The reference in PyTorch, one layer a file. `jax_impl` mirrors it file by file."""

from torch_impl.checks import InputError as InputError
from torch_impl.config import TransformerConfig as TransformerConfig
from torch_impl.decoder import Decoder as Decoder
from torch_impl.decoder import DecoderLayer as DecoderLayer
from torch_impl.decoder import KeyValueCache as KeyValueCache
from torch_impl.encoder import Encoder as Encoder
from torch_impl.encoder import EncoderLayer as EncoderLayer
from torch_impl.feed_forward_network import FeedForwardNetwork as FeedForwardNetwork
from torch_impl.layers import GELU as GELU
from torch_impl.layers import Dropout as Dropout
from torch_impl.layers import Embedding as Embedding
from torch_impl.layers import LayerNorm as LayerNorm
from torch_impl.layers import Linear as Linear
from torch_impl.layers import ReLU as ReLU
from torch_impl.layers import RMSNorm as RMSNorm
from torch_impl.masks import causal_mask as causal_mask
from torch_impl.masks import padding_mask as padding_mask
from torch_impl.multi_head_attention import MultiHeadAttention as MultiHeadAttention
from torch_impl.multi_head_self_attention import Multi_Head_Self_Attention as Multi_Head_Self_Attention
from torch_impl.positions import RotaryPositions as RotaryPositions
from torch_impl.positions import SinusoidalPositions as SinusoidalPositions
from torch_impl.scaled_dot_product_attention import ScaledDotProductAttention as ScaledDotProductAttention
from torch_impl.scaled_dot_product_attention import scaled_dot_product_attention as scaled_dot_product_attention
from torch_impl.self_attention import SelfAttention as SelfAttention
from torch_impl.transformer import Transformer as Transformer
from torch_impl.transformer import greedy_decode as greedy_decode
