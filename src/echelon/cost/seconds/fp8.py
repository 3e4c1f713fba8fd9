"""At which rate the products of a plan run, where they multiply 8-bit numbers.

Forward products and those for gradients of inputs reach the device's peak of fp8 where there is a
kernel for tiles of 128: PyTorch has one for Hopper. Elsewhere what codes stand for is multiplied in
the dtype of the parameters, at its rate. So are weight gradients everywhere.
"""

from __future__ import annotations

import re

from echelon.core.cluster import Cluster
from echelon.core.plan import Precision

_HOPPER = re.compile(r"\bG?H(100|200|800|20)\b", re.IGNORECASE)


def has_fp8_kernel(cluster: Cluster) -> bool:
    """Return whether a device multiplies 8-bit numbers in tiles: Hopper, told by its name."""
    device = cluster.device
    return bool(_HOPPER.search(device.name)) and device.flops("fp8") is not None


def product_dtype(cluster: Cluster, precision: Precision) -> str:
    """Return the dtype at whose peak the products of blocks run, weight gradients aside."""
    return "fp8" if precision.is_fp8 and has_fp8_kernel(cluster) else precision.parameters
