# SPDX-License-Identifier: Apache-2.0
"""The decoder, written once and unaware of ranks, and the operations that it is made of.

decoder            the model, or a pipeline stage of it
boundaries         what passes between the parts of a decoder
modules, latent    what blocks are made of; moe: experts; latent: narrow attention
operations         every step in plain PyTorch; mixture_reference: that of experts
attention/         attention in pieces whose results merge exactly
routing            which experts a token meets
rotary             rotary positions
batch              what a forward pass reads
initial            first values of parameters; counter_random: numbers by key and index
precision          dtypes, and what is computed in float32
"""
