# SPDX-License-Identifier: Apache-2.0
"""Horovod: a horovodrun command with its script's flags, read.

words.py    the words of the command -> flags, in front of the script and behind it
read.py     ranks, batch, how gradients are summed, the optimizer of the script
keys.toml   flags that set nothing here, or are refused

Plans are not written for it: it is data parallelism around a script, which says the rest.
"""
