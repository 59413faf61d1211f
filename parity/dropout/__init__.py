"""Dropout masks: recorded in one framework, replayed in the other."""
