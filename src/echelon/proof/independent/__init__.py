# SPDX-License-Identifier: Apache-2.0
"""A second, plain implementation of what the oracle and the ranks share, to prove the oracle by.

The decoder, first values, decay groups, learning rates, optimizers and batches are written again
from papers and from the documentation, one sequence at a time, with loops and without a function
of ours: only the records of a plan are read. `echelon prove --independent` compares the two.
Why: docs/decisions/030-an-oracle-of-its-own.md.

weights.py          names, sizes, first values; uniform and normal values of (key, index)
sequence.py         one sequence on its way: weights, norms, dropout, what is noted of every part
attention.py        grouped-query and latent attention, rotary positions, masks
mixture.py          router, gates, capacity, experts, auxiliary losses, biases
decoder.py          embedding, blocks, MLP, head, loss
optimizers.py       learning rate, decay groups, AdamW, SGD, Muon, clip, loss scale
training.py         the steps
samples.py          what the trainer reads: sample order, mixtures, rows, document starts
reading.py          the proof's own batches, and the trainer's, beside what they must be
hugging_face/       the model of transformers with the oracle's weights, where there is one
parts.py            the first part of a forward pass that differs
comparison.py       the oracle beside all of this: claims, and a name for the first difference
"""
