"""Ways in which ports go wrong, each tried on a pair that differs."""
