# SPDX-License-Identifier: Apache-2.0
"""Which part of which parameter a rank holds, read from what each framework knows.

registry.py         the frameworks that are known, and which of them a program is
located.py          where each element of a rank's tensor lies in a parameter; calls put in between
names.py            the user's table of names
program.py          wrappers taken off: modules, parameters under their plain names
torch_store.py      plain modules, DDP, tensor-parallel plans, FSDP, DTensor, pipelining stages
deepspeed.py        DeepSpeed: ZeRO 0 to 3, its pipeline engine
megatron.py         Megatron-core: tensor parallel, pipelines, experts, its distributed optimizer
echelon.py          modules that `ec.parallelize` has split
"""
