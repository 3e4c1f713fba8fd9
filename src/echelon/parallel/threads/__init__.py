"""Threaded data parallelism: replicas of the model on threads of one process.

Split: the sequences of each microbatch, evenly over N replicas; nothing rests elsewhere.
Sent:  to and from the first replica, the primary: all parameters once a step, each replica's part
       of a microbatch, its loss and the derivative of that, all gradients once a step.
Bytes: `thread_bytes` in `cost/bytes/threads.py`.
Must divide: threads.replicas | microbatch_sequences.
Source: PyTorch, `torch.nn.DataParallel`; Li et al., "PyTorch Distributed: Experiences on
        Accelerating Data Parallel Training", 2020, section 2.2.

replicas.py   a replica with its thread, and the copies between it and the primary
stage.py      the one stage of the model as all replicas compute it; the sum onto the primary
"""
