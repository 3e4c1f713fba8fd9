# SPDX-License-Identifier: Apache-2.0
"""Rules about plans that leave: what is read as a plan, and what another tool has no word for."""

from echelon.core.rules import Rule

EXPORT_NOT_EXPRESSIBLE = Rule(
    id="export-not-expressible",
    why="""
    Every setting of the plan is written in the words of the tool, or recorded beside them because
    the tool takes it from elsewhere (the model from a script, the data from a loader) or has no
    word for something that changes speed only. What is left would let the tool train another run,
    or split it in another way: it is refused by name, with the reason, and with the targets that
    can say it. A run.toml says everything.
    """,
    bad='echelon export run.toml --to megatron     # pipeline.schedule = "zb-v"',
    fixed="echelon export run.toml --to torchtitan     # ZBVZeroBubble",
)

EXPORT_NEEDS_OUT = Rule(
    id="export-needs-out",
    why="""
    A schedule of one's own, or a cluster that is no preset, is a file of its own beside the one
    that is written, and named in it. With --out both are written into one folder; on a terminal
    the second would be lost.
    """,
    bad="echelon export runs/searched --to run.toml     # its schedule was found by a search",
    fixed="echelon export runs/searched --to run.toml --out again/run.toml",
)

PLAN_SOURCE = Rule(
    id="plan-source",
    why="""
    A plan is read from a run.toml or a preset, from the plan.json of a run, or from the folder of
    a run. A plan.json is read by the version that wrote it: its schema is in it.
    """,
    bad="echelon compare runs/nano/metrics.jsonl run.toml",
    fixed="echelon compare runs/nano run.toml",
)
