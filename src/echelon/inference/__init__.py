# SPDX-License-Identifier: Apache-2.0
"""What writes text on ranks: a decoder, a cache of keys and values, and a choice of tokens.

cache        blocks of positions in one pool of each block of the model; the tokens of a step
operations   the steps of a decoder over the cache, split over `tp`; its attention
generator    the loop through the stages of a pipeline: prompts, then token by token, as chosen

Nothing here reads checkpoints or text (`training/whole_run.py` does), and nothing has gradients.
"""
