# SPDX-License-Identifier: Apache-2.0
"""nanotron: its YAML, read.

read.py     mesh, batch, precision, learning rate
keys.toml   keys that are settings as they are, keys that set nothing here
"""
