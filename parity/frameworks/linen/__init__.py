"""Flax Linen in the words of this package: the door of its room."""

from parity.frameworks.jax.arrays import is_array as is_array
from parity.frameworks.jax.arrays import unreadable as unreadable
from parity.frameworks.linen.leaves import NAME as NAME
from parity.frameworks.linen.leaves import fill as fill
from parity.frameworks.linen.leaves import is_model as is_model
from parity.frameworks.linen.leaves import kinds as kinds
from parity.frameworks.linen.leaves import layers as layers
from parity.frameworks.linen.leaves import leaves as leaves
from parity.frameworks.linen.leaves import model_dtype as model_dtype
from parity.frameworks.linen.leaves import owns as owns
from parity.frameworks.linen.leaves import refusals as refusals
from parity.frameworks.linen.structure import abstract_variables as abstract_variables
from parity.frameworks.linen.structure import check_parts as check_parts
from parity.frameworks.linen.structure import structure_of as structure_of
from parity.frameworks.nnx.leaves import place as place
from parity.frameworks.nnx.leaves import to_numpy as to_numpy
