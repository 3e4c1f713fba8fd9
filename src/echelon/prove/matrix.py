"""Every combination of layouts, proven in float64: ``python -m echelon.prove.matrix --all``.

Data, tensor and pipeline degrees in {1, 2, 4} up to eight ranks, sequence parallelism, schedule,
even and uneven stages, tied and untied head, accumulation, recompute. The kind of model (norms,
biases, positions, head ratios, a vocabulary that `tp` does not divide, dropout) turns with the
case, so each meets each in the whole. Token counts are uneven everywhere.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import echelon
from echelon.core.cluster import Cluster, Device
from echelon.core.errors import EchelonError
from echelon.core.mesh import Mesh
from echelon.core.model_shape import ModelShape, RopeScaling
from echelon.core.plan import (
    Layout,
    Mathematics,
    Optimizer,
    Pipeline,
    Plan,
    Recompute,
    RecomputePolicy,
)
from echelon.launch.pool import RankPool
from echelon.prove.run import OUR_ENGINE, RankRunner, prove

MAX_WORLD = 8
DEGREES = (1, 2, 4)
SCHEDULES = ("naive", "gpipe", "1f1b")
POLICIES: tuple[RecomputePolicy, ...] = ("none", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Name one layout of the matrix."""

    dp: int
    tp: int
    pp: int
    sequence_parallel: bool
    schedule: str
    uneven_stages: bool
    tied: bool
    accumulation: int
    recompute: RecomputePolicy

    @property
    def name(self) -> str:
        """Return a name that is unique in the matrix."""
        parts = [f"dp{self.dp}", f"tp{self.tp}", f"pp{self.pp}"]
        parts += ["sp"] if self.sequence_parallel else []
        parts += [self.schedule, "uneven" if self.uneven_stages else "even"] if self.pp > 1 else []
        parts += ["tied" if self.tied else "untied", f"acc{self.accumulation}", self.recompute]
        return "-".join(parts)

    @property
    def turn(self) -> int:
        """Return a number that depends on the name: it picks what is not a dimension."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4], "big")


def cases() -> Iterator[Case]:
    """Return every case of the matrix."""
    for dp, tp, pp in product(DEGREES, repeat=3):
        if dp * tp * pp > MAX_WORLD:
            continue
        for sequence_parallel, schedule, uneven, tied, accumulation, recompute in product(
            (False, True) if tp > 1 else (False,),
            SCHEDULES if pp > 1 else ("1f1b",),
            (False, True) if pp > 1 else (False,),
            (False, True),
            (1, 3),
            POLICIES,
        ):
            yield Case(
                dp=dp,
                tp=tp,
                pp=pp,
                sequence_parallel=sequence_parallel,
                schedule=schedule,
                uneven_stages=uneven,
                tied=tied,
                accumulation=accumulation,
                recompute=recompute,
            )


def plan_of(case: Case) -> Plan:
    """Return the plan of a case; it is small already, so shrinking leaves little to do."""
    microbatch = 1 + case.turn % 2
    layout = Layout(
        mesh=_mesh(case),
        microbatch_sequences=microbatch,
        pipeline=Pipeline(schedule=case.schedule, stages=_stages(case)),
        sequence_parallel=case.sequence_parallel,
        recompute=Recompute(policy=case.recompute, every=1 + case.turn // 2 % 2),
    )
    layers = sum(len(stage) for stage in layout.pipeline.stages)
    mathematics = Mathematics(
        model=_model(case, layers),
        global_sequences=microbatch * case.dp * _num_microbatches(case),
        sequence_length=16,
        seed=case.turn % 1000,
        optimizer=Optimizer(
            clip_norm=None if case.turn % 11 == 0 else 1.0,
            schedule=("cosine", "linear", "wsd", "constant")[case.turn // 8 % 4],
            warmup_steps=case.turn // 32 % 2 * 10,
            total_steps=100,
        ),
    )
    return Plan(name=case.name, mathematics=mathematics, layout=layout, cluster=_one_machine())


def _mesh(case: Case) -> Mesh:
    """Give half of the cases a data axis of both kinds: they must be one and the same sum."""
    shard = 2 if case.dp == 4 and case.turn % 2 else 1
    return Mesh(pp=case.pp, dp_replicate=case.dp // shard, dp_shard=shard, tp=case.tp)


def _stages(case: Case) -> tuple[tuple[int, ...], ...]:
    counts = [1] * case.pp
    if case.pp == 1:
        counts = [2]
    elif case.uneven_stages:
        counts[case.turn % case.pp] = 2
    starts = [sum(counts[:stage]) for stage in range(case.pp)]
    return tuple(tuple(range(start, start + n)) for start, n in zip(starts, counts, strict=True))


def _num_microbatches(case: Case) -> int:
    """Return the fewest microbatches (1F1B needs one per stage), or more, and not in step."""
    fewest = case.pp if case.schedule == "1f1b" else 1
    if case.accumulation == 1:
        return fewest
    return max(case.accumulation, fewest + 1)


def _model(case: Case, layers: int) -> ModelShape:
    tp = case.tp
    llama = ModelShape(
        name="matrix",
        layers=layers,
        hidden=32 * tp,
        heads=4 * tp,
        kv_heads=2 * tp,
        head_dim=8,
        ffn=16 * tp,
        vocab=24 * tp + 1,
        max_positions=16,
        tied=case.tied,
    )
    kind = case.turn // 4 % 4
    if kind == 0:
        return llama
    if kind == 1:
        return replace(
            llama,
            kv_heads=4 * tp,
            vocab=24 * tp,
            max_positions=32,
            gated=False,
            activation="gelu",
            norm="layernorm",
            positions="learned",
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
        )
    if kind == 2:
        return replace(llama, kv_heads=tp, qk_norm=True, qkv_bias=True, head_dim=16)
    scaling = RopeScaling(
        factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=8
    )
    return replace(llama, dropout=0.1, rope_scaling=scaling, rope_theta=100.0)


def _one_machine() -> Cluster:
    device = Device(name="cpu", memory_bytes=8 * 2**30, memory_bandwidth=1e10)
    return Cluster(
        name="this machine",
        device=device,
        devices_per_node=MAX_WORLD,
        nodes=1,
        links=(),
        backend="gloo",
    )


def prove_case(case: Case, run_ranks: RankRunner, subject: str = OUR_ENGINE) -> str:
    """Return what is wrong with a case; nothing where it is proven."""
    try:
        proof = prove(plan_of(case), run_ranks=run_ranks, subject=subject, own_precision=False)
        proof.require()
    except EchelonError as error:
        return str(error)
    return ""


def sample(count: int, seed: int) -> list[Case]:
    """Return `count` random cases: half of them of at most four ranks, for they are quicker."""
    generator = random.Random(seed)
    every = list(cases())
    small = [case for case in every if case.dp * case.tp * case.pp <= MAX_WORLD // 2]
    large = [case for case in every if case.dp * case.tp * case.pp == MAX_WORLD]
    return generator.sample(small, count - count // 2) + generator.sample(large, count // 2)


def code_hash() -> str:
    """Return a hash of Echelon's own source: a proof of other code is no proof of this."""
    digest = hashlib.sha256()
    root = Path(echelon.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def walk(chosen: Sequence[Case], results: Path | None) -> int:
    """Prove `chosen`, one line each, and return how many failed.

    Cases that `results` (JSON lines) holds as proven with this very code are skipped.
    """
    code = code_hash()
    done = _proven(results, code)
    failed = 0
    started = time.monotonic()
    with RankPool(MAX_WORLD) as pool:
        for number, case in enumerate(chosen, start=1):
            if case.name in done:
                continue
            problem = prove_case(case, pool.run)
            failed += bool(problem)
            print(f"{number:4}/{len(chosen)}  {'FAILED' if problem else 'proven'}  {case.name}")
            if problem:
                print(problem)
            sys.stdout.flush()
            if results is not None:
                line = {"case": asdict(case), "name": case.name, "code": code, "problem": problem}
                with results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
    skipped = sum(case.name in done for case in chosen)
    print(
        f"{len(chosen) - failed} of {len(chosen)} proven ({skipped} of them before), "
        f"{failed} failed, {time.monotonic() - started:.0f} s"
    )
    return failed


def _proven(results: Path | None, code: str) -> set[str]:
    if results is None or not results.exists():
        return set()
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return {line["name"] for line in lines if line["code"] == code and not line["problem"]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Walk the matrix, or a random part of it; return 1 where a case is not proven."""
    parser = argparse.ArgumentParser(prog="python -m echelon.prove.matrix", description=__doc__)
    parser.add_argument("--all", action="store_true", help="walk every case")
    parser.add_argument("--count", type=int, default=20, help="random cases to walk (20)")
    parser.add_argument("--seed", type=int, default=None, help="of the random choice")
    parser.add_argument("--match", default="", help="walk the cases whose name contains this")
    parser.add_argument("--results", type=Path, help="JSON lines; proven cases are not run again")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    if options.all or options.match:
        chosen = [case for case in cases() if options.match in case.name]
    else:
        chosen = sample(options.count, seed)
        print(f"seed {seed}")
    return 1 if walk(chosen, options.results) else 0


if __name__ == "__main__":
    sys.exit(main())
