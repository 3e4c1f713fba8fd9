"""A block of experts beside that of transformers, and the loss of whole models of experts."""
