"""Which replica has which sequences, and what each gives to a gradient."""

from __future__ import annotations

import torch

from echelon.proof.causes.forward.threads import replica_of_rows
from echelon.proof.causes.gradients.threads import gradients_of_replicas
from echelon.proof.oracle.oracle import run_oracle
from echelon.proof.shrink import shrink
from tests.proof.mutants.threads import threaded


def test_each_microbatch_is_dealt_in_runs() -> None:
    plan = threaded(replicas=2, each=2, accumulation=2)
    assert replica_of_rows(plan).tolist() == [0, 0, 1, 1, 0, 0, 1, 1]


def test_parts_of_replicas_add_up_to_the_gradient() -> None:
    plan = shrink(threaded(replicas=3, accumulation=1), precision="fp64")
    (oracle,) = run_oracle(plan, 1)
    parts = gradients_of_replicas(plan, oracle, "head.weight")
    assert len(parts) == 3
    assert not torch.allclose(parts[0], parts[1])
    right = oracle.gradients["head.weight"] / oracle.loss_scale
    assert torch.allclose(sum(parts[1:], start=parts[0]), right, rtol=1e-12, atol=1e-14)
