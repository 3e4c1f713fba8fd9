"""What goes through a primary, and what replicas hold, in numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

from echelon.core.choices.threads import Threads
from echelon.core.parameters import num_parameters
from echelon.core.plan import Plan
from echelon.cost.bytes.held import bytes_held
from echelon.cost.bytes.sent import bytes_sent, bytes_sent_by_axis
from echelon.cost.bytes.threads import ByRows, ThreadedPass, ThreadedStep, step_bytes
from tests.parallel.layouts import NANO, plan_of


def threaded(replicas: int) -> Plan:
    plan = plan_of(dtype="fp32")
    numbers = replace(plan.mathematics, global_sequences=24, sequence_length=10)
    layout = replace(plan.layout, microbatch_sequences=12, threads=Threads(replicas=replicas))
    return replace(plan, mathematics=numbers, layout=layout)


def test_all_bytes_go_through_the_primary() -> None:
    psi = num_parameters(NANO)
    terms = {term.name: term.bytes for term in bytes_sent(threaded(4), 0)}
    assert terms == {
        "replicate": 3 * 4 * psi,
        # Two microbatches; three others take 3 of 12 sequences each: 2 x 10 tokens and an id.
        "scatter": 2 * 3 * 3 * 8 * 21,
        "gather": 2 * 3 * 4,
        "seeds": 2 * 3 * 4,
        "gradients": 3 * 4 * psi,
    }
    assert bytes_sent_by_axis(threaded(4), 0) == {"threads": sum(terms.values())}
    assert bytes_sent(threaded(1), 0) == ()


def test_replicas_rest_where_the_primary_does_unless_they_have_gpus() -> None:
    psi, plan = num_parameters(NANO), threaded(3)
    held = {term.name: term.bytes for term in bytes_held(plan, 0)}
    alone = {term.name: term.bytes for term in bytes_held(threaded(1), 0)}
    others = {"parameters of replicas": 8 * psi, "gradients of replicas": 8 * psi}
    assert held == alone | others
    gpus = replace(plan, cluster=replace(plan.cluster, backend="nccl"))
    assert {term.name: term.bytes for term in bytes_held(gpus, 0)} == alone


def test_a_step_of_a_module_counts_what_is_not_the_primarys() -> None:
    """Four replicas; 10 rows are 3, 3, 3, 1, and 2 rows are two replicas' with one each."""
    full = ThreadedPass(
        rows=10,
        inputs=ByRows(cut=100, each=8),
        outputs=ByRows(cut=50),
        seeds=ByRows(cut=50),
        gradients=1000,
        input_gradients=ByRows(each=8),
    )
    last = ThreadedPass(rows=2, inputs=ByRows(cut=20, each=8), outputs=ByRows(cut=10))
    step = ThreadedStep(replicas=4, state=1200, passes=[last, full])
    assert {term.name: term.bytes for term in step_bytes(step)} == {
        "replicate": 3 * 1200,
        "scatter": 70 + 3 * 8 + 10 + 8,
        "gather": 35 + 5,
        "seeds": 35,
        "gradients": 3 * 1000,
        "input gradients": 3 * 8,
    }
    alone = ThreadedStep(replicas=1, state=1200, passes=[full])
    assert {term.bytes for term in step_bytes(alone)} == {0}
    assert {term.axis for term in step_bytes(step)} == {"threads"}
