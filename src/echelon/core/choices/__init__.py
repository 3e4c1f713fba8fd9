"""What users choose: registries of optimizers, context kinds, strategies; and how they train."""
