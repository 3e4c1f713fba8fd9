"""A file of the user's is written whole or not at all, and never over another one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.config.files.new_file import (
    make_folder,
    new_folder,
    require_writable,
    write_new,
)
from echelon.core.errors import ConfigError


@pytest.mark.parametrize("start", [lambda f: write_new(f, "text"), require_writable])
def test_what_cannot_be_written_is_one_error(tmp_path: Path, start: object) -> None:
    assert callable(start)
    (tmp_path / "there.txt").write_text("mine")
    for name, rule in (
        ("there.txt", "never-overwrite"),
        ("no/such/times.json", "cannot-write"),
        ("there.txt/times.json", "cannot-write"),
        (".", "never-overwrite"),
        ("x" * 300, "cannot-write"),
        ("nul\0", "cannot-write"),
    ):
        with pytest.raises(ConfigError) as caught:
            start(tmp_path / name)
        assert caught.value.rules == (rule,), name
    assert [path.name for path in tmp_path.iterdir()] == ["there.txt"]
    assert (tmp_path / "there.txt").read_text() == "mine"


def test_a_new_file_is_written_with_the_rights_of_any_other(tmp_path: Path) -> None:
    require_writable(tmp_path / "a.txt")
    assert not list(tmp_path.iterdir())
    write_new(tmp_path / "a.txt", "text")
    (tmp_path / "b.txt").write_text("text")
    first, other = (tmp_path / name for name in ("a.txt", "b.txt"))
    assert first.read_text() == "text"
    assert first.stat().st_mode == other.stat().st_mode
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("taken", [False, True])
def test_a_file_system_without_links_is_written_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    file = tmp_path / "a.txt"

    def link(_part: Path, _file: Path) -> None:
        # Somebody may be faster between the check and the name.
        if taken:
            file.write_text("theirs")
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    if taken:
        with pytest.raises(ConfigError, match="never-overwrite"):
            write_new(file, "text")
    else:
        write_new(file, "text")
    assert file.read_text() == ("theirs" if taken else "text")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_no_half_file_is_left_where_the_disk_is_full(tmp_path: Path) -> None:
    # A limit on the size of files refuses what is written as a full disk does.
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from echelon.config.files.new_file import write_new\n"
        "from echelon.core.errors import ConfigError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: write_new(Path(sys.argv[1]), 'x' * 5000)\n"
        "except ConfigError as error: print(error.rules)\n"
    )
    command = [sys.executable, "-B", "-c", code, str(tmp_path / "a.txt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "('cannot-write',)\n", done.stderr
    assert not list(tmp_path.iterdir())


_WRITES = """
import os, signal, sys
from pathlib import Path
from echelon.config.files.new_file import new_folder
with new_folder(Path(sys.argv[1])) as part:
    (part / "half").write_text("x")
    if sys.argv[2] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    print(part.name, flush=True)
    sys.stdin.readline()
"""


def writing(folder: Path, how: str) -> subprocess.Popen[str]:
    """Return a process that writes a folder: it `dies` in it, or `waits` for a line."""
    command = [sys.executable, "-B", "-c", _WRITES, str(folder), how]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def test_what_a_killed_process_left_of_a_folder_is_removed_by_the_next_one(tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    for folder in (out, other):
        with writing(folder, "dies") as process:
            assert process.wait() < 0
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) == 2
    # None of these is a part that was left: of a file, of a user, and not hidden.
    strange = [".echelon-0123456789abcdef", ".echelon-mine", "out-1"]
    for name in strange:
        (tmp_path / name).mkdir()
    with writing(out, "waits") as alive:
        assert alive.stdout is not None
        assert alive.stdin is not None
        held = alive.stdout.readline().strip()
        first = {path.name for path in tmp_path.iterdir()}
        assert first >= {held, *strange}
        assert len(first & left) == 1
        with new_folder(out) as part:
            assert {path.name for path in tmp_path.iterdir()} == {*first, part.name}
        assert out.is_dir()
        alive.stdin.write("\n")
        alive.stdin.flush()
        assert alive.wait() != 0  # somebody else was first
    assert {path.name for path in tmp_path.iterdir()} == {*(first - {held}), "out"}
    with new_folder(other):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {*strange, "out", "other"}


def test_a_folder_is_made_with_its_parents_and_never_twice(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    make_folder(folder)
    assert folder.is_dir()
    with pytest.raises(ConfigError) as refused:
        make_folder(folder, key="--out")
    assert refused.value.rules == ("never-overwrite",)
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        make_folder(tmp_path / "file" / "in")
    assert refused.value.rules == ("cannot-write",)
