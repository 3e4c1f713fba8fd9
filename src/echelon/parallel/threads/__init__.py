# SPDX-License-Identifier: Apache-2.0
"""Threaded data parallelism: replicas of a module on threads of one process (`ec.threaded`).

Split: the rows of each pass, over N replicas; nothing rests elsewhere.
Sent:  to and from the first replica, the primary: parameters and buffers once a step, each
       replica's part of the arguments, its outputs and their derivatives, its gradients.
Bytes: `step_bytes` in `cost/bytes/threads.py`.
Must divide: nothing.
Source: PyTorch, `torch.nn.DataParallel`; Li et al., "PyTorch Distributed: Experiences on
        Accelerating Data Parallel Training", 2020, section 2.2.

workers.py     a thread for each replica, which computes as the one that asked would
module.py      the module on replicas, where these are, and its seven steps
copies.py      for each replica its tree with tensors of its own, and its rows of arguments; outputs
"""
