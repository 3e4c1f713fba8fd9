"""`echelon doctor`: check that this machine can plan, prove and train."""

from __future__ import annotations

from pathlib import Path

from echelon import __version__
from echelon.cli.flags import Json
from echelon.cli.output import print_error, print_json
from echelon.core.errors import EnvironmentProblem


def doctor(*, json: Json = False) -> int:
    """Check that this machine can plan, prove and train; exit 3 where it cannot."""
    from echelon.cli.machine import examine

    findings = list(examine(Path.cwd()))
    problems = [finding.problem for finding in findings if finding.problem]
    lacking = any(finding.stops_runs for finding in findings)
    if json:
        result = {
            "version": __version__,
            "ok": not lacking,
            "findings": {f.name.replace(" ", "_"): f.facts for f in findings},
            "problems": [problem.to_json() for problem in problems],
        }
        print_json("doctor", result)
    else:
        for finding in findings:
            mark = "ok" if finding.problem is None else "NO" if finding.needed else "hm"
            print(f"{mark}  {finding.name:<16}{finding.text}")
        if problems:
            print_error(EnvironmentProblem(problems))
    return EnvironmentProblem.exit_code if lacking else 0
