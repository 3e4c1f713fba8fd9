# SPDX-License-Identifier: Apache-2.0
"""Axolotl: its YAML, read.

read.py     the model by its name, mesh, what its Trainer has
keys.toml   keys that set nothing here, and those that would train something else
"""
