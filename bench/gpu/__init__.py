"""Echelon on one CUDA GPU: its tests there, training steps beside its peers, offload."""
