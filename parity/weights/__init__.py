"""How parameters travel between the frameworks."""
