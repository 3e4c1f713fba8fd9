"""Best practices and pitfalls of the guides, each with the lints that look for it.

Where nothing in a plan can show whether a practice was followed, `instead` says what to do.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Practice:
    """Hold one practice, in our words, and the ids of its lints."""

    id: str
    source: str
    says: str
    lints: tuple[str, ...] = ()
    instead: str = ""


PRACTICES = (
    Practice(
        id="practice-data-first",
        source="002, best practices",
        says="start with data parallelism, add axes when they are needed",
        lints=("axes-without-need", "zero-3-without-need"),
    ),
    Practice(
        id="practice-match-links",
        source="002, best practices; 004, section 5",
        says="tensor ranks in a node, stages over nodes, data ranks anywhere",
        lints=("tp-across-nodes", "pp-inside-tp-outside", "experts-across-nodes"),
    ),
    Practice(
        id="practice-profile",
        source="002, best practices",
        says="measure whether compute or communication binds before adding parallelism",
        instead="echelon observe RUN, after a few steps",
    ),
    Practice(
        id="practice-microbatches",
        source="002, best practices",
        says="at least four microbatches for each pipeline stage",
        lints=("microbatches-per-stage", "gpipe-holds-all"),
    ),
    Practice(
        id="practice-recompute",
        source="002, best practices",
        says="recompute activations where memory is short",
        lints=("no-recompute-when-full", "recompute-without-need"),
    ),
    Practice(
        id="practice-mixed-precision",
        source="002, best practices",
        says="compute in 16 bits; model states do not shrink by it (002-42)",
        lints=("fp32-on-tensor-cores", "fp16-where-bf16-is"),
    ),
    Practice(
        id="pitfall-tensor-over-nodes",
        source="002, pitfalls",
        says="tensor parallelism over nodes is bound by the network",
        lints=("tp-across-nodes",),
    ),
    Practice(
        id="pitfall-world-size",
        source="002, pitfalls",
        says="the degrees must multiply to the world size",
        lints=("part-of-a-node", "idle-devices"),
    ),
    Practice(
        id="pitfall-fragments",
        source="002, pitfalls",
        says="gathering and freeing parameters fragments memory",
        instead="buckets here are allocated once and used again; see 002-52",
    ),
    Practice(
        id="pitfall-uneven-stages",
        source="002, pitfalls",
        says="uneven stages wait for the slowest",
        lints=("stages-uneven", "empty-stages"),
    ),
    Practice(
        id="practice-sequence-parallel",
        source="003, section 5",
        says="tensor parallelism leaves norms whole; cut them along the sequence",
        lints=("no-sequence-parallel",),
    ),
    Practice(
        id="practice-wrapping",
        source="004, section 6",
        says="the units that are gathered decide what overlaps",
        lints=("no-prefetch", "shards-over-nodes", "zero-3-many-microbatches"),
    ),
    Practice(
        id="practice-buckets",
        source="002, key behaviours; 003, section 1",
        says="fuse small gradients into buckets and send them during backward",
        lints=("bucket-too-small",),
    ),
)
