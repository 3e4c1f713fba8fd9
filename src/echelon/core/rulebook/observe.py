# SPDX-License-Identifier: Apache-2.0
"""Rules about looking at a run: what it must have left behind to be drawn."""

from echelon.core.rules import Rule

RUN_HAS_EVENTS = Rule(
    id="run-has-events",
    why="""
    A timeline is drawn from what every rank wrote down while it ran: events.jsonl.gz of rank 0 and
    events.rank-NNNN.jsonl.gz of the others. A run with observe.events = false has none, and ranks
    on several hosts without a shared folder leave theirs on their own host.
    """,
    example="""
    %s
    echelon observe runs/nano --schedule
    """,
    bad="echelon train nano --set mesh.pp=2 --set observe.events=false",
    fixed="echelon train nano --set mesh.pp=2",
)

RUN_IS_PIPELINED = Rule(
    id="run-is-pipelined",
    why="""
    The schedule of a pipeline says which rank computes what and when, and its bubble is what ranks
    wait for each other. A run with pp = 1 has neither: each rank computes every microbatch.
    """,
    example="""
    %s
    echelon observe runs/nano --schedule
    """,
    bad="echelon train nano",
    fixed="echelon train nano --set mesh.pp=2",
)

RUN_HAS_EXPERTS = Rule(
    id="run-has-experts",
    why="""
    Which experts are busy is a question about a mixture of experts: a model whose blocks are all
    dense has one MLP per block, which every token meets.
    """,
    bad="""
    echelon train nano
    echelon observe runs/nano --experts
    """,
    fixed="""
    echelon train examples/experts.toml
    echelon observe runs/experts --experts
    """,
)

STEP_RECORDED = Rule(
    id="step-recorded",
    why="""
    A step can be drawn once all its ranks have written the events of the whole step, which they do
    when it ends. A long run keeps every k-th step, so that its events stay within
    observe.events_budget_bytes. Steps are counted from 1, as the step lines count them. A step in
    which ranks ran other actions than the plan's schedule has is not drawn as if it were that
    schedule. The loads of experts are written with every step line (observe.log_every), not in
    every step.
    """,
    bad="echelon observe runs/nano --schedule --step 9000     # it had 2000 steps",
    fixed="echelon observe runs/nano --schedule --step 2000",
)

EVENTS_READABLE = Rule(
    id="events-readable",
    why="""
    Each line of an events file is one event as JSON: kind, name, axis, stage, microbatch, bytes,
    start, end, rank; each of metrics.jsonl, routing.jsonl and of logs/rank-*.jsonl is one entry.
    A kill leaves half a line, or half a gzip member, at the end of a file, which is skipped; any
    other line that cannot be read means that the file was changed or damaged after it was written.
    """,
    bad="zcat runs/nano/events.jsonl.gz | head -c 10000 | gzip > events.jsonl.gz     # put back",
    fixed="the file as the run wrote it",
)

RUN_HAS_METRICS = Rule(
    id="run-has-metrics",
    why="""
    A tracker is given what metrics.jsonl says, which rank 0 writes from the start of the first step
    on. A run that was prepared and never started has none, and ranks on several hosts without a
    shared folder leave it on the host of rank 0.
    """,
    bad="echelon observe runs/nano --mirror tensorboard     # on another host",
    fixed="echelon observe runs/nano --mirror tensorboard     # on the host of rank 0",
)

MIRROR_NOT_IN_USE = Rule(
    id="mirror-not-in-use",
    why="""
    Two processes that mirror one run in one tracker would write each line twice. While a run with
    observe.trackers goes on, its own mirror is at work.
    """,
    bad="echelon observe runs/nano --mirror wandb     # twice at once",
    fixed="wait for the first to end",
)

MIRROR_WORKS = Rule(
    id="mirror-works",
    why="""
    What a tracker's package raises ends the mirror and not the run, whose metrics.jsonl has all of
    it. The mirror knows how far it got, and goes on from there when it is asked again.
    """,
    example="""
    %s
    echelon observe runs/nano --mirror mlflow
    """,
    bad="export MLFLOW_TRACKING_URI=http://localhost:5000     # where no server is",
    fixed="export MLFLOW_TRACKING_URI=http://localhost:8080     # where it is",
)
