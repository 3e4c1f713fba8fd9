"""Sources behind URLs: in memory and from a server on this machine, whole, broken off, and gone."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import fsspec
import pytest

from echelon.core.errors import DataError, EnvironmentProblem
from echelon.training.data import urls
from echelon.training.data.corpus import prepared_data
from echelon.training.data.prepare import prepare
from echelon.training.data.urls import is_url, open_url, sha256_of_url, url_files

LINES = "".join(json.dumps({"text": f"document {n} " * 30}) + "\n" for n in range(400)).encode()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "FIRST_PAUSE_S", 0.001)


@pytest.fixture
def memory() -> Generator[Any]:
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


def _write(path: Path, data: bytes = LINES) -> Path:
    path.write_bytes(data)
    return path


def test_a_url_is_told_from_a_path() -> None:
    assert [is_url(one) for one in ("s3://a/b", "memory://x", "a/b", Path("a//b"))] == [
        *(True, True, False, False)
    ]


@pytest.mark.parametrize("name", ["one.jsonl", "one.jsonl.gz", "one.parquet", "one.arrow"])
def test_tokens_are_those_of_the_same_file_on_the_disk(
    tmp_path: Path, memory: Any, name: str
) -> None:
    local = tmp_path / name
    if name.endswith(".gz"):
        _write(local, gzip.compress(LINES))
    elif name.endswith(".jsonl"):
        _write(local)
    else:
        arrow = pytest.importorskip("pyarrow")
        table = arrow.table({"text": [json.loads(line)["text"] for line in LINES.splitlines()]})
        if name.endswith(".parquet"):
            import pyarrow.parquet

            pyarrow.parquet.write_table(table, local)
        else:
            with (
                arrow.OSFile(str(local), "wb") as sink,
                arrow.ipc.new_stream(sink, table.schema) as writer,
            ):
                writer.write_table(table)
    with memory.open(f"/corpus/{name}", "wb") as file:
        file.write(local.read_bytes())
    here = prepare([local], tmp_path / "here").dataset
    there = prepare([f"memory://corpus/{name}"], tmp_path / "there").dataset
    assert there.hash == here.hash
    assert there.num_documents == 400


def test_a_folder_is_read_by_name_and_splits_are_told_apart(tmp_path: Path, memory: Any) -> None:
    for name in ("train-00001-of-00002.jsonl", "train-00000-of-00002.jsonl"):
        memory.pipe(f"/set/data/{name}", LINES)
    memory.pipe("/set/data/test-00000-of-00001.jsonl", LINES)
    memory.pipe("/set/README.md", b"# about\n")
    found = prepare(["memory://set"], tmp_path / "out")
    assert (found.num_files, found.dataset.num_documents) == (2, 800)
    assert found.skipped == {".md": 1, "split test": 1}
    names = [name for _, name in url_files("memory://set")]
    assert names[1:] == sorted(names[1:])


def test_a_run_prepares_a_url_once_by_its_content(tmp_path: Path, memory: Any) -> None:
    memory.pipe("/a.jsonl", LINES)
    first = prepared_data("memory://a.jsonl", "bytes", tmp_path)
    assert prepared_data("memory://a.jsonl", "bytes", tmp_path) == first
    memory.pipe("/a.jsonl", LINES[: len(LINES) // 2].rpartition(b"\n")[0] + b"\n")
    assert prepared_data("memory://a.jsonl", "bytes", tmp_path) != first


def test_what_is_not_there_and_what_is_secret_is_refused(tmp_path: Path, memory: Any) -> None:
    memory.pipe("/b.unknown", LINES)
    for url, rule in (
        ("memory://gone.jsonl", "data-source-unreadable"),
        ("memory://b.unknown", "data-format-known"),
        ("nosuch://b.jsonl", "data-source-unreadable"),
        ("https://me:secret@example.com/a.jsonl", "data-url-plain"),
    ):
        with pytest.raises(DataError) as error:
            prepare([url], tmp_path / "out")
        assert error.value.rules == (rule,)
        assert "secret" not in str(error.value)
    assert not (tmp_path / "out").exists()


class _Breaking:
    """A file system whose reads break off `failures` times."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.opened: list[int] = []

    def size(self, path: str) -> int:
        return len(LINES)

    def isfile(self, path: str) -> bool:
        return True

    def open(self, path: str, mode: str) -> _BreakingFile:
        return _BreakingFile(self)


class _BreakingFile:
    def __init__(self, system: _Breaking) -> None:
        self._system, self._place = system, 0

    def seek(self, place: int) -> None:
        self._place = place

    def read(self, wanted: int) -> bytes:
        if self._place > 1000 and self._system.failures:
            self._system.failures -= 1
            self._system.opened.append(self._place)
            raise ConnectionResetError("the peer is gone")
        piece = LINES[self._place : self._place + min(wanted, 5000)]
        self._place += len(piece)
        return piece

    def close(self) -> None:
        """Let go of nothing."""


def test_what_breaks_off_goes_on_at_its_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    system = _Breaking(failures=3)
    monkeypatch.setattr(urls, "_system", lambda _: (system, "x"))
    with open_url("s3://x/a.jsonl") as stream:
        assert stream.read() == LINES
    assert system.opened == [5000] * 3


def test_what_fails_for_good_is_told_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(urls, "_system", lambda _: (_Breaking(failures=99), "x/a.jsonl"))
    with pytest.raises(DataError, match="failed 5 times at byte 5000: ConnectionResetError") as e:
        prepare(["s3://x/a.jsonl"], tmp_path / "out")
    assert e.value.rules == ("data-url-fails",)
    assert list(tmp_path.iterdir()) == [], "nothing half-finished is left"


class _Handler(BaseHTTPRequestHandler):
    """Serve LINES in whole and in ranges; every other request for a range is refused."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _answer(self, *, with_body: bool) -> None:
        server, asked = cast("Any", self.server), self.headers.get("Range", "")
        if self.path != "/a.jsonl":
            self.send_error(404)
            return
        begin, end = 0, len(LINES)
        if asked.startswith("bytes="):
            server.requests += 1
            if server.requests % 2:
                self.send_error(503)
                return
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last or end) + 1, end)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Accept-Ranges", "bytes")
        if asked:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(LINES)}")
        self.end_headers()
        if with_body:
            self.wfile.write(LINES[begin:end])


@contextmanager
def _server() -> Generator[str]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.requests = 0
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_server_is_read_though_it_fails_now_and_then(tmp_path: Path) -> None:
    here = prepare([_write(tmp_path / "a.jsonl")], tmp_path / "here").dataset
    with _server() as url:
        there = prepare([f"{url}/a.jsonl"], tmp_path / "there").dataset
        assert there.hash == here.hash
        assert sha256_of_url(f"{url}/a.jsonl")
        with pytest.raises(DataError) as error:
            prepare([f"{url}/b.jsonl"], tmp_path / "out")
    assert error.value.rules == ("data-source-unreadable",)


def test_a_protocol_without_its_package_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(EnvironmentProblem, match="Install s3fs") as error:
        prepare(["s3://x/a.jsonl"], tmp_path / "out")
    assert error.value.rules == ("package-installed",)
    assert error.value.problems[0].suggestions == ("pip install s3fs",)
    with pytest.raises(EnvironmentProblem) as error:
        prepare(["hf://datasets/x/a.jsonl"], tmp_path / "out")
    assert "[hf]" in error.value.problems[0].suggestions[0]
