"""The reader's situation: a model, a cluster and a batch, and what splits of them would hold."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from echelon.core.cluster import Cluster, Link
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import num_parameters
from echelon.core.plan import Plan, RecomputePolicy
from echelon.core.topology import fast_domain
from echelon.cost.model_states import StatePrecision
from echelon.planner.guides.memory import RankMemory, Split, memory_of_split, state_precision

GB = 1e9


@dataclass(frozen=True, slots=True)
class Situation:
    """Show what a guide may ask about of `plan`: how it is split is not read."""

    plan: Plan

    @property
    def model(self) -> ModelShape:
        """Return the shape of the model."""
        return self.plan.model

    @property
    def cluster(self) -> Cluster:
        """Return the cluster."""
        return self.plan.cluster

    @property
    def precision(self) -> StatePrecision:
        """Return the bytes that a weight takes."""
        return state_precision(self.plan)

    @property
    def global_sequences(self) -> int:
        """Return the sequences of a step."""
        return self.plan.mathematics.global_sequences

    @property
    def microbatch_sequences(self) -> int:
        """Return the sequences of a microbatch."""
        return self.plan.layout.microbatch_sequences

    @property
    def positions(self) -> int:
        """Return the positions of a sequence."""
        return self.plan.mathematics.sequence_length

    @property
    def memory(self) -> int:
        """Return the memory of a device, in bytes."""
        return self.cluster.device.memory_bytes

    @property
    def num_devices(self) -> int:
        """Return the number of devices."""
        return self.cluster.num_devices

    @property
    def num_parameters(self) -> int:
        """Return psi."""
        return num_parameters(self.model)

    @property
    def domain(self) -> int:
        """Return how many devices the fast links join: a node, or a rack that is wired as one."""
        return fast_domain(self.cluster)

    @property
    def num_domains(self) -> int:
        """Return how many nodes there are, or racks that are wired as one."""
        return -(-self.num_devices // self.domain)

    @property
    def tensor_ranks(self) -> int:
        """Return the tensor ranks of a node; of a rack wired as one, as many as heads allow."""
        if self.domain == self.cluster.devices_per_node:
            return self.domain
        return gcd(self.domain, self.model.heads)

    @property
    def inside(self) -> Link | None:
        """Return the link between devices of a node; None where a node has one device."""
        links = self.cluster.links
        return links[0] if links and self.domain > 1 else None

    @property
    def between(self) -> Link | None:
        """Return the link between nodes; None where there is one node."""
        links = self.cluster.links
        return links[-1] if links and self.num_domains > 1 else None

    def most_data_ranks(self, others: int = 1) -> int:
        """Return over how many ranks the batch can be shared out, `others` ranks to each."""
        by_batch = self.global_sequences // self.microbatch_sequences
        return max(1, min(self.num_devices // others, by_batch))

    def held(self, split: Split, recompute: RecomputePolicy | None = None) -> RankMemory:
        """Return what the fullest rank of a split would hold."""
        return memory_of_split(self.plan, split, recompute)

    def against(self, num_bytes: float) -> str:
        """Return bytes against the memory of a device, for people."""
        return f"{num_bytes / GB:,.1f} GB of {self.memory / GB:,.0f} GB"
