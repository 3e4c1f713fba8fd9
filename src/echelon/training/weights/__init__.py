"""Weights to start from: safetensors files with the names of transformers, or our own.

files.py    which files hold weights, and whether they are this model's: from headers alone
names.py    under which name, and how laid out, files keep each parameter
source.py   where a file keeps a parameter, and the order of its rows
load.py     a rank's shards, filled a few megabytes at a time
"""
