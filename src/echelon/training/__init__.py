# SPDX-License-Identifier: Apache-2.0
"""Training: data, the engine's step, checkpoints, the loop.

loop.py              the loop of one rank: steps, validation, checkpoints, Ctrl-C
engine.py            one optimizer step on one rank: what is proven, and what trains
learning_rate.py     the learning rate of a step
loss_scale.py        the factor of the loss in fp16
routing.py           what a step says of its experts, over all ranks
expert_state.py      what the next step takes over from routing, as checkpoints know it
observer.py          what training tells whoever watches it
diagnosis.py         where a NaN came from; router_diagnosis.py looks at routers
subject.py           the engine as the thing under proof; routing_recorder.py writes down its
                     routes, activation_recorder.py what passes between its blocks
generate.py          text from a trained model, on one device and without a cache
inference.py         the ranks that generate: their part of a checkpoint

data/                text to token shards, and the samples of each rank
optimizer/           AdamW, SGD and Muon on slices
checkpoint/          saving and loading, in any layout
weights/             first weights from files of other tools
module/              the optimizer and state of a module that is split
measure/             kernels, collectives, units and steps, timed on this machine
"""
