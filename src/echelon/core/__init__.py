"""The words that everything shares: axes, mesh, model shape, cluster, plan, events, errors.

Standard library only; nothing here may import torch, NumPy or another floor.
"""
