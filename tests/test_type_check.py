"""Which files have their types checked."""

from __future__ import annotations

from pathlib import Path

from tests.type_check import digests, imported, module_of, part, to_check

TEXTS = {
    "src/echelon/core/__init__.py": "from echelon.core.mesh import Mesh\n",
    "src/echelon/core/mesh.py": "",
    "src/echelon/core/axis.py": "",
    "src/echelon/cost/bytes.py": "from echelon.core.mesh import (\n    Mesh,\n    Axis,\n)\n",
    "src/echelon/cost/peak.py": "from echelon.core import Mesh\n",
    "src/echelon/cost/seconds.py": "def f():\n    import echelon.core.axis as axis\n",
    "src/echelon/api.py": "from echelon.cost import bytes\n",
    "tests/core/test_mesh.py": "from echelon.core import mesh as m\n",
}


def test_importers_are_checked_and_a_package_passes_names_on() -> None:
    assert to_check(["src/echelon/core/mesh.py"], TEXTS) == [
        "src/echelon/core/__init__.py",
        "src/echelon/core/mesh.py",
        "src/echelon/cost/bytes.py",
        "src/echelon/cost/peak.py",
        "tests/core/test_mesh.py",
    ]
    assert to_check(["src/echelon/cost/bytes.py"], TEXTS) == [
        "src/echelon/api.py",
        "src/echelon/cost/bytes.py",
    ]
    assert to_check(["src/echelon/core/axis.py"], TEXTS) == [
        "src/echelon/core/axis.py",
        "src/echelon/cost/seconds.py",
    ]


def test_importers_of_a_file_that_is_gone_are_checked() -> None:
    texts = {file: text for file, text in TEXTS.items() if file != "src/echelon/core/axis.py"}
    assert to_check(["src/echelon/core/axis.py"], texts) == ["src/echelon/cost/seconds.py"]


def test_modules_and_imports_are_read() -> None:
    assert module_of("src/echelon/core/__init__.py") == "echelon.core"
    assert module_of("tests/core/test_mesh.py") == "tests.core.test_mesh"
    assert imported("import os, sys\nfrom a.b import c as d, e\n") == {
        "os",
        "sys",
        "a.b",
        "a.b.c",
        "a.b.e",
    }


def test_what_changed_is_told_by_digests(tmp_path: Path) -> None:
    for file, text in TEXTS.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    (tmp_path / "pyproject.toml").write_text("[tool.pyright]\n")
    old = digests(tmp_path)
    assert part(old, old, tmp_path) == []
    (tmp_path / "src/echelon/api.py").write_text("x = 1\n")
    assert part(old, digests(tmp_path), tmp_path) == ["src/echelon/api.py"]
    assert part({}, digests(tmp_path), tmp_path) is None
    (tmp_path / "src/echelon/core/mesh.py").write_text("x = 1\n")
    assert part(old, digests(tmp_path), tmp_path) is None, "over a third"
    (tmp_path / "pyproject.toml").write_text("[tool.ruff]\n")
    assert part(old, digests(tmp_path), tmp_path) is None
