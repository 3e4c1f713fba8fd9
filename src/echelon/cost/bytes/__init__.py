# SPDX-License-Identifier: Apache-2.0
"""Bytes that ranks hold and send: equal to what a run holds and sends.

terms           the rows of predictions, and what one collective sends
sent, data      what a rank sends by axis; the part of buckets, those of any module too
width_norm      norms over all heads together, of which tensor ranks have parts
held            model state by kind and pool, and what other ZeRO settings would hold
transient       what is there only while a step runs, beside activations
context         attention over context ranks: what it sends, keeps and holds at its peak
experts         rows on their way to experts: what they send, and what is held of them
model_states    bytes of a weight by ZeRO stage, without a plan
model_sizes     messages, caches and rates, without a plan
nccl            what a process and its communicators take on a GPU, outside of an allocator
checkpoints     what a run writes of itself
"""
