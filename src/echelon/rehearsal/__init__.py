# SPDX-License-Identifier: Apache-2.0
"""A run without devices: what every rank would do, on tensors that have shapes and no elements.

run            a whole plan: which ranks, in which processes; `result` is what it has found
classes        ranks that do the same, of which one is rehearsed
rank           one rank: the engine that trains, built and stepped
shapes         what its operations make; `known_results` remembers it
log            what it gives its communicators, and when it waits
groups         groups and communicators that write such a log, and send nothing
offload        what rests off the device, as shapes
in_flight      memory that a collective may still read or write
tracing        what it does in a step, on a time axis
memory, work   what lives on the device; kernels, bytes and FLOPs
order          the proof that the logs of all ranks fit together: no mismatch, no deadlock
"""
