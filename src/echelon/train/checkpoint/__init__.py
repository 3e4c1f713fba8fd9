"""Checkpoints: sharded, flushed, checksummed, committed by rename, readable in any layout.

`save.py` writes one, `load.py` reads one into whatever layout asks, `folder.py` finds them (and
does not import torch). The format is described in docs/decisions/002-checkpoint-format.md.
"""
