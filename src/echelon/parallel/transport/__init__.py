# SPDX-License-Identifier: Apache-2.0
"""What ranks send one another: the only room that calls `torch.distributed`.

collectives     `Group`: every collective and message, recorded and checked; the processes under it
messages        those that are messages between pairs (all of Gloo's but all-reduce)
algorithms      all-reduces made of messages: ring, tree, halving and doubling, hierarchical
shared_room     small sums and gathers between ranks of one host, through memory
rows            rows gathered, scattered and summed, with the gradient sent back
differentiable  collectives with a gradient, each the transpose of another
fingerprints    operations as a rank's ring has them, and those that its device has not passed
recorder        the events that a rank writes, on the clock of its device
"""
