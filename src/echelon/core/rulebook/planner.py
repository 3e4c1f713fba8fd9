# SPDX-License-Identifier: Apache-2.0
"""Rules about the search for a plan, about predictions, and about rehearsals."""

from echelon.core.rules import Area, Rule

UNKNOWN_PIN = Rule(
    id="unknown-pin",
    why="""
    `--pin key=value` keeps the search to plans with this value, or with one of several
    (`tp=4,8`). Degrees are tp, pp, cp, dp, dp_replicate, dp_shard, ep and expert_tp; the rest is
    zero (0 to 3), schedule, virtual (stages on each pipeline rank), microbatch (sequences),
    recompute (none, full, full/2 for every second block, selective, operators such as
    norm+activation, or full/3+norm), context (how context ranks meet), ulysses (its degree),
    sequence_parallel, offload (host: optimizer state), reshard, secondary and devices. Every word
    that a page prints of a plan is taken too (`cp=4g`, `zero=1+h`, `schedule=1f1b x6`), alone
    (`tp2s`) or in a whole line: `--pin "pp2 dp4, ZeRO 1, 1f1b, microbatches of 2"`.
    """,
    bad="echelon plan llama3-8b --cluster 8xh100 --pin tensor=8",
    fixed="echelon plan llama3-8b --cluster 8xh100 --pin tp=8",
)

PIN_EXCLUDES_EVERYTHING = Rule(
    id="pin-excludes-everything",
    why="""
    With what is pinned no plan is legal, or none fits into memory, and without one of the pins
    there is one: the error names what the best plan without it has in its place. Where memory is
    the reason it has the numbers of the leanest plan, and the page the other changes that fit.
    """,
    bad="echelon plan llama3-8b --cluster 8xh100 --pin tp=3     # 8 devices, 32 heads",
    fixed="echelon plan llama3-8b --cluster 8xh100 --pin tp=4",
)

PLAN_FITS_MEMORY = Rule(
    id="plan-fits-memory",
    why="""
    A plan is kept where the fullest rank holds no more than the memory of its device: parameters,
    gradients, optimizer state, gathered units, activations in flight, logits, buffers, and what the
    allocator and the device's context take beside. Where no plan of a cluster is kept, the leanest
    is told with its bytes by term, and what would fit: the smallest cluster of the same devices,
    with optimizer state on the host and without, LoRA, the cheapest other change of the run that
    fits here, and common devices with more memory, each with its time of a token.
    """,
    bad="echelon plan llama2-70b --cluster 8xa100-40gb",
    fixed="echelon plan llama2-70b --cluster 64xa100-40gb",
)

SEARCH_SPLITS_ONE_TRAINING = Rule(
    id="search-splits-one-training",
    why="""
    A search compares layouts of the same mathematics. With `local_sgd.every` each replica is a
    training of its own between meetings, so another number of them is another training. Search for
    the layout of one island on its devices, then plan the run with the number of islands that you
    want as `mesh.dp_replicate`. Parameter servers (`servers.count`) are not searched either: how
    many workers they have says how late gradients are, which is mathematics.
    """,
    bad="echelon plan llama3-8b --cluster 16xh100 --set local_sgd.every=50",
    fixed="echelon plan llama3-8b --cluster 8xh100",
)

NO_PLAN_IS_LEGAL = Rule(
    id="no-plan-is-legal",
    why="""
    Every mesh of so many devices breaks a rule before memory is looked at: most often the global
    batch has no divisor that the data ranks could have. The counts say which rules, the nearest
    batch that works stands beside.
    """,
    bad="echelon plan llama3-8b --cluster 8xh100 --set batch.global_sequences=7 --pin dp=8",
    fixed="echelon plan llama3-8b --cluster 8xh100 --set batch.global_sequences=8 --pin dp=8",
)

