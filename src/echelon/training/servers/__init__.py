# SPDX-License-Identifier: Apache-2.0
"""Parameter servers: engines of workers and servers in place of the one of `training/engine.py`.

synchronous.py  a worker that updates nothing, and a server that computes nothing
served.py       the state of an asynchronous server: clocks, versions, the update, the bound
worker.py       a step of an asynchronous worker: push, and go on with what the servers have
server.py       an asynchronous server: a thread for each worker, and the step of the loop
engine.py       which of them a rank of a plan takes
"""
