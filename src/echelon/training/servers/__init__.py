# SPDX-License-Identifier: Apache-2.0
"""Parameter servers that do not wait for all workers: the engines of both, and their record.

    engine.py   which engine a rank of a plan takes
    worker.py   a step of a worker: push, and go on with what the servers have
    server.py   a server: a thread for each worker, and the step as the loop sees it
    served.py   the state that these threads share: clocks, versions, the update, the bound

Synchronous servers take the steps of `training/engine.py`.
"""
