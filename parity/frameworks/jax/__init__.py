"""What NNX and Linen have in common: jax alone."""
