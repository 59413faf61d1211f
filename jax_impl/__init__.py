"""The mirror in Flax NNX of `torch_impl`, file by file and name by name."""

from jax_impl.checks import InputError as InputError
from jax_impl.feed_forward_network import FeedForwardNetwork as FeedForwardNetwork
from jax_impl.layers import Dropout as Dropout
from jax_impl.layers import Linear as Linear
from jax_impl.layers import ReLU as ReLU
from jax_impl.multi_head_attention import MultiHeadAttention as MultiHeadAttention
from jax_impl.multi_head_self_attention import Multi_Head_Self_Attention as Multi_Head_Self_Attention
from jax_impl.scaled_dot_product_attention import ScaledDotProductAttention as ScaledDotProductAttention
from jax_impl.scaled_dot_product_attention import scaled_dot_product_attention as scaled_dot_product_attention
from jax_impl.self_attention import SelfAttention as SelfAttention
