"""What a trainer does that its plan does not say: facts of a generation of frameworks.

Seconds and bytes of one plan differ between trainers, by how many kernels a block is, how
often a value is written to memory between them, in which dtype gradients are added up and sent, and
what is sent while a device computes. These are facts of code and the constants of its kernels: no
field belongs to a model, a cluster or a published run.
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.cost.lattice.numbers import Num


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Give the facts of a trainer; numbers, or arrays where rows of a table differ.

    Parameters and activations are of `element_bytes`; other bytes are told for elements of 2.
    `fused_attention` is 1 for one kernel that never writes the scores, which skips what a causal
    mask hides; without it a score costs `score_bytes` of memory traffic forward (and 1.5 times as
    much backward). Its fused kernel reaches `fused_share` of what the best one of the device does.
    A block moves `width_bytes` x tokens x hidden forward beside its products, and
    `inner_bytes` x tokens x ffn. A block is `kernels` kernels forward, and 1.5 times as many
    backward; the host starts each in `host_s`, while the device is at work on those before it or,
    with `host_adds` 1, is the device. A pass through experts waits `mixture_s` for the host to read
    how many tokens each gets. The loss moves `logit_bytes` for each logit.
    With `by_pairs` 1 gathers and reduce-scatters are messages between each pair of ranks, and
    inputs that sequence parallelism cut are gathered once more for their weights' gradients; a hop
    of a collective of the library's own takes `own_hops` of what one of those messages takes.
    One more rank that is spoken to at the same time takes `pair_hops` of the first one's latency.
    Gradients add up in `gradient_bytes` an element, for which a microbatch moves `adding_bytes` of
    each weight (0: products do it in passing), and travel in `reduced_bytes`; of the backward pass
    of the last microbatch the share `reduce_overlap` hides their travel, which reaches
    `reduce_share` of what a collective of the cluster does; `gather_overlap` is the share of
    compute under which gathers of ZeRO are hidden, which reach `gather_share` of a link (little,
    where each parameter travels by itself), `expert_overlap` that of rows to experts; with
    `once_per_node` 1 a token crosses to a node once. `tensor_overlap` that of exchanges of tensor
    parallelism, `pipeline_overlap` of messages between stages that do not wait.
    `step_s` is what a step costs beside: data, logging, the host's part of the update; the times of
    ranks vary by the share `spread`.

    Of memory: `state_bytes` are those of the optimizer for a weight (with its master copy), and
    `update_bytes` what an update needs beside, for a while (gradients in fp32, products).
    `dropout` is 1 where masks are kept. A block that runs has `working_width` bytes for each token
    and width beside what it keeps, and the loss `logit_held` for each logit. `context_bytes` are
    taken before the first tensor (the device's context, buffers of collectives); an allocator holds
    `slack` more than is in use.
    """

    element_bytes: Num = 2.0
    fused_attention: Num = 1.0
    fused_share: Num = 1.0
    score_bytes: Num = 16.0
    width_bytes: Num = 40.0
    inner_bytes: Num = 8.0
    kernels: Num = 40.0
    host_s: Num = 6e-6
    host_adds: Num = 0.0
    by_pairs: Num = 0.0
    own_hops: Num = 1.0
    pair_hops: Num = 1.0
    mixture_s: Num = 1e-3
    logit_bytes: Num = 24.0
    gradient_bytes: Num = 4.0
    adding_bytes: Num = 0.0
    reduced_bytes: Num = 4.0
    reduce_overlap: Num = 0.0
    reduce_share: Num = 0.8
    gather_overlap: Num = 0.8
    gather_share: Num = 1.0
    expert_overlap: Num = 0.0
    once_per_node: Num = 0.0
    tensor_overlap: Num = 0.0
    pipeline_overlap: Num = 0.0
    scattered_messages: Num = 1.0
    optimizer_bytes: Num = 40.0
    interference: Num = 0.0
    step_s: Num = 0.01
    spread: Num = 0.01
    state_bytes: Num = 12.0
    update_bytes: Num = 0.0
    dropout: Num = 0.0
    working_width: Num = 16.0
    logit_held: Num = 10.0
    context_bytes: Num = 2.0e9
    slack: Num = 0.04
