# SPDX-License-Identifier: Apache-2.0
"""Horovod: a horovodrun command with its script's flags, read.

read.py     the words of the command -> flags; ranks, batch, sums of gradients, the optimizer
keys.toml   flags that set nothing here, or are refused

Plans are not written for it: it is data parallelism around a script, which says the rest.
"""
