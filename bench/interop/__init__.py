"""Checkpoints of other trainers, with those trainers: `python -m bench.interop`."""
