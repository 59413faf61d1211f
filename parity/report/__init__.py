"""Results into words."""
