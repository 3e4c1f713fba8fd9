# SPDX-License-Identifier: Apache-2.0
"""Parameter servers: engines of workers and servers in place of the one of `training/engine.py`.

synchronous.py   a worker that updates nothing, and a server that computes nothing
served.py        the state of an asynchronous server: clocks, versions, the update, the bound
asynchronous.py  a worker and a server that do not wait for all others; the engine of each rank
"""
