"""What users choose: optimizers, kinds of context parallelism, strategies, threads."""
