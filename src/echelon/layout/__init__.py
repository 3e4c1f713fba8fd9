# SPDX-License-Identifier: Apache-2.0
"""Who holds what, and what is sent where: numbers and names, no tensors.

stage            stages and parameters of a rank, and their update rules
data_groups      ranks that share out and sum; the nodes among them
buckets, slots   flat buckets, and places in them; ranges of parameter servers
muon             which rank orthogonalises which matrix
context_work     attention that a context rank computes
ring_transfers   rows that travel on a ring, and rows that a place holds, step by step
attention_tiles  queries and keys as pieces for kernels
expert_load      where tokens go, recorded or balanced
islands          islands of local SGD, and blocks of outer gradients
modules          the same of any module: buckets, stages, tensor pieces
"""
