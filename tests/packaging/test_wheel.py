"""What is published: an sdist and a wheel that is built from it, which works without a checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from functools import cache
from pathlib import Path

import pytest

import echelon

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PYTHONS = [
    version
    for line in PROJECT["classifiers"]
    if (version := line.removeprefix("Programming Language :: Python :: "))[:2] == "3."
]
MODULE = """
import torch
from torch import nn

def make():
    layers = (nn.Embedding(64, 8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 64))
    return nn.Sequential(*layers), batch, loss

def batch(step, data_rank):
    generator = torch.Generator().manual_seed(31 * step + data_rank)
    return torch.randint(0, 64, (4, 8), generator=generator)

def loss(module, tokens):
    return nn.functional.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten())
"""
IMPORTED = """
import importlib, pkgutil, sys
import echelon
from echelon import core
assert core.__file__.startswith(sys.prefix), core.__file__
for module in pkgutil.walk_packages(core.__path__, "echelon.core."):
    importlib.import_module(module.name)
assert issubclass(echelon.ConfigError, echelon.EchelonError)
print(echelon.__version__, len(echelon.__all__))
"""
"""All of a fresh environment that needs no other package: `core`."""

COMMANDS = {
    "plan": "plan llama3-8b --cluster 8xh100 --out best.toml",
    "explain": "explain tp-divides-heads",
    "explore": "explore --out page.html",
    "prove": "prove nano --set mesh.tp=2",
    "prove-module": "prove nano --module mine.py:make --set mesh.dp_shard=2 --set zero.stage=1",
}
"""Commands that are tried from the wheel; proofs start ranks: `make test-all` has them."""


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it; nothing is fetched."""
    for tool in ("build", "hatchling", "hatch_fancy_pypi_readme", "twine"):
        pytest.importorskip(tool, reason="make setup installs what builds the wheel")
    folder = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), "."], ROOT)
    return folder


@pytest.fixture(scope="session")
def wheel(published: Path) -> Path:
    (path,) = published.glob("*.whl")
    assert path.name == f"echelon_parallel-{echelon.__version__}-py3-none-any.whl"
    return path


