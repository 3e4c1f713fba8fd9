# SPDX-License-Identifier: Apache-2.0
"""Parameter servers: workers send gradients and get parameters, servers keep and update the model.

    worker.py   pushes the gradients of full buckets, pulls parameters after the update; what an
                asynchronous worker and a server tell each other
    server.py   the ranges of a server, the sums of what workers push, what it sends back

Which elements a server holds is in `layout/slots.py`, the bytes in `cost/bytes/servers.py`.
"""
