"""Files for the people around the project agree with pyproject.toml, and CI runs `.ci/run`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import echelon
from echelon.core.version import DISTRIBUTION

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
GITHUB = ROOT / ".github"
PROJECT_FILES = [
    *(ROOT / name for name in ("SECURITY.md", "CODE_OF_CONDUCT.md", "CITATION.cff")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "pyproject.toml")),
    *sorted(path for path in GITHUB.rglob("*") if path.is_file()),
]


def read(path: Path) -> Any:
    """Return what a YAML file says."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(workflow: str, job: str) -> str:
    """Return the commands and actions of a job, a line each."""
    found = read(GITHUB / "workflows" / workflow)["jobs"][job]["steps"]
    return "\n".join(step.get("run") or step["uses"] for step in found)


def test_the_repository_has_one_address() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in PROJECT_FILES)
    owner, name = REPOSITORY.removeprefix("https://github.com/").split("/")
    named = re.findall(r"github(?:usercontent)?\.com/([\w-]+)/([\w-]+)", text)
    assert (owner, name) in named
    assert {other for other in named if name in other[1] or owner in other[0]} == {(owner, name)}
    assert all(url.startswith(REPOSITORY) for url in PROJECT["urls"].values())


def test_hints_name_the_distribution() -> None:
    assert PROJECT["name"] == DISTRIBUTION


def test_the_citation_is_of_this_version() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == echelon.__version__
    assert citation["license"] == PROJECT["license"]
    assert citation["repository-code"] == REPOSITORY
    assert all(citation[key] for key in ("message", "title", "authors"))


@pytest.mark.parametrize("name", ["bug", "feature", "plan"])
def test_a_template_of_issues_is_a_form(name: str) -> None:
    form = read(GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml")
    assert all(form[key] for key in ("name", "description"))
    ids = [question["id"] for question in form["body"]]
    assert len(ids) == len(set(ids)) > 1
    assert all(question["attributes"]["label"] for question in form["body"])


def test_ci_runs_the_script_with_the_oldest_and_the_newest_python() -> None:
    job = read(GITHUB / "workflows" / "ci.yml")["jobs"]["test"]
    versions = [
        line.rpartition(" ")[2] for line in PROJECT["classifiers"] if ":: Python :: 3." in line
    ]
    assert job["strategy"]["matrix"]["python"] == [versions[0], versions[-1]]
    assert PROJECT["requires-python"] == f">={versions[0]}"
    assert job["timeout-minutes"] == 90
    assert "/whl/cpu" in job["env"]["PIP_FLAGS"]
    assert steps("ci.yml", "test").splitlines()[-1] == ".ci/run"


def test_a_release_is_tested_built_and_checked_before_it_is_published() -> None:
    release = read(GITHUB / "workflows" / "release.yml")
    publish = release["jobs"]["publish"]
    assert set(publish["needs"]) == {"test", "build"}
    assert release["jobs"]["test"]["uses"] == "./.github/workflows/ci.yml"
    # Only the job that publishes may ask PyPI for a token.
    assert publish["permissions"] == {"id-token": "write"}
    assert release["permissions"] == {"contents": "read"}
    assert publish["environment"]["url"] == f"https://pypi.org/project/{PROJECT['name']}/"
    assert "pypa/gh-action-pypi-publish@release/v1" in steps("release.yml", "publish")
    built = steps("release.yml", "build")
    assert "python -m build --no-isolation" in built
    assert "twine check --strict" in built
    pattern = re.search(r'grep -q "(.*)" pyproject', built)
    assert pattern is not None
    line = (
        pattern[1]
        .replace("\\", "")
        .replace("$GITHUB_REPOSITORY", REPOSITORY.removeprefix("https://github.com/"))
    )
    assert re.search(line, (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)


def test_constraints_pin_what_ci_and_the_release_install() -> None:
    pinned = {
        _normal(line.partition("==")[0])
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line
    }
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["train"], *extras["data"], *extras["dev"]]
    names = {_normal(re.split(r"[\[<>=; ]", line)[0]) for line in (*wanted, *extras["docs"])}
    build = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["build-system"]["requires"]
    names |= {_normal(re.split(r"[<>=]", line)[0]) for line in build}
    assert names - pinned == set()


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