def run(command: list[str], folder: Path, **environment: str) -> str:
    """Run a command that must work, with nothing of this checkout on the path."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        command,
        cwd=folder,
        env=kept | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@cache
def interpreters() -> dict[str, str]:
    """Return each minor version of Python -> a program of it, on the path or under pyenv."""
    found: dict[str, str] = {}
    roots = [os.environ.get("PYENV_ROOT", "")]
    if shutil.which("pyenv"):
        roots += subprocess.run(
            ["pyenv", "root"], capture_output=True, text=True, check=False
        ).stdout.splitlines()
    programs = [program for version in PYTHONS if (program := shutil.which(f"python{version}"))]
    for root in filter(None, roots):
        programs += map(str, sorted(Path(root, "versions").glob("3.*/bin/python3")))
    for program in [sys.executable, *programs]:
        asked = [program, "-c", "import sys; print('{}.{}'.format(*sys.version_info))"]
        told = subprocess.run(asked, capture_output=True, text=True, check=False)
        if told.returncode == 0:
            found.setdefault(told.stdout.strip(), program)
    return found


def install(wheel: Path, folder: Path, python: str, *arguments: str) -> Path:
    """Install a wheel into a new environment, and return the folder of its programs."""
    run([python, "-m", "venv", "--without-pip", str(folder)], wheel.parent)
    programs = folder / "bin"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python"]
    target = [
        str(programs / "python"),
        "install",
        "--quiet",
        "--no-compile",
        *arguments,
        str(wheel),
    ]
    run([*pip, *target], wheel.parent)
    return programs


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel, over the packages that are here."""
    folder = tmp_path_factory.mktemp("environment")
    programs = install(wheel, folder, sys.executable, "--no-deps")
    (own,) = folder.glob("lib/python3*/site-packages")
    here = [path for path in sys.path if path.endswith("site-packages")]
    (own / "packages.pth").write_text("\n".join(here), encoding="utf-8")
    return programs


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    files = {
        path.relative_to(source).as_posix()
        for path in (source / "echelon").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == files
    presets = "echelon/config/presets"
    assert names >= {"echelon/py.typed", "echelon/page/page.html", f"{presets}/models/nano.toml"}


def test_the_sdist_has_what_builds_and_tests_it(published: Path) -> None:
    (path,) = published.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= {
        *("README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "PKG-INFO"),
        *("Makefile", "constraints.txt", "mkdocs.yml", ".importlinter", ".ci/run"),
        *("web/package.json", "web/package-lock.json", "web/vite.config.ts", "web/src/main.ts"),
        *("src/echelon/py.typed", "tests/conftest.py", "docs/index.md", "examples/nano.toml"),
        *("bench/README.md", ".github/workflows/release.yml"),
    }
    built = re.compile(r"^(runs|build|dist)/|(^|/)(node_modules|\.venv|__pycache__)/")
    assert [name for name in names if built.search(name)] == []


def test_pypi_takes_them_and_shows_links_that_lead_somewhere(published: Path, wheel: Path) -> None:
    files = sorted(map(str, published.iterdir()))
    run([sys.executable, "-m", "twine", "check", "--strict", *files], published)
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    links = re.findall(r"\]\(([^)\s]+)\)", str(metadata.get_payload()))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(links) == len(re.findall(r"\]\(([^)\s]+)\)", readme)) > 20
    assert [link for link in links if not link.startswith("https://")] == []
    repository = PROJECT["urls"]["Repository"]
    raw = repository.replace("//github.com/", "//raw.githubusercontent.com/")
    version = f"v{echelon.__version__}"
    for start in (f"{repository}/blob/{version}/", f"{raw}/{version}/"):
        ours = [link.removeprefix(start) for link in links if link.startswith(start)]
        assert ours
        assert [path for path in ours if not (ROOT / path.partition("#")[0]).exists()] == []
    assert metadata["Name"] == "echelon-parallel"
    assert set(metadata.get_all("Provides-Extra") or ()) >= {"train", "data", "hf", "all"}


def test_all_has_every_extra_for_users() -> None:
    extras = PROJECT["optional-dependencies"]
    (everything,) = extras["all"]
    named = set(re.findall(r"[\w]+", everything.partition("[")[2]))
    assert everything.startswith(f"{PROJECT['name']}[")
    assert named == set(extras) - {"all", "dev", "docs"}


@pytest.mark.parametrize("version", PYTHONS)
def test_a_wheel_is_installed_and_imported(version: str, wheel: Path, tmp_path: Path) -> None:
    python = interpreters().get(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    programs = install(wheel, tmp_path / version, python, "--no-deps")
    told = run([str(programs / "python"), "-W", "error", "-c", IMPORTED], tmp_path)
    assert told == f"{echelon.__version__} {len(echelon.__all__)}\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", PYTHONS)
def test_a_wheel_plans_with_what_pip_installs_for_it(
    version: str, wheel: Path, tmp_path: Path
) -> None:
    """It fetches the packages that planning needs, as `make setup` does."""
    python = interpreters().get(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    programs = install(wheel, tmp_path / version, python, "-c", str(ROOT / "constraints.txt"))
    code = (
        "import compileall, pathlib, sys, echelon; folder = pathlib.Path(echelon.__file__).parent; "
        "sys.exit(not compileall.compile_dir(folder, force=True, quiet=1))"
    )
    run([str(programs / "python"), "-W", "error", "-c", code], tmp_path)
    told = run([str(programs / "echelon"), *COMMANDS["plan"].split()], tmp_path)
    assert "llama3-8b" in told
    assert (tmp_path / "best.toml").exists()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(words, id=name, marks=pytest.mark.slow if "prove" in name else ())
        for name, words in COMMANDS.items()
    ],
)
def test_a_command_works_from_a_wheel_in_an_empty_folder(
    command: str, installed: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(MODULE, encoding="utf-8")
    where = [str(installed / "python"), "-c", "import echelon; print(echelon.__file__)"]
    assert run(where, tmp_path).startswith(str(installed.parent))
    told = run([str(installed / "echelon"), *command.split()], tmp_path, OMP_NUM_THREADS="1")
    written = re.search(r"--out (\S+)", command)
    assert told if written is None else (tmp_path / written[1]).stat().st_size
    assert not command.startswith("prove") or told.endswith("proven\n")
