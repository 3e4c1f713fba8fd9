# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: sharded, flushed, checksummed, committed by rename, readable in any layout.

save.py           writes one, so that a kill leaves only checkpoints that load
load.py           reads one into whatever layout asks
folder.py         finds and prunes them, without torch
index.py          index.json: files, tensors, checksums; where rectangles of a tensor meet
identity.py       whose checkpoint it is
shard_file.py     one rank's file, and a part of a stored tensor, read into place
communicator.py   what checkpoints ask of other ranks

The format is described in docs/decisions/002-checkpoint-format.md.
"""
