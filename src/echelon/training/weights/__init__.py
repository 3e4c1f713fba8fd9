# SPDX-License-Identifier: Apache-2.0
"""Weights to start from: safetensors files with the names of transformers, or our own.

files.py    which files hold weights, and whether they are this model's: from headers alone
adapters.py which adapters a folder of PEFT holds, and whether they are this run's
load.py     a rank's shards, filled a few megabytes at a time
trainers/   checkpoints of other trainers, read where they lie
writers/    checkpoints of other trainers, written

Under which names files keep parameters says `interop/weight_names`.
"""
