# SPDX-License-Identifier: Apache-2.0
"""Attention of the queries and keys that are here, in pieces whose results merge exactly.

local          pieces through kernels: forward, backward, on one device
interface      what a kernel takes and gives, how results merge, and with sinks
fused, plain   the kernels; flash: what flash attention is told of bands and documents
packed         many boxes in one call of it; reference: attention to be read
"""
