"""Plant random bugs of one line in programs of examples/right, and see what the prover says.

`python -m tests.examples.random_bugs --count 10 --seed 3 --results bugs.json`; programs that need
nothing but torch, or with `--python PATH` those of the frameworks that this Python has.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from echelon.core.errors import EchelonError
from echelon.launch.local.supervisor import RankPool
from echelon.proof.verdict import SubjectProof
from tests.examples.changes import Change, random_change
from tests.examples.programs import RIGHT, ROOT, TORCH, proof_of_file

FRAMEWORKS = (
    "accelerate_ddp",
    "deepspeed_zero",
    "hf_trainer",
    "megatron_llama",
    "torchtitan_llama",
)
STILL_S = 4.0
"""How long ranks of a changed program may wait for one another while none computes."""
WEAK = frozenset({"none", "reordering only"})
"""Factors that say no more than that something is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Hold what was said of a program: a name, or the rule that refused it."""

    proven: bool = False
    rule: str = ""
    tensor: str = ""
    factor: str = ""
    axis: str = ""
    says: str = ""

    @property
    def outcome(self) -> str:
        """Return the sort of it: placed is a module or weight named as the first wrong one."""
        if self.proven:
            return "equal"
        if not self.factor:
            return "refused"
        if self.factor not in WEAK:
            return "named"
        return "placed" if "the first wrong one" in self.says else "weak"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedChange:
    """Hold one change, of which program, and what was said."""

    program: str
    kind: str
    line: int
    before: str
    after: str
    outcome: str
    verdict: Verdict


Prover = Callable[[Path], Verdict]


def planted(
    programs: Sequence[str], count: int, seed: int, prove: Prover
) -> Iterator[PlantedChange]:
    """Yield `count` different random changes and what `prove` says of them."""
    random_of = random.Random(seed)
    seen: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="echelon-bugs-") as name:
        folder = Path(name)
        for file in RIGHT.glob("*.py"):
            shutil.copy(file, folder)
        while len(seen) < count:
            program = random_of.choice(programs)
            text = (RIGHT / f"{program}.py").read_text(encoding="utf-8")
            change = random_change(text, random_of)
            if change.source in seen:
                continue
            seen.add(change.source)
            yield _planted(program, change, folder, prove)


def _planted(program: str, change: Change, folder: Path, prove: Prover) -> PlantedChange:
    # A name of its own: ranks that stay alive keep modules.
    file = folder / f"{program}_changed.py"
    file.write_text(change.source, encoding="utf-8")
    verdict = prove(file)
    return PlantedChange(
        program=program,
        kind=change.kind,
        line=change.line,
        before=change.before,
        after=change.after,
        outcome=verdict.outcome,
        verdict=verdict,
    )


def told(pool: RankPool) -> Prover:
    """Return what proves a file on ranks of a pool."""

    def prove(file: Path) -> Verdict:
        try:
            return verdict_of(proof_of_file(pool, file))
        except EchelonError as failure:
            error = getattr(failure, "error", None) or failure
            return Verdict(rule=error.rules[0], says=str(error))

    return prove


def verdict_of(proof: SubjectProof) -> Verdict:
    """Return what a proof says."""
    found = proof.diagnosis
    if found is None:
        return Verdict(proven=True)
    return Verdict(
        rule=found.rule,
        tensor=found.tensor,
        factor=found.factor,
        axis=found.axis,
        says=found.says,
    )


def by_command(python: Path) -> Prover:
    """Return what proves a file by the command, in an environment with the frameworks."""

    def prove(file: Path) -> Verdict:
        done = subprocess.run(
            [python, "-m", "echelon", "prove", "--subject", str(file), "--json"],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
        if not done.stdout.startswith("{"):
            rule = done.stderr.partition("error[")[2].partition("]")[0]
            return Verdict(rule=rule or f"exit {done.returncode}", says=done.stderr[-2000:])
        told = json.loads(done.stdout)
        if "proof" not in told:
            problem = told["problems"][0]
            return Verdict(rule=problem["rule"], says=problem["message"])
        proof = told["proof"]
        diagnoses = [one["diagnosis"] for one in proof["passes"] if one["diagnosis"] is not None]
        if not diagnoses:
            return Verdict(proven=True)
        return Verdict(
            **{key: diagnoses[0][key] for key in ("rule", "tensor", "factor", "axis", "says")}
        )

    return prove


def main(arguments: Sequence[str]) -> int:
    """Plant, print one line for each, write all; exit 1 where one is named weakly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--programs", nargs="*", default=[])
    parser.add_argument("--python", type=Path)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args(arguments)
    programs = options.programs or (FRAMEWORKS if options.python else TORCH)
    found: list[PlantedChange] = []
    with RankPool(4, still_s=STILL_S) as pool:
        prove = by_command(options.python) if options.python else told(pool)
        for one in planted(programs, options.count, options.seed, prove):
            found.append(one)
            said = one.verdict
            what = f"{said.rule} {said.tensor} {said.factor} {said.axis}".strip()
            print(f"{one.outcome:8} {one.program}:{one.line} [{one.kind}] {one.before}", flush=True)
            print(f"{'':8} -> {one.after}", flush=True)
            print(f"{'':8} {what}: {said.says[:300]}", flush=True)
    print(dict(Counter(one.outcome for one in found)))
    if options.results:
        options.results.write_text(json.dumps([asdict(one) for one in found], indent=1))
    return int(any(one.outcome == "weak" for one in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
