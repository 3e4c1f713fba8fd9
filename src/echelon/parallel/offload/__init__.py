"""Where slices rest between uses: on the device, in the memory of the host, or in files.

Split: nothing; ZeRO has cut the slices, this says where they lie (ZeRO-Offload, ZeRO-Infinity).
Sent:  nothing between ranks; between device, host and disk whatever is fetched and put.
Bytes: `cost.bytes_held` counts what rests; buffers are bounded by `zero.offload_buffers`.
Must divide: nothing.
Source: Ren et al., "ZeRO-Offload", 2021; Rajbhandari et al., "ZeRO-Infinity", 2021.

`rest.py` is the interface and the device, `host.py` the memory of the host, `files.py` the files.
"""

from echelon.parallel.offload.make import make_rest
from echelon.parallel.offload.rest import Fetched, Rest

__all__ = ["Fetched", "Rest", "make_rest"]
