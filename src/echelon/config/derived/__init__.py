# SPDX-License-Identifier: Apache-2.0
"""Numbers and records of a Plan that follow from settings, where users leave them open, too.

context.py       ranks that exchange heads, parts of a sequence
experts.py       ranks that share out experts, their ZeRO stage
pipeline.py      stages of a rank, microbatches, schedules of files
kernels.py       pieces with kernels
replicas.py      groups that sum and gather, islands with their outer step, parameter servers
"""
