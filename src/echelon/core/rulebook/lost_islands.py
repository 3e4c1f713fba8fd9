# SPDX-License-Identifier: Apache-2.0
"""Rules about islands of local SGD that may be lost while the others go on."""

from echelon.core.rules import Rule

LOCAL_SGD_MIN_ISLANDS = Rule(
    id="local-sgd-min-islands",
    why="""
    `local_sgd.min_islands` says with how few islands a run goes on when others are lost. A run that
    starts with fewer would end at once.
    """,
    example="""
    [mesh]
    dp_replicate = 2
    [local_sgd]
    every = 50
    %s
    """,
    bad="min_islands = 3",
    fixed="min_islands = 1",
)

LOST_ISLANDS_MEET_AT_ONCE = Rule(
    id="lost-islands-meet-at-once",
    why="""
    A meeting of islands that may be lost counts for all ranks or for none, and is held again with
    those that are left. So an outer step is taken in the step of its meeting, from differences as
    they are: a sum that is still under way when an island is lost (`delay`), or codes of 8 bits
    that each island gathers, are not built for it.
    """,
    example="""
    [mesh]
    dp_replicate = 2
    [local_sgd]
    every = 50
    min_islands = 1
    %s
    """,
    bad="delay = 5",
    fixed="delay = 0",
)

LOST_ISLANDS_NEED_GLOO = Rule(
    id="lost-islands-need-gloo",
    why="""
    Islands that may be lost meet in groups that are made while they train, each time that others
    are there, and that end with an error where a member is lost. Gloo's do so; a communicator of
    NCCL with a lost member can only be aborted, with what it has in flight on the device.
    """,
    example="""
    [cluster]
    preset = "8xh100"
    [mesh]
    dp_replicate = 2
    [local_sgd]
    every = 50
    %s
    """,
    bad="min_islands = 1",
    fixed='min_islands = "all"',
)

LOST_ISLANDS_HOLD_DENSE_MODELS = Rule(
    id="lost-islands-hold-dense-models",
    why="""
    Routers of experts have biases and loads that each island keeps for itself, beside what islands
    agree on. An island that comes back gets what islands agree on; biases of routers are not among
    it.
    """,
    example="""
    [model]
    %s
    [mesh]
    dp_replicate = 2
    [local_sgd]
    every = 50
    min_islands = 1
    """,
    bad='preset = "mixtral-8x7b"',
    fixed='preset = "nano"',
)

LOST_ISLANDS_LEAVE_NO_VALIDATION = Rule(
    id="lost-islands-leave-no-validation",
    why="""
    Validation is a mean over all islands: each reads its share of the held-out batches, and all
    wait for it. Where a run goes on without lost islands nobody may wait for one, so it is not
    validated while it trains. Its checkpoints can be: `echelon train` from one with
    `min_islands = "all"`.
    """,
    example="""
    [mesh]
    dp_replicate = 2
    [local_sgd]
    every = 50
    min_islands = 1
    [train]
    %s
    """,
    bad="validate_every = 50",
    fixed='validate_every = "never"',
)

LOST_ISLANDS_SAVE_AT_MEETINGS = Rule(
    id="lost-islands-save-at-meetings",
    why="""
    Only at the end of a round all islands that are there know who is there: between two meetings
    one may be lost, and the others would wait for its part of a checkpoint. So checkpoints are
    written where rounds end.
    """,
    example="""
    [mesh]
    dp_replicate = 2
    [local_sgd]
    every = 50
    min_islands = 1
    [checkpoint]
    %s
    """,
    bad="every = 75",
    fixed="every = 100",
)

LOST_ISLANDS_NEED_OUR_LAUNCHER = Rule(
    id="lost-islands-need-our-launcher",
    why="""
    torchrun ends all of its processes when one has failed, and starts all of them again or none. So
    `local_sgd.min_islands` works where Echelon starts the ranks itself, on one machine.
    """,
    bad="torchrun --nproc-per-node 4 -m echelon train run.toml      # local_sgd.min_islands = 1",
    fixed="echelon train run.toml",
)

ISLANDS_ARE_THERE = Rule(
    id="islands-are-there",
    why="""
    An island that was started again gets the outer parameters from one that has trained on. Where
    the last of these is lost before it is in, nobody has them any more, and the run ends; it goes
    on from its last checkpoint.
    """,
    bad="kill -9 of a rank of every island within a second",
    fixed="echelon train run.toml --resume runs/first",
)

PROVE_LOST_ISLAND = Rule(
    id="prove-lost-island",
    why="""
    An island that is lost in the middle of a meeting leaves others with parts of what it moved. All
    ranks of all islands that are left take the outer step with it, or all without it: each tells
    the same islands at the same meetings. One that was started again comes in at the end of a round
    that all of them say, and is in every meeting after it.
    """,
    bad="take the outer step when this rank has its sums",
    fixed="take the outer step when every rank of every island that met has its sums",
)

PROVE_MEETINGS_REPLAYED = Rule(
    id="prove-meetings-replayed",
    why="""
    Who is lost when is not known before a run. Given the recorded islands of each meeting, one
    process that trains them one after another must come to the same outer parameters, momentum and
    parameters of each island, in float64 to 1e-10. The mean is over the islands that met, and one
    that comes back goes on from the outer parameters and momentum of the others, with an inner
    optimizer that begins anew.
    """,
    bad="sum / islands                # one of them was not there",
    fixed="sum / islands that met",
)
