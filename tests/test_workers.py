"""Workers that share files of tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
HOOKS = "from tests.workers import pytest_addoption, pytest_runtestloop, pytest_terminal_summary\n"


def run(
    folder: Path, tests: dict[str, str], *options: str, shared: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run tests of a folder of their own by workers."""
    (folder / "conftest.py").write_text(
        f"import sys\nsys.path.append({str(ROOT)!r})\n{HOOKS}{shared}"
    )
    for name, text in tests.items():
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *options]
    plain = ["--override-ini=addopts=", f"--rootdir={folder}", "-c", "/dev/null"]
    return subprocess.run(
        [*command, *plain, str(folder)], cwd=folder, capture_output=True, text=True, check=False
    )


SHARED = """
import os, pytest

@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    with open(os.environ["LOG"], "a") as log: log.write(f"set up {os.getpid()}\\n")
    yield tmp_path_factory.getbasetemp()
    with open(os.environ["LOG"], "a") as log: log.write(f"torn down {os.getpid()}\\n")
"""
CASES = """
import os, pytest

@pytest.mark.parametrize("number", range(3))
def test_it(shared, number, capfd):
    os.write(1, b"written")
    assert capfd.readouterr().out == "written"
    assert shared.name.startswith("worker-")
"""


def test_all_tests_run_once_and_a_session_fixture_once_in_each_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    tests = {f"test_{name}.py": CASES for name in "abcd"}
    results = tmp_path / "results.xml"
    done = run(tmp_path, tests, "--workers", "2", "--junitxml", str(results), shared=SHARED)
    assert "12 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0
    cases = [*ElementTree.parse(results).iter("testcase")]
    assert len({(case.get("classname"), case.get("name")) for case in cases}) == 12
    lines = (tmp_path / "log").read_text().splitlines()
    by_process = {line.rpartition(" ")[2]: line for line in lines}
    assert sorted(lines) == sorted(
        f"{what} {pid}" for pid in by_process for what in ("set up", "torn down")
    )


def test_failures_are_told_with_their_output_and_make_the_exit_code(tmp_path: Path) -> None:
    tests = {
        "test_a.py": "def test_wrong():\n    print('it said this')\n    assert 1 == 2\n",
        "test_b.py": "def test_right():\n    pass\n",
    }
    done = run(tmp_path, tests, "--workers", "2")
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout
    assert "it said this" in done.stdout
    assert "assert 1 == 2" in done.stdout


def test_a_worker_that_ends_is_the_failure_of_its_test_and_the_rest_is_run(tmp_path: Path) -> None:
    dies = "import os\ndef test_first(): pass\ndef test_dies(): os.kill(os.getpid(), 9)\n"
    tests = {
        "test_a.py": f"{dies}def test_after(): pass\n",
        "test_b.py": dies,
        "test_c.py": "def test_last(): pass\n",
    }
    done = run(tmp_path, tests, "--workers", "1")
    assert "2 failed, 4 passed" in done.stdout, done.stdout + done.stderr
    assert "test_a.py::test_dies" in done.stdout
    assert "test_b.py::test_dies" in done.stdout
    assert "The worker ended in this test: signal 9." in done.stdout


def test_the_first_failure_ends_a_run_that_asks_for_that(tmp_path: Path) -> None:
    tests = {"test_a.py": "def test_wrong(): assert False\n"}
    tests |= {"test_b.py": "import time\ndef test_long(): time.sleep(50)\n"}
    done = run(tmp_path, tests, "--workers", "2", "-x")
    assert done.returncode == 1
    assert "stopping after 1 failures" in done.stdout


def test_a_file_that_got_no_turn_in_time_is_named(tmp_path: Path) -> None:
    tests = {f"test_{name}.py": "def test_it(): pass\n" for name in "bc"}
    tests |= {"test_a.py": "import time\ndef test_it(): time.sleep(3)\n"}
    done = run(tmp_path, tests, "--workers", "1", "--at-most", "0.5")
    assert done.returncode == 0
    assert "2 passed" in done.stdout
    assert "1 files got no turn in time" in done.stdout
    assert "test_c.py" in done.stdout
