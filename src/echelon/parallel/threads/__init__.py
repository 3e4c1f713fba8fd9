# SPDX-License-Identifier: Apache-2.0
"""Threaded data parallelism: replicas of the model on threads of one process.

Split: the sequences of each microbatch, evenly over N replicas; nothing rests elsewhere.
Sent:  to and from the first replica, the primary: all parameters once a step, each replica's part
       of a microbatch, its loss and the derivative of that, all gradients once a step.
Bytes: `thread_bytes` in `cost/bytes/threads.py`.
Must divide: threads.replicas | microbatch_sequences.
Source: PyTorch, `torch.nn.DataParallel`; Li et al., "PyTorch Distributed: Experiences on
        Accelerating Data Parallel Training", 2020, section 2.2.

workers.py     a thread for each replica, which computes as the one that asked would
replicas.py    the replicas of a model of ours, and the copies between them and the primary
stage.py       the one stage of the model as all replicas compute it; the sum onto the primary
module.py      a module of any kind on replicas: `ec.threaded`
copies.py      its tree with tensors of its own, for each replica
nested.py      its arguments, cut, and its outputs, joined
arguments.py   where its replicas are
"""
