"""Weights to start from: safetensors files with the names of transformers, or our own.

`names.py` says where a file keeps each parameter, `files.py` reads and checks headers (neither
imports torch), `load.py` fills a rank's shards.
"""
