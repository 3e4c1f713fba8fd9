# SPDX-License-Identifier: Apache-2.0
"""When asynchronous operations complete: as the transport lets them, or as late as they may.

Split: nothing; it decides when a result may be seen, never what it is.
Sent:  what the operations send, neither more nor less.
Bytes: those of the operations.
Must divide: nothing.
Source: NCCL's user guide (a buffer belongs to a collective until its stream has passed it); the
        habit of race detectors to make the rare order the common one.

    completion   the policy: it makes the groups, stores, pools and streams of a rank; this one as
                 the transport completes them
    late         the policy that completes each operation when it is awaited, and not before; every
                 operation of torch is looked at for memory that is not its to use; its collectives
                 and messages
    in_flight    the ledger of that policy: operations that run, memory that is free, races found
    streams      order of accesses: a vector clock for each stream
    memory       addresses of tensors, and what fills memory that nobody may read
    late_program  the same for the calls of `torch.distributed` in a program that is not ours
    late_memory  pools, bounded buffers, copies and files
"""
