"""How much transfer time the dependency graph of a step forces onto its wall time.

One link carries what the outermost axis of a mode sends between two hosts. Every function here
starts from the seconds of the same step on links that cost nothing (`compute_s`) and returns the
seconds that slow links must add, however well the rest is overlapped. Compute is shared out over
operations by their multiply-adds (`work.py`). Where replicas lie on different hosts and
shards of one replica on the same, only sums of gradients cross, as without shards.
"""

from __future__ import annotations

from bench.harness.exposed_zero import forced_by_zero
from bench.harness.hosts import Link
from bench.harness.spec import Mode, Size
from bench.harness.work import ELEMENT_BYTES, NUM_HOSTS, backward_of_block, work_of
from echelon.schedule.build import build_schedule
from echelon.schedule.simulate import Durations, simulate


def forced_s(size: Size, mode: Mode, link: Link, compute_s: float) -> float:
    """Return the seconds that transfers between two hosts must add to a step of `mode`."""
    if mode.pp > 1:
        return forced_by_pipeline(size, mode, link, compute_s)
    if mode.zero_stage > 0 and mode.dp_replicate == 1:
        return forced_by_zero(size, mode, link, compute_s)
    if mode.dp > 1:
        return forced_by_data(size, mode, link, compute_s)
    return forced_by_tensor(size, mode, link, compute_s)


def forced_by_data(size: Size, mode: Mode, link: Link, compute_s: float) -> float:
    """Return what gradients force: each may leave when it exists, the link is never idle before.

    Gradients come into being from the head back to the embedding, whose own is last and cannot
    overlap with anything. With r_k the second at which gradient k exists and b_k the bytes of its
    all-reduce on the uplink, the link is done at max over k of r_k + sum of b_j / rate for j >= k;
    what is forced is that minus the end of backward. The tensor ranks of a host share its uplink,
    so together they send every gradient once, each for its own part. Replicas on one host can add
    up their gradients before they leave it.
    """
    work = work_of(size)
    rate = link.bytes_per_s
    second_per_mac = compute_s / work.step
    now = work.forward * second_per_mac
    ready: list[tuple[float, float]] = []
    hosts = min(mode.dp, NUM_HOSTS)
    factor = 2 * (hosts - 1) / hosts * ELEMENT_BYTES
    now += 2 * work.head * second_per_mac
    ready.append((now, factor * work.head))
    for _ in range(size.layers):
        for macs, weights in backward_of_block(work):
            now += macs * second_per_mac
            ready.append((now, factor * weights))
    ready.append((now, factor * size.vocab * size.hidden))
    return _link_done(ready, rate) - now


def _link_done(ready: list[tuple[float, float]], rate: float) -> float:
    done = 0.0
    for second, count in ready:
        done = max(done, second) + count / rate
    return done


def forced_by_tensor(size: Size, mode: Mode, link: Link, compute_s: float) -> float:
    """Return what the sums of partial activations force.

    Forward, nothing can run beside a sum: the next operation reads it. There is one after the
    embedding, one after attention and one after the MLP of each block. Backward there is one
    before attention, one before the MLP of each block, and one before the head; while it is under
    way, the weight gradients of that sublayer can be computed, and only what is longer than they
    are is forced. Sequence parallelism turns each sum into a reduce-scatter and an all-gather of
    half its bytes each, with the same freedom; gathering an input once more for its weight
    gradient is a choice (memory), so the graph does not force it.
    """
    work = work_of(size)
    tokens = size.global_sequences // mode.dp * size.sequence
    payload = tokens * size.hidden * ELEMENT_BYTES
    each = transfer_s(2 * (mode.tp - 1) / mode.tp * payload, link)
    second_per_mac = compute_s / work.step
    forward = each * (2 * size.layers + 1)
    beside_attention = max(0.0, each - work.projections * second_per_mac)
    beside_mlp = max(0.0, each - work.mlp * second_per_mac)
    beside_head = max(0.0, each - work.head * second_per_mac)
    return forward + size.layers * (beside_attention + beside_mlp) + beside_head


def forced_by_pipeline(size: Size, mode: Mode, link: Link, compute_s: float) -> float:
    """Return what activations and their gradients force between the stages of 1F1B.

    The schedule is run by the event simulator twice, with messages that take their time on the
    link and with free ones, stages weighed by their blocks (the last one has the head); the
    difference is forced: the first activation on its way in, the last gradient on its way out,
    and each message in between that the schedule makes a stage wait for. Replicas on one host
    send at the same time and share the uplink. The tensor ranks of a host hold the same
    activation, which needs to cross once.
    """
    work = work_of(size)
    schedule = build_schedule(
        "1f1b", num_stages=mode.pp, num_ranks=mode.pp, num_microbatches=mode.microbatches
    )
    blocks = [
        size.layers * (stage + 1) // mode.pp - size.layers * stage // mode.pp
        for stage in range(mode.pp)
    ]
    heads = [work.head * (stage == mode.pp - 1) for stage in range(mode.pp)]
    forward = [n * work.layer_forward + h for n, h in zip(blocks, heads, strict=True)]
    backward = [n * work.layer_backward + 2 * h for n, h in zip(blocks, heads, strict=True)]
    free = simulate(schedule, _durations(forward, backward, 1.0, 0.0)).makespan_s
    scale = compute_s / free
    rows = size.global_sequences // mode.microbatches
    message = rows * size.sequence * size.hidden * ELEMENT_BYTES
    durations = _durations(forward, backward, scale, transfer_s(message, link))
    return simulate(schedule, durations).makespan_s - compute_s


def _durations(
    forward: list[float], backward: list[float], scale: float, message_s: float
) -> Durations:
    forward_s = tuple(macs * scale for macs in forward)
    backward_s = tuple(macs * scale for macs in backward)
    half = tuple(seconds / 2 for seconds in backward_s)
    return Durations(
        forward_s=forward_s,
        backward_s=backward_s,
        input_gradient_s=half,
        weight_gradient_s=half,
        transfer_s=(message_s,) * (len(forward) - 1),
    )


def transfer_s(count: float, link: Link) -> float:
    """Return the seconds of one transfer on a link that was idle: the burst goes out at once."""
    return max(0.0, count - link.burst_bytes) / link.bytes_per_s
