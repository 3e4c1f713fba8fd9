# SPDX-License-Identifier: Apache-2.0
"""A model without a cluster: what to run on four sizes of a common device.

The device is the first of the common ones (`presets/common_devices.toml`); the sizes are the
smallest cluster of it that has a plan, and three larger ones, each the next power of two.
"""

from __future__ import annotations

from collections.abc import Callable

from echelon.config.cluster.devices import common_devices
from echelon.config.cluster.settings import smallest_cluster
from echelon.planner.recommend.recommend import Recommendation, recommend
from echelon.planner.search.request import SearchRequest
from echelon.planner.search.smallest import smallest_that_fits

NUM_SIZES = 4  # clusters
NO_SIZE = "no cluster of common devices has a plan: try shorter sequences, or fewer pins"
"""What is said where there are none."""


def four_sizes(
    request_on: Callable[[str], SearchRequest], *, alone: bool = False
) -> list[Recommendation]:
    """Return what to run on each of four clusters; `request_on` makes the request of a name.

    `alone`: without the plans that somebody may prefer. They are fewer where a larger cluster has
    no plan, and none where no cluster of the device has.
    """
    first = f"1x{common_devices()[0]}"
    found = smallest_that_fits(request_on(first))
    if found is None:
        return []
    count, names = found.num_devices, [found.name]
    while len(names) < NUM_SIZES:
        count = 1 << count.bit_length()
        names.append(smallest_cluster(first, count))
    answers: list[Recommendation] = []
    for name in names:
        one = recommend(request_on(name), alone=alone)
        if isinstance(one, Recommendation):
            answers.append(one)
        elif one.interrupted:
            raise KeyboardInterrupt
    return answers
