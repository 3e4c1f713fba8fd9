"""The house rules that no linter knows: sizes, names, what an import loads, what has a test."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TypeGuard

import grimp
import pytest

from echelon.core.rulebook import all_rules

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 600
LICENSE_LINE = "SPDX-License-Identifier: Apache-2.0"
MAX_FIELDS = 8
"""Fields of a record that one docstring may explain; of more, each is documented under itself."""
TEXT = {".py", ".ts", ".md", ".toml", ".txt", ".cfg", ".yml", ".yaml", ".json", ".html", ".sh", ""}
NOT_OURS = {"runs", "node_modules", "dist", "build", "__pycache__"}

# A home or workplace of some machine, written so that this line is not one.
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:hom[e]|roo[t]|wor[k]|User[s]|far[m])/\w")

NAMED_FILE = re.compile(r"(?<![\w/.*-])([\w-]+(?:/[\w-]+)*\.py)\b")


def _files(*suffixes: str) -> Iterator[Path]:
    for folder, inner, names in os.walk(ROOT):
        inner[:] = sorted(name for name in inner if _is_ours(name))
        # In a worktree .git is a file that names where the repository lies.
        for name in sorted(set(names) - {".git"}):
            path = Path(folder, name)
            if path.is_file() and path.suffix in (suffixes or TEXT):
                yield path


def _is_ours(folder: str) -> bool:
    return folder in {".ci", ".github"} or not (folder.startswith(".") or folder in NOT_OURS)


def _run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_file_is_long() -> None:
    lengths = {str(path.relative_to(ROOT)): _length(path) for path in _files(".py", ".ts")}
    assert len(lengths) > 20
    assert {name: count for name, count in lengths.items() if count > MAX_LINES} == {}


def _length(path: Path) -> int:
    lines = path.read_text(encoding="utf-8").splitlines()
    return len(lines) - bool(lines and LICENSE_LINE in lines[0])


def test_every_source_file_names_its_license() -> None:
    """Files that a program writes say instead which one."""
    files = [
        path
        for path in _files(".py", ".ts", ".mjs", ".css")
        if path.parts[len(ROOT.parts)] in ("src", "web")
    ]
    first = {path: path.read_text(encoding="utf-8").partition("\n")[0] for path in files}
    bare = [path for path, line in first.items() if LICENSE_LINE not in line]
    assert len(files) > 500
    assert [str(path.relative_to(ROOT)) for path in bare] == ["web/src/document.ts"]


def test_the_order_in_which_a_plan_is_applied_fits_one_look() -> None:
    text = (ROOT / "src/echelon/parallel/apply.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80


CENTRE = ("training/engine.py", "training/loop.py", "parallel/apply.py", "parallel/pipeline.py")
MODES = re.compile(
    r"(?<!ob)server|worker|outer|island|thread|fp8|8 bits|local.?sgd|balanc|elastic|is_asynchron",
    re.IGNORECASE,
)


def test_the_files_that_every_step_passes_name_no_mode() -> None:
    """A mode joins through `training/steps/part.py`, and `core/choices/step_parts.py` lists it."""
    named = [
        f"{name}:{number}: {line.strip()}"
        for name in CENTRE
        for number, line in enumerate(
            (ROOT / "src/echelon" / name).read_text(encoding="utf-8").splitlines(), 1
        )
        if MODES.search(line)
    ]
    assert named == []


def test_source_is_ascii() -> None:
    assert [str(path) for path in _files(".py") if not path.read_bytes().isascii()] == []


def test_no_file_names_a_path_of_some_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in _files()
        for match in MACHINE_PATH.finditer(path.read_text(encoding="utf-8", errors="replace"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "import echelon",
        "import echelon; dir(echelon)",
    ],
)
def test_no_torch_is_imported_by(code: str) -> None:
    assert _run_python(f"{code}\nimport sys; print('torch' in sys.modules)") == "False\n"


def test_rule_ids_are_unique() -> None:
    ids = [rule.id for rule in all_rules()]
    assert sorted(set(ids)) == sorted(ids)


def test_every_rule_has_a_test() -> None:
    tests = "".join(
        path.read_text(encoding="utf-8")
        for path in _files(".py")
        if path.is_relative_to(ROOT / "tests")
    )
    named = set(re.findall(r"""["'\[]([a-z0-9-]+)["'\]]""", tests))
    assert [rule.id for rule in all_rules() if rule.id not in named] == []


def test_every_package_has_a_floor() -> None:
    contract = (ROOT / ".importlinter").read_text(encoding="utf-8")
    packages = [path.parent.name for path in (ROOT / "src/echelon").glob("*/__init__.py")]
    assert "core" in packages
    assert [name for name in packages if not re.search(rf"\b{name}\b", contract)] == []


def _is_record(node: ast.AST) -> TypeGuard[ast.ClassDef]:
    if not isinstance(node, ast.ClassDef):
        return False
    bases = {ast.unparse(base).rpartition(".")[2].partition("[")[0] for base in node.bases}
    marked = any("dataclass" in ast.unparse(one) for one in node.decorator_list)
    return marked or bool(bases & {"NamedTuple", "TypedDict"})


def _undocumented_fields(record: ast.ClassDef) -> tuple[int, list[str]]:
    """Return how many fields a record has, and those without a string under or in them."""
    fields = 0
    missing: list[str] = []
    for statement, below in pairwise([*record.body, ast.Pass()]):
        if not isinstance(statement, ast.AnnAssign):
            continue
        if re.search("ClassVar|KW_ONLY", ast.unparse(statement.annotation)):
            continue
        fields += 1
        match below:
            case ast.Expr(value=ast.Constant(value=str())):
                pass
            case _ if "Configured(" in ast.unparse(statement.annotation):
                pass  # Its annotation says what a run file says of it.
            case _:
                missing.append(ast.unparse(statement.target))
    return fields, missing


def test_a_record_of_many_fields_documents_each_under_itself() -> None:
    undocumented: list[str] = []
    for path in sorted((ROOT / "src/echelon").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if _is_record(node):
                fields, missing = _undocumented_fields(node)
                if fields > MAX_FIELDS:
                    undocumented += [f"{path.name}: {node.name}.{field}" for field in missing]
    assert undocumented == []


def test_no_modules_import_one_another_in_a_circle() -> None:
    """Imports under TYPE_CHECKING count: who reads a file must not need its reader."""
    graph = grimp.build_graph("echelon", exclude_type_checking_imports=False)
    imported = {
        module: {*graph.find_modules_directly_imported_by(module)} for module in graph.modules
    }
    # Take away what imports nothing that is left: what stays is in a circle, or imports one.
    while free := {module for module, others in imported.items() if not others & imported.keys()}:
        imported = {module: others for module, others in imported.items() if module not in free}
    assert sorted(imported) == []


def _source() -> Iterator[tuple[Path, str]]:
    for path in sorted((ROOT / "src/echelon").rglob("*.py")):
        yield path, path.read_text(encoding="utf-8")


def test_a_class_name_means_one_thing() -> None:
    names = [
        node.name
        for _, text in _source()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_files_that_the_source_names_are_there() -> None:
    """Of other tools (`interop`) files are named that are theirs."""
    there = [f"/{path.relative_to(ROOT).as_posix()}" for path in _files(".py")]
    ours = [(path, text) for path, text in _source() if "interop" not in path.parts]
    named = {
        (str(path.relative_to(ROOT)), match[1])
        for path, text in ours
        for match in NAMED_FILE.finditer(text)
    }
    assert len(named) > 50
    assert [
        (where, name)
        for where, name in sorted(named)
        if not any(file.endswith(f"/{name}") for file in there)
    ] == []


def test_each_number_is_named_on_a_line_of_its_own_with_what_it_counts() -> None:
    """A comment beside it or above its block, a text under it, or a name that ends with a unit."""
    bare: list[str] = []
    for path, text in _source():
        lines, body = text.splitlines(), ast.parse(text).body
        for node, following in zip(body, [*body[1:], ast.Pass()], strict=True):
            if not isinstance(node, ast.Assign) or not _is_number(node.value):
                continue
            if isinstance(node.targets[0], ast.Attribute):
                continue
            names = [name.id for name in ast.walk(node) if isinstance(name, ast.Name)]
            above = node.lineno - 2
            while re.match(r"\w+ = ", lines[above]):
                above -= 1
            told = (
                "  # " in lines[node.lineno - 1]
                or lines[above].startswith("#")
                or (isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant))
                or names[0].lower().endswith(("_s", "_bytes", "_steps"))
            )
            if isinstance(node.targets[0], ast.Tuple) or not told:
                bare.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert bare == []


def _is_number(value: ast.expr) -> bool:
    """Return whether a value is a number or a row of them, told or computed from numbers."""
    leaves = [one for one in ast.walk(value) if not list(ast.iter_child_nodes(one))]
    numbers = [one.value for one in leaves if isinstance(one, ast.Constant)]
    inner = (ast.Tuple, ast.BinOp, ast.UnaryOp, ast.Constant, ast.operator, ast.unaryop, ast.Load)
    return (
        all(isinstance(one, inner) for one in ast.walk(value))
        and all(isinstance(one, int | float) and not isinstance(one, bool) for one in numbers)
        and bool(numbers)
    )


PIECE_FLOORS = ("models", "parallel", "inference", "training")
SIZE_WORDS = ("BYTES", "ELEMENTS", "ROWS", "COLUMNS", "QUERIES", "TOKENS", "CHUNK", "CHUNKS")
SIZE_WORDS += ("BLOCK", "PIECE", "TILE")
NO_PIECES = {
    "models/attention/fused.py": {"LSE_ROWS", "BIAS_COLUMNS"},  # what rows of PyTorch are padded to
    "parallel/fp8_scales.py": {"_NUM_ROWS"},  # rows of a table
    "parallel/kernels/fp8.py": {"_SCALE_BYTES_STEP", "_KERNEL_BLOCK"},  # what kernels ask for
    "parallel/expert/grouped_matmul.py": {"_ALIGNED_BYTES"},  # what kernels ask for
    "parallel/module/tensor/layers.py": {"_COLUMNS"},  # a dim
    "inference/operations.py": {"_WEIGHT_FIRST_ROWS"},  # where another product is faster
    "training/checkpoint/shard_file.py": {"_LEAST_BYTES"},  # where other memory is taken
    "training/diagnosis.py": {"_TEXT_BYTES"},  # of a message
    "training/whole_run.py": {"_FILE_BYTES", "_SHARD_TOKENS"},  # of a proof
    "training/weights/writers/distributed.py": {"FILE_BYTES"},  # when more files are written
    "training/weights/writers/shares.py": {"SLACK_BYTES"},  # memory that threads may take
    # GPU kernels are compiled for the size of a tile: their own tests have several tiles.
    "parallel/kernels/cross_entropy_triton.py": {"_COLUMNS"},
    "parallel/kernels/expert_kernels_triton.py": {"HOPPER_TILE", "MOST_COLUMNS"},
    "parallel/kernels/norm_swiglu_triton.py": {"_THREAD_ELEMENTS", "TILE_ELEMENTS", "_COLUMNS"},
    "parallel/kernels/rotary_triton.py": {"_BLOCK_ELEMENTS"},
    "parallel/kernels/update_triton.py": {"ELEMENTS"},
    # What is compared with records whatever its pieces are.
    "training/data/dataset.py": {"_PIECE"},
    "training/data/index.py": {"DOCUMENT_BYTES", "TOKEN_BYTES"},
    "training/data/look.py": {"_PIECE"},
    "training/data/tokenizer.py": {"BYTES_VOCABULARY"},
    "training/data/urls.py": {"_PIECE_BYTES"},
    "training/data/writer.py": {"_BLOCK"},
}
"""Sizes in these floors that cut nothing in which a proof could have a second piece."""


def test_sizes_of_pieces_are_in_one_record_that_a_proof_lowers() -> None:
    """A loop whose piece is as long as in training runs once in a proof: see `PieceSizes`."""
    sizes_by_file: dict[str, set[str]] = {}
    source = ROOT / "src" / "echelon"
    for path, text in _source():
        where = str(path.relative_to(source))
        if not where.startswith(tuple(f"{floor}/" for floor in PIECE_FLOORS)):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Assign) and _has_number(node.value):
                names = {
                    name.id
                    for target in node.targets
                    for name in ast.walk(target)
                    if isinstance(name, ast.Name)
                }
                sizes = {
                    name
                    for name in names
                    if name.isupper() and set(name.split("_")) & set(SIZE_WORDS)
                }
                if sizes:
                    sizes_by_file.setdefault(where, set()).update(sizes)
    assert sizes_by_file == NO_PIECES


def _has_number(value: ast.expr) -> bool:
    return any(
        isinstance(part, ast.Constant) and type(part.value) in (int, float)
        for part in ast.walk(value)
    )


def test_a_room_has_at_most_twenty_files() -> None:
    """A folder of more is a corridor; rules, right and wrong programs stand one to a file."""
    flat = {
        "tests/schedule",
        "docs/decisions",
        "examples/right",
        "examples/wrong",
    }
    crowded = {
        str(folder.relative_to(ROOT)): len(own)
        for top in ("src", "tests", "bench", "docs", "examples")
        for folder in (ROOT / top).rglob("*")
        if folder.is_dir() and all(map(_is_ours, folder.relative_to(ROOT).parts))
        if len(own := [f for f in folder.iterdir() if f.is_file() and f.name != "__init__.py"]) > 20
    }
    assert crowded.keys() == flat


def test_every_module_has_a_test_of_its_own() -> None:
    """`tests/ROOM/test_MODULE.py`, `test_MODULE_*.py` or a folder; records and texts need none."""
    missing = []
    for path in sorted((ROOT / "src" / "echelon").rglob("*.py")):
        module = path.relative_to(ROOT / "src" / "echelon")
        room = ROOT / "tests" / module.parent
        if path.name.startswith("__") or "rulebook" in module.parts or _only_says(path):
            continue
        named = [room / f"test_{path.stem}.py", room / path.stem]
        if not any(one.exists() for one in named) and not any(room.glob(f"test_{path.stem}_*.py")):
            missing.append(str(module))
    assert missing == []


def _only_says(path: Path) -> bool:
    """Return whether a module only says what there is: no function of it does more than a line."""
    branches = (ast.If, ast.For, ast.While, ast.comprehension, ast.IfExp)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            does = [line for line in node.body if not _is_text(line)]
            inside = (inner for line in does for inner in ast.walk(line))
            if len(does) > 1 or any(isinstance(inner, branches) for inner in inside):
                return False
    return True


def _is_text(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)
