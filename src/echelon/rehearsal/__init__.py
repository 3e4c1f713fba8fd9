# SPDX-License-Identifier: Apache-2.0
"""A run without devices: what every rank would do, on tensors that have shapes and no elements.

Files import only files below them in this list.

run       a whole plan: ranks of which classes, in which processes; what it has found
numbers   printed numbers of a plan, compared with a rehearsed rank
roofline  seconds of the counted work, and what binds a step
rank      one rank: the engine that trains, built and stepped
replay    its microbatches: those that are walked, and those that are like them
traces    what it does in a step, on a time axis
groups    groups and communicators that write its log, and send nothing
shapes    what its operations make, remembered
patterns  kinds of calls, and why no order of their ranks hangs or mixes data
identity  which parameters, gradients or activations a tensor holds
order     what a rank gives its communicators, and the proof that the logs of all ranks fit together
memory    what lives on the device, what rests off it, what a collective may still read or write
work      kernels, bytes and FLOPs
"""
