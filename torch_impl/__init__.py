"""The reference in PyTorch, one layer a file. `jax_impl` mirrors it file by file."""

from torch_impl.checks import InputError as InputError
from torch_impl.feed_forward_network import FeedForwardNetwork as FeedForwardNetwork
from torch_impl.layers import Dropout as Dropout
from torch_impl.layers import Linear as Linear
from torch_impl.layers import ReLU as ReLU
from torch_impl.multi_head_attention import MultiHeadAttention as MultiHeadAttention
from torch_impl.multi_head_self_attention import Multi_Head_Self_Attention as Multi_Head_Self_Attention
from torch_impl.scaled_dot_product_attention import ScaledDotProductAttention as ScaledDotProductAttention
from torch_impl.scaled_dot_product_attention import scaled_dot_product_attention as scaled_dot_product_attention
from torch_impl.self_attention import SelfAttention as SelfAttention
