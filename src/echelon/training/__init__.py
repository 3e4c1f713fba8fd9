# SPDX-License-Identifier: Apache-2.0
"""Training: data, the engine's step, checkpoints, the loop.

From the top down; each may import what stands below it, and an import contract holds that:

whole_run.py         a whole run again on one device, and text from it
evaluator.py         validation of checkpoints beside a run
measure/             kernels, collectives, units and steps, timed on this machine
loop.py              the loop of one rank: steps, validation, checkpoints, Ctrl-C
subject.py           the engine as the thing under proof
recorders.py         routes of a step, and what passes between blocks
run_checkpoints.py   the checkpoints of one run
diagnosis.py         where a NaN came from
inference.py         the ranks that generate: their part of a checkpoint
weights/             first weights from files of other tools, and files for them
servers/             engines of parameter servers and their workers
engine.py            one optimizer step on one rank: what is proven, and what trains
module/              the optimizer and state of a module that is split
local_sgd/           outer steps of islands, a part of each step
steps/               the seams of a step, where modes join it
optimizer/           AdamW, SGD and Muon on slices
checkpoint/          saving and loading, in any layout
data/                text to token shards, and the samples of each rank
observer.py          what training tells whoever watches it
"""
