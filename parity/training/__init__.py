"""How two models are trained alike: optimizers, schedules and their state."""
