"""The combinations of layouts that are proven.

walk.py             every case, or a share of them, proven in float64
cases.py            data, tensor and pipeline parallelism; what families of cases share
zero_cases.py       ZeRO, optimizers, offload
pipeline_cases.py   every pipeline schedule
context_cases.py    long sequences
expert_cases.py     experts
random_plans.py     random plans of the whole space, proven or refused
random_settings.py  the settings of each
bytes_walk.py       a sample in every precision: predicted bytes are those of ranks
bytes_recorded.py   what ranks record of bytes
"""
