"""Echelon: a model and a cluster become a parallel training run that you can trust."""

__version__ = "0.1.0"

__all__ = ["__version__"]
