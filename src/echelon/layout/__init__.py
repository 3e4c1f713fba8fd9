# SPDX-License-Identifier: Apache-2.0
"""Who holds what, and what is sent where: numbers and names, no tensors.

stage                             stages and parameters of a rank, and their update rules
buckets, slots, module_buckets    flat buckets, places in them, and those of any module
muon                              which rank orthogonalises which matrix
context_work, ring_transfers      what a context rank computes, and which rows travel
context_resident                  which rows of others it holds, step by step
expert_load                       where tokens go, recorded or balanced
"""
