# SPDX-License-Identifier: Apache-2.0
"""What a foreign file leaves to others: the model to the script, the processes to the launcher.

It comes from what the imported run builds on, the --set flags, and --ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

from echelon.config.cluster.settings import DEFAULT_CLUSTER, read_cluster
from echelon.config.entries import DEFAULT, Entry
from echelon.config.model.settings import build_model, derive_model, expand_model
from echelon.config.schema import CLUSTER_SOURCES
from echelon.config.view import Unavailable, View
from echelon.core.cluster import Cluster
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import parameters

_MODEL_DEGREES = ("pp", "cp", "tp")
AXES = ("dp_replicate", "dp_shard", *_MODEL_DEGREES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportContext:
    """Hold what is known beside the file."""

    model: ModelShape | None
    """The model that the run builds on; None where it does not resolve."""
    devices: int
    """Devices of the cluster."""
    devices_per_node: int
    """Devices of each of its nodes."""
    cluster: str
    """Name of the cluster."""
    degrees: Mapping[str, int]
    """Degrees of the mesh, by axis."""
    microbatch: int
    """Sequences of a microbatch."""
    parameters: str
    """Dtype of parameters."""
    keys_set: frozenset[str] = frozenset()
    """Settings that what the run builds on and the flags set."""
    keys_named: frozenset[str] = frozenset()
    """Those of them that its user named: not those of a preset that is taken without a name."""
    ranks: int | None = None
    """What --ranks says."""

    @property
    def block_elements(self) -> int:
        """Return the elements of the largest block on one rank; 0 where the model is unknown."""
        if self.model is None:
            return 0
        tp = self.degrees["tp"]
        expert_ranks = self.degrees.get("ep", 1) * self.degrees.get("expert_tp", 1)
        sizes = [0] * self.model.layers
        for spec in parameters(self.model):
            if spec.layer is not None:
                cut = 1 if spec.split_dim is None else tp
                cut = cut if spec.expert is None else expert_ranks
                sizes[spec.layer] += spec.numel // cut
        return max(sizes)

    @property
    def stage_blocks(self) -> int:
        """Return the blocks of the largest pipeline stage; 0 where the model is unknown."""
        return 0 if self.model is None else -(-self.model.layers // self.degrees["pp"])

    @property
    def model_ranks(self) -> int:
        """Return how many ranks hold one model together."""
        return prod(self.degrees[axis] for axis in _MODEL_DEGREES)

    @property
    def data_ranks(self) -> int:
        """Return how many ranks read different samples, by the mesh alone."""
        return self.degrees["dp_replicate"] * self.degrees["dp_shard"]

    @property
    def ranks_unknown(self) -> bool:
        """Return whether nothing says how many ranks are started."""
        return self.ranks is None and self.data_ranks == 1 and not self.cluster_named

    @property
    def cluster_named(self) -> bool:
        """Return whether a cluster is named, and not only the one that is taken without a name."""
        return not self.keys_set.isdisjoint(CLUSTER_SOURCES)

    def with_degrees(self, **degrees: int) -> ImportContext:
        """Return the same with other degrees of the mesh."""
        return replace(self, degrees={**self.degrees, **degrees})


def import_context(
    entries: Mapping[str, Entry], ranks: int | None, named: Iterable[str] | None = None
) -> ImportContext:
    """Return what is known beside the file, from the settings that its run will build on.

    `named` are those that its user named: all of them, where it is absent.
    """
    expanded, problems = expand_model(entries)
    if not problems:
        expanded.update(derive_model(View(entries=expanded), "imported"))
    if not any(source in expanded for source in CLUSTER_SOURCES):
        expanded["cluster.preset"] = Entry(value=DEFAULT_CLUSTER, source=DEFAULT)
    view = View(entries=expanded)
    cluster = read_cluster(view)
    known = isinstance(cluster, Cluster)
    return ImportContext(
        model=None if problems else _model(view),
        devices=cluster.num_devices if known else 1,
        devices_per_node=cluster.devices_per_node if known else 1,
        cluster=cluster.name if known else "",
        degrees={axis: view.integer(f"mesh.{axis}") for axis in AXES},
        microbatch=view.integer("batch.microbatch_sequences"),
        parameters=view.word("precision.parameters"),
        keys_set=frozenset(entries),
        keys_named=frozenset(entries if named is None else named),
        ranks=ranks,
    )


def _model(view: View) -> ModelShape | None:
    try:
        return build_model(view)
    except Unavailable:
        return None
