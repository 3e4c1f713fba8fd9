# SPDX-License-Identifier: Apache-2.0
"""The decoder, written once and unaware of ranks, and the operations that it is made of.

decoder            the model, or a pipeline stage of it; latent attention; what passes between
                   its parts
modules, moe       what blocks are made of; moe: router and experts, their mixture on one device
operations         every step in plain PyTorch
attention/         attention in pieces whose results merge exactly
rotary             rotary positions
batch              what a forward pass reads
counter_random     numbers by key and index; first values of parameters
precision          dtypes, and what is computed in float32

Floors, each on those after it: decoder > operations > attention, moe > the others.
"""
