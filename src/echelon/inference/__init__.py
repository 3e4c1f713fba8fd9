# SPDX-License-Identifier: Apache-2.0
"""What writes text on ranks: a decoder, a cache of keys and values, and a choice of tokens.

cache        blocks of positions in one pool of each block of the model; which sequence holds which
batch        the tokens of a step: whole prompts, or the next token of each sequence
attention    queries of a prompt, or of one token, over keys and values
operations   the steps of a decoder over the cache, split over `tp`
weights      a rank's part of a model, made to be read into
choice       the next token from logits: the likeliest, or one drawn from a seed
generator    the loop: prompts first, then token by token, through the stages of a pipeline

Nothing here reads checkpoints or text (`training/generate.py` does), and nothing has gradients.
"""
