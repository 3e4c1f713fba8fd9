# SPDX-License-Identifier: Apache-2.0
"""A request with other devices, or with other settings of its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from echelon.config.entries import DEFAULT, Entry
from echelon.config.job import LENGTH_KEY, SEQUENCES_KEY, assumed_batch
from echelon.config.settings.schema import CLUSTER_SOURCES
from echelon.core.cluster import Cluster
from echelon.planner.search.defaults import TOKENS_OF_A_BATCH
from echelon.planner.search.request import (
    SearchRequest,
    trainer_software,
    without_keys,
)


def request_on_cluster(request: SearchRequest, cluster: Cluster) -> SearchRequest:
    """Return the same request on other devices."""
    layer = {"cluster.preset": Entry(value=cluster.name, source=f"--cluster {cluster.name}")}
    kept = tuple(without_keys(one, CLUSTER_SOURCES) for one in request.layers)
    alone = replace(request.one_rank_run, cluster=cluster)
    if cluster.backend != request.cluster.backend:
        # Devices of another kind may have other kernels.
        there = replace(request, layers=(*kept, layer)).job({}).plan.layout.kernels
        alone = replace(alone, layout=replace(alone.layout, kernels=there))
    software = trainer_software(request.trainer, alone)
    return replace(
        request, cluster=cluster, one_rank_run=alone, layers=(*kept, layer), software=software
    )


def request_with_settings(request: SearchRequest, settings: Mapping[str, object]) -> SearchRequest:
    """Return the same request with other settings of its run; ConfigError where a rule breaks.

    A batch that nobody asked for follows a new length of sequences, as it does on the command line.
    """
    added = dict(settings)
    length = added.get(LENGTH_KEY)
    if isinstance(length, int) and SEQUENCES_KEY not in added and batch_is_default(request):
        added[SEQUENCES_KEY] = max(1, TOKENS_OF_A_BATCH // length)
    layer = {key: Entry(value=value, source="") for key, value in added.items()}
    changed = replace(request, layers=(*request.layers, layer))
    alone = replace(changed.job({}).plan, cluster=request.cluster)
    return replace(changed, one_rank_run=alone, software=trainer_software(request.trainer, alone))


def batch_is_default(request: SearchRequest) -> bool:
    """True if nobody has asked for the sequences of a global batch."""
    return _batch_source(request) == DEFAULT


def batch_is_assumed(request: SearchRequest) -> bool:
    """True if the sequences of a global batch are a default, or of a model's preset."""
    source = _batch_source(request)
    return source == DEFAULT or any(assumed_batch({SEQUENCES_KEY: source}))


def _batch_source(request: SearchRequest) -> str:
    asked = [one[SEQUENCES_KEY].source for one in request.layers if SEQUENCES_KEY in one]
    return asked[-1] if asked else ""
