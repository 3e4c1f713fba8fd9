# SPDX-License-Identifier: Apache-2.0
"""Under which names, and how laid out, weights are kept in other places: files and transformers.

names.py    under which name, and how laid out, each parameter is kept
source.py   where a parameter is kept, and the order of its rows
"""
