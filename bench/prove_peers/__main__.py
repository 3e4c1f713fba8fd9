"""Put torch's own compositions through `echelon prove`: `python -m bench.prove_peers`.

Replicas are always fed different data. DDP, FSDP2, DTensor and 1F1B are expected to be proven;
torch 2.13's split-backward schedules with DDP are expected to be found wrong: right losses, wrong
gradients, and no error raised. Exit 1 where a result is not the expected one.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.core.cluster import Cluster, Device, Link
from echelon.core.errors import EchelonError
from echelon.core.mesh import Mesh
from echelon.core.model_shape import ModelShape
from echelon.core.plan import Layout, Mathematics, Optimizer, Pipeline, Plan
from echelon.cost.seconds.stages import split_layers
from echelon.launch.local.supervisor import RankPool
from echelon.proof.claims.claims import ClaimResult
from echelon.proof.run import prove
from echelon.proof.verdict import Proof


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """Name one composition of torch, the plan it is proven for, and what is expected."""

    label: str
    subject: str
    mesh: Mesh
    proven: bool
    microbatches: int = 4


COMPOSITIONS = (
    Composed(label="DDP", subject="replicas:ddp", mesh=Mesh(dp_replicate=2), proven=True),
    Composed(label="FSDP2", subject="replicas:fsdp2", mesh=Mesh(dp_shard=2), proven=True),
    Composed(label="DTensor TP", subject="tensor:dtensor", mesh=Mesh(tp=2), proven=True),
    Composed(label="1F1B", subject="pipeline:one_f_one_b", mesh=Mesh(pp=2), proven=True),
    Composed(
        label="1F1B + DDP",
        subject="pipeline:one_f_one_b",
        mesh=Mesh(pp=2, dp_replicate=2),
        proven=True,
    ),
    Composed(
        label="Interleaved 1F1B + DDP",
        subject="pipeline:interleaved",
        mesh=Mesh(pp=2, dp_replicate=2),
        proven=True,
    ),
    Composed(
        label="ZBV",
        subject="pipeline:zero_bubble_v",
        mesh=Mesh(pp=2),
        proven=True,
    ),
    Composed(
        label="InterleavedZeroBubble + DDP",
        subject="pipeline:interleaved_zero_bubble",
        mesh=Mesh(pp=2, dp_replicate=2),
        proven=False,
    ),
    Composed(
        label="ZBV + DDP",
        subject="pipeline:zero_bubble_v",
        mesh=Mesh(pp=2, dp_replicate=2),
        proven=False,
    ),
    Composed(
        label="DualPipeV + DDP",
        subject="pipeline:dual_pipe_v",
        mesh=Mesh(pp=2, dp_replicate=2),
        proven=False,
    ),
)


def main() -> int:
    """Prove every composition, print one table, compare it with what is expected."""
    parser = argparse.ArgumentParser(prog="python -m bench.prove_peers", description=__doc__)
    parser.add_argument("--only", default="", help="part of a label")
    parser.add_argument("--json", type=Path, help="write the proofs to this file")
    arguments = parser.parse_args()
    chosen = [one for one in COMPOSITIONS if arguments.only.lower() in one.label.lower()]
    unexpected = 0
    proofs: dict[str, object] = {}
    print("| torch's composition | mesh | proven | loss | gradients | first wrong tensor, factor |")
    print("|---|---|---|---|---|---|")
    with RankPool(4) as pool:
        for one in chosen:
            try:
                proof = prove(
                    composed_plan(one),
                    run_ranks=pool.run,
                    subject=f"bench.prove_peers.{one.subject}",
                )
            except EchelonError as error:
                print(f"| {one.label} | | did not run: {error} | | | |", flush=True)
                unexpected += 1
                continue
            proofs[one.label] = proof.to_json()
            unexpected += proof.proven != one.proven
            print(_row(one, proof), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(proofs, indent=1) + "\n")
    print(f"{len(chosen) - unexpected} of {len(chosen)} as expected")
    return 1 if unexpected else 0


def composed_plan(composed: Composed) -> Plan:
    """Return the plan of one composition; the prover makes it smaller still."""
    mesh = composed.mesh
    return Plan(
        name=composed.label,
        mathematics=Mathematics(
            model=_SHAPE,
            global_sequences=2 * composed.microbatches * mesh.dp,
            sequence_length=16,
            seed=7,
            optimizer=replace(Optimizer(), total_steps=6, warmup_steps=2),
        ),
        layout=Layout(
            mesh=mesh,
            microbatch_sequences=2,
            pipeline=Pipeline(schedule="1f1b", stages=split_layers(_SHAPE.layers, mesh.pp)),
        ),
        cluster=Cluster(
            name="one machine",
            device=Device(name="cpu", memory_bytes=8 * 2**30, memory_bandwidth=1e10),
            devices_per_node=mesh.world_size,
            nodes=1,
            links=(Link(name="loopback", degree=mesh.world_size, bandwidth=1e9, latency_s=1e-4),),
            backend="gloo",
        ),
    )


_SHAPE = ModelShape(
    name="llama-like",
    layers=4,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=48,
    vocab=96,
    max_positions=16,
)


def _row(composed: Composed, proof: Proof) -> str:
    mesh = " x ".join(
        f"{axis}{degree}"
        for axis, degree in (
            ("pp", composed.mesh.pp),
            ("dp", composed.mesh.dp),
            ("tp", composed.mesh.tp),
        )
        if degree > 1
    )
    claims = {claim.rule.id: claim for claim in proof.passes[0].claims}
    loss, gradients = (_word(claims[rule]) for rule in ("prove-loss", "prove-gradients"))
    diagnosis = proof.diagnosis
    wrong = "" if diagnosis is None else f"{diagnosis.sentence()} (factor {diagnosis.factor})"
    verdict = "yes" if proof.proven else "NO"
    note = "" if proof.proven == composed.proven else " (not as expected)"
    return f"| {composed.label} | {mesh} | {verdict}{note} | {loss} | {gradients} | {wrong} |"


def _word(claim: ClaimResult) -> str:
    """Return how a claim fared; a loss can only be wrong after wrong gradients were applied."""
    if claim.holds:
        return "right"
    first = min(claim.failures, key=lambda failure: failure.step)
    before = "" if first.step == 0 else f"right until step {first.step}, then "
    return f"{before}wrong (relative error {claim.max_error:.2g})"


if __name__ == "__main__":
    sys.exit(main())
