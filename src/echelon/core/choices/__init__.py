"""What users choose by name: registries of optimizers and kinds of context parallelism."""
