"""What a rank sends to train a module of one's own: pipeline stages, cut sequences.

Data parallelism and ZeRO alone are `module_bytes` in `cost/bytes/data.py`.
"""