UNKNOWN_TRAINER = Rule(
    id="unknown-trainer",
    why="""
    Seconds and bytes of one plan differ between trainers: by their kernels, by what they send
    behind compute, by the dtype in which gradients add up. `--trainer` names one whose facts are
    known; "echelon" is this one, "generic" stands for any other.
    """,
    bad="echelon plan llama3-8b --cluster 8xh100 --trainer megatorn",
    fixed="echelon plan llama3-8b --cluster 8xh100 --trainer megatron-core",
)

TRAINER_RUNS_PIN = Rule(
    id="trainer-runs-pin",
    why="""
    A search with `--trainer` keeps to what that trainer can be told and can run: each has its own
    pipeline schedules, its own ways for context ranks to meet and its own recompute. A pin to
    something else leaves no plan.
    """,
    bad="echelon plan llama3-8b --cluster 8xh100 --trainer deepspeed --pin schedule=zb-v",
    fixed="echelon plan llama3-8b --cluster 8xh100 --trainer deepspeed --pin schedule=1f1b",
)

OBJECTIVE_NEEDS_PRICE = Rule(
    id="objective-needs-price",
    why="""
    The cost of a token is the price of a device for an hour, times devices, over the tokens of an
    hour. The price is yours to say; it differs between the same devices of two owners.
    """,
    bad="echelon plan llama3-8b --cluster 8xh100 --objective cost",
    fixed="echelon plan llama3-8b --cluster 8xh100 --objective cost --price 2.5",
)


COST_AREA = Area("cost")
"""What a prediction needs to know."""

ZERO_NEEDS_DEGREE = Rule(
    id="zero-needs-degree",
    why="""
    What ZeRO saves depends on N, the number of data ranks that share the states of a model. At
    stage 1 a rank holds 4 psi + 12 psi/N bytes: 16 psi at N = 1, 7 psi at N = 4, 4.19 psi at N =
    64. "4x less" is the limit for N without end, which no cluster reaches, so without N there is no
    figure to give.
    """,
    bad="echelon explain zero --parameters 7e9",
    fixed="echelon explain zero --parameters 7e9 --dp 4",
)

PREDICTION_IN_RANGE = Rule(
    id="prediction-in-range",
    why="""
    A number of parameters, of ranks or of bytes that a prediction is asked for must be at least 1,
    and finite; a number of ranks or parameters is whole.
    """,
    bad="echelon explain zero --dp 0",
    fixed="echelon explain zero --dp 1",
)


PLAN_NUMBERS_AGREE = Rule(
    id="plan-numbers-agree",
    why="""
    A plan prints sums with their terms, rates with their seconds and devices, prices with both, and
    the same numbers on its page. Each follows from the others, so `echelon plan` computes each from
    the others before it prints them. A difference is a fault of Echelon: please report it.
    """,
    bad="held_bytes 66,203,242, and terms that add up to 66,170,474",
    fixed="held_bytes 66,203,242, and terms that add up to 66,203,242",
)

REHEARSE_AREA = Area("rehearse")
"""A rehearsal: what NCCL asks of the order of the ranks' calls, and of their memory."""

REHEARSE_DEADLOCK = Rule(
    id="rehearse-deadlock",
    why="""
    A collective of NCCL runs when all members have come to it, behind the one before it on its
    communicator; the stream that computes waits where its rank said so, and the host waits in the
    first call of a communicator and where it reads from the device. If these waits form a circle,
    each of its ranks waits for the next one and none ever goes on.
    """,
    bad="rank 0: send to 1, then open the group of both; rank 1: open the group, then receive",
    fixed="every rank opens its groups at the start, in one order",
)

REHEARSE_MISMATCH = Rule(
    id="rehearse-mismatch",
    why="""
    NCCL has no tags: the first call of each member on a communicator is one operation, the second
    the next. Calls of other kinds, of other sizes or of other dtypes under one number are written
    into each other's memory, or never end.
    """,
    bad="rank 0: all_reduce(a), all_reduce(b); rank 1: all_reduce(b), all_reduce(a)",
    fixed="both: all_reduce(a), all_reduce(b)",
)

