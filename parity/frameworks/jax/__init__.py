"""What Flax NNX and Flax Linen have in common: jax."""
