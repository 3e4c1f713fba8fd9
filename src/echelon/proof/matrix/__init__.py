# SPDX-License-Identifier: Apache-2.0
"""The combinations of layouts that are proven.

walk.py             every case, or a share of them, proven in float64
cases.py            data, tensor and pipeline parallelism; what families of cases share
zero_cases.py       ZeRO, optimizers, offload
pipeline_cases.py   every pipeline schedule
context_cases.py    long sequences
expert_cases.py     experts
random_settings.py  settings of random plans of the whole space
bytes_walk.py       a sample in every precision: predicted bytes are those of ranks
bytes_recorded.py   what ranks record of bytes
"""
