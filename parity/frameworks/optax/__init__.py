"""optax in the words of this package: the door of its room."""

from parity.frameworks.optax.building import schedule as schedule
from parity.frameworks.optax.building import twin as twin
from parity.frameworks.optax.clipping import clip_grad_norm as clip_grad_norm
from parity.frameworks.optax.clipping import clip_grad_value as clip_grad_value
from parity.frameworks.optax.scaling import loss_scale as loss_scale
from parity.frameworks.optax.scaling import scaled as scaled
from parity.frameworks.optax.states import owns as owns
from parity.frameworks.optax.states import read_state as read_state
from parity.frameworks.optax.states import write_state as write_state
