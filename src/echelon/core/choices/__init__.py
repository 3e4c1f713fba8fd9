"""What users choose: registries of optimizers, kinds of context parallelism, strategies; threads."""
