"""How gradients become updates: learning-rate schedules and optimizers by name."""
