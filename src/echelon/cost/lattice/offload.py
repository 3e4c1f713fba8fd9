"""Seconds in which optimizer state travels between a device and its host, where it rests there.

Our trainer updates on the device: each step the master copy and the state of a rank's slices come
over the host's link, bucket by bucket, and go back behind the update (`parallel/offload/`), so both
directions are at work at once. ZeRO-Offload (Ren et al., 2021, section 4) updates on the host's
processors instead and sends gradients and parameters; its update takes about as long, bound by the
host's memory. On processors the host is the device, and nothing travels.

No cluster says the link of its hosts. Assumed is PCIe 4.0 x16: 16 GT/s x 16 lanes x 128/130 / 8 =
31.5 GB/s in each direction (PCI-SIG, PCI Express Base Specification 4.0), of which copies reach
four fifths. Files are not modelled: ZeRO-Infinity (Rajbhandari et al., 2021, figure 2b) counts
1.6 GB/s for a GPU.
"""

from __future__ import annotations

import numpy as np

from echelon.cost.lattice.block import Work
from echelon.cost.lattice.numbers import Num

HOST_LINK_BYTES_PER_S = 31.5e9
REACHED = 0.8


def offload_seconds(work: Work, weights: Num) -> Num:
    """Return the seconds in which the state of a rank's slices, of so many weights, travels."""
    there = np.asarray(work.layout.offload) > 0
    elsewhere = np.asarray(work.software.host_adds) < 1.0
    travels = work.software.state_bytes * weights / (REACHED * HOST_LINK_BYTES_PER_S)
    return np.where(there & elsewhere, travels, 0.0)
