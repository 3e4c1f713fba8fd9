# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM: its command line, read and written.

read.py            mesh, ZeRO stage, ranks, batch, stages of the pipeline
read_model.py      sizes, norms, positions, latent attention; windows, sinks, gates, biases
read_experts.py    experts and their ranks, and what evens their loads
read_numbers.py    precision, loss scale, optimizer, learning rate, recompute, checkpoints
write.py           a plan -> flags
abilities.py       what it can run; its words for our choices
keys.toml          flags that set nothing here, or are refused; settings it has no word for
"""
