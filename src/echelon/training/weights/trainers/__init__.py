# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of other trainers, read where they lie: which tensors they hold, and at which bytes.

contents.py       what a reader finds: weights, moments of the optimizer, the step
distributed.py    torch.distributed.checkpoint: torchtitan, FSDP2, Megatron-core's torch_dist
deepspeed.py      DeepSpeed: ZeRO 0 to 3, and universal
megatron.py       Megatron-core's older folders, a file for each tensor and pipeline rank

Only headers are read here, and no torch is needed (`pickles.py` beside this folder).
"""