REHEARSE_OTHER_DATA = Rule(
    id="rehearse-other-data",
    why="""
    NCCL looks at no names: calls of one kind and size are one operation, whatever their memory
    holds. The data of a call is known by the parameters and the element where it begins, or by
    payload, microbatch and stages of a message. Members with different data add up or exchange
    unrelated tensors, and nothing hangs.
    """,
    bad="rank 0: send(x of microbatch 0), send(x of microbatch 1); rank 1: receives 1, then 0",
    fixed="both ends: microbatch 0, then microbatch 1",
)

REHEARSE_MISSING = Rule(
    id="rehearse-missing",
    why="""
    Every member of a communicator makes every call on it. The others wait for one that makes fewer
    until the watchdog of NCCL ends the run.
    """,
    bad="if rank == 0: group.all_reduce(x, name='x')",
    fixed="group.all_reduce(x, name='x')",
)

REHEARSE_MISSING_WAIT = Rule(
    id="rehearse-missing-wait",
    why="""
    A collective runs beside the computation from its issue to its wait. What reads its result
    before, or writes what it reads or fills, races with it: right on an idle machine, wrong on a
    busy one.
    """,
    bad="pending = group.all_gather(whole, part, name='w', async_op=True); y = x @ whole",
    fixed="pending = group.all_gather(whole, part, name='w', async_op=True); pending.wait(); "
    "y = x @ whole",
)

REHEARSE_RELEASED_IN_FLIGHT = Rule(
    id="rehearse-released-in-flight",
    why="""
    Memory that a collective reads or fills is its own until the wait. The allocator of a GPU gives
    what is released to the next one that asks, at once.
    """,
    bad="pending = group.all_gather(whole, part, name='w', async_op=True); memory.release()",
    fixed="pending = group.all_gather(whole, part, name='w', async_op=True); pending.wait(); "
    "memory.release()",
)

REHEARSE_NEVER_AWAITED = Rule(
    id="rehearse-never-awaited",
    why="""
    A step ends when all that it has begun has been awaited, but for parameters that are gathered
    for the next one. What nobody waits for may still be under way when its memory is used again.
    """,
    bad="group.all_reduce(gradients, name='g', async_op=True)",
    fixed="pending = group.all_reduce(gradients, name='g', async_op=True); ...; pending.wait()",
)

REHEARSE_HOST_READ = Rule(
    id="rehearse-host-read",
    why="""
    A GPU is kept busy by a host that runs ahead of it. Where the host reads a number from the
    device in the middle of a schedule, it waits for all that it has given the device, and the
    device then waits for the host. Sizes that follow from the routing of tokens are the one thing
    that a host has to read: without a capacity nothing else knows them.
    """,
    bad="if mask.any(): x = x[mask]",
    fixed="x = x.masked_fill(~mask, 0.0)",
)

REHEARSE_CLASS = Rule(
    id="rehearse-class",
    why="""
    Ranks that differ in their samples, columns or slices only are rehearsed once for all of them.
    Some of the others are rehearsed, too, and must do the very same. One that does not means that
    the ranks which were not rehearsed are not known.
    """,
    bad="if rank == 5: group.all_reduce(x, name='x')",
    fixed="group.all_reduce(x, name='x')",
)

REHEARSE_NUMBER = Rule(
    id="rehearse-number",
    why="""
    A plan prints the bytes that each rank sends, holds and has at its peak, and the actions,
    messages and microbatches of its schedule. The rehearsed rank counts the same numbers while the
    engine runs. All but the peak must be equal; a peak may be off by a twentieth. Another number
    means that the formula or the engine is wrong.
    """,
    bad="the plan: 4,096 bytes sent over dp to other nodes; the rank: 2,048",
    fixed="the plan: 2,048 bytes sent over dp to other nodes; the rank: 2,048",
)
