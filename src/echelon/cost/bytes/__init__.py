# SPDX-License-Identifier: Apache-2.0
"""Bytes that ranks hold and send: equal to what a run holds and sends.

terms            the rows of predictions, and what one collective sends
all_reduce       what one member sends to sum a tensor, by algorithm
quantised        numbers that are held or sent as codes of 8 or 4 bits
context_sent     attention over context ranks: what it sends
context_memory   what it keeps and holds at its peak, and which kernel computes it
expert_sent      rows on their way to experts: what they send
expert_memory    what is held of them
data             what buckets send: gradients and parameters
local_sgd        outer steps of islands
servers          parameter servers
sent             what a rank sends in a step, by axis: all of the above
threads          what replicas of a module on threads send
transient        what is there only while a step runs, beside activations
held             model state by kind and pool, of other ZeRO settings, and of a checkpoint
generate         generation: weights and the cache
model_sizes      closed forms without a plan: states by ZeRO stage, weights, messages, rates
nccl             what a process and its communicators take on a GPU, outside of an allocator
piece_traffic    what the pieces between products move on a GPU
"""
