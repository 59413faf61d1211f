"""Planted faults: what a checker must find, and what it must call it."""
