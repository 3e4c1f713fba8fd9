"""Weights to start from: safetensors files with the names of transformers, or our own.

`names.py`, with `mixture_names.py` and `source.py`, says where a file keeps each parameter,
`files.py` reads and checks headers (none of them imports torch), `load.py` fills a rank's shards.
"""
