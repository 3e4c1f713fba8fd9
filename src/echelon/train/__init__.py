"""Training: data, the engine's step, checkpoints, the loop."""
