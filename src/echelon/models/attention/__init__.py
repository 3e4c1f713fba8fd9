# SPDX-License-Identifier: Apache-2.0
"""Attention of the queries and keys that are here, in pieces whose results merge exactly.

local           pieces through kernels: forward, backward, on one device
tiles, boxes    which pieces: masks over runs of positions as full, causal and banded boxes
online_softmax  how their results merge, and with sinks
interface       what a kernel takes and gives
fused, plain    the kernels; flash: what flash attention is told of bands and documents
packed          many boxes in one call of it; reference: attention to be read
"""
