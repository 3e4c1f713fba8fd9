# SPDX-License-Identifier: Apache-2.0
"""Rules of a proof with late completion: who may use memory when."""

from echelon.core.rules import Rule

PROVE_LATE_SUBJECT = Rule(
    id="prove-late-subject",
    why="""
    A proof with late completion gives the subject a third argument, the policy that makes its
    groups, pools, streams and stores (`parallel/completion/completion.py`). A subject that makes
    its own has operations that nobody can delay or watch, so nothing would be proven of them.
    """,
    bad="def build(place, plan): ...                     # proven with late=True",
    fixed="def build(place, plan, completion=None): ...",
)

PROVE_AWAITED = Rule(
    id="prove-awaited",
    why="""
    The result of an asynchronous operation is there when the operation has been awaited. Who reads
    it before, or never waits, reads whatever the transport has written so far: the right numbers on
    an idle machine, others on a busy one. Under late completion it is NaN until then, and the first
    operation that reads it is told.
    """,
    bad="pending = group.all_gather(whole, shard, name=name, async_op=True); use(whole)",
    fixed="pending = group.all_gather(whole, shard, name=name, async_op=True); pending.wait(); "
    "use(whole)",
)

PROVE_IN_FLIGHT = Rule(
    id="prove-in-flight",
    why="""
    What an operation reads stays as it is, and what it fills is nobody else's, until it has been
    awaited. A buffer that is reused too early sends the next thing in the place of this one, or
    both in part.
    """,
    bad="pending = group.send(x, 1, name=name, tag=0); x.mul_(2); pending.wait()",
    fixed="pending = group.send(x, 1, name=name, tag=0); pending.wait(); x.mul_(2)",
)

PROVE_FREED = Rule(
    id="prove-freed",
    why="""
    Memory is given back once, when no operation that reads or fills it is in flight and nobody uses
    it any more. Given back too early it belongs to two owners; given back twice it is lent to two.
    """,
    bad="pending = group.all_gather(whole, shard, name=name, async_op=True); memory.release()",
    fixed="pending = group.all_gather(whole, shard, name=name, async_op=True); pending.wait(); "
    "use(whole); memory.release()",
)

PROVE_LATE = Rule(
    id="prove-late",
    why="""
    When operations complete is no part of the mathematics: a run in which each of them completes
    only when somebody waits for it gives the same losses, gradients, norms and parameters as a run
    in which they complete as soon as they can, bit for bit.
    """,
    bad="if pending.done(): use_now() else: use_later()  # in another order of sums",
    fixed="pending.wait(); use()",
)
