"""The combinations of layouts that are proven.

walk.py             every case, or a share of them, proven in float64
cases.py            data, tensor and pipeline parallelism; what families of cases share
zero_cases.py       ZeRO, optimizers, offload
block_cases.py      architectures of blocks
recompute_cases.py  recomputation by operator
pipeline_cases.py   every pipeline schedule
context_cases.py    long sequences
expert_cases.py     experts
"""
