"""A run without devices: what every rank would do, on tensors that have shapes and no elements.

log      what one rank gives its communicators, and when it waits
groups   groups and communicators that write such a log, and send nothing
order    the proof that the logs of all ranks fit together: no mismatch, no deadlock
"""
