# SPDX-License-Identifier: Apache-2.0
"""Sources behind URLs (https://, s3://, gs://, memory:// ...), read as streams.

HTTP is read with what Python has, all else through fsspec. What breaks off is asked for again from
the byte where it stopped, a few times, later each time. Accounts are those of the package's own
configuration: a URL with a password in it is refused, as it would stand in the files of the run.
"""

from __future__ import annotations

import hashlib
import io
import re
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import PurePosixPath
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from echelon.core.errors import DataError, EnvironmentProblem
from echelon.core.optional import install_command, optional_package
from echelon.core.rulebook.data import (
    DATA_SOURCE_UNREADABLE,
    DATA_URL_FAILS,
    DATA_URL_PLAIN,
    PACKAGE_INSTALLED,
)

RETRIES = 4  # tries after the first
FIRST_PAUSE_S = 0.5  # s before the second try; twice as long before each one that follows
_PIECE_BYTES = 2**20  # of a hash
_TIMEOUT_S = 60.0  # s without an answer
_HTTP = ("http", "https")
"""What is read without another package; there are no folders: a URL is a file."""


def is_url(source: object) -> bool:
    """Return whether a source is a URL, and no path."""
    text = str(source)
    return "://" in text and text.partition("://")[0].replace("+", "").isalnum()


def url_files(url: str) -> list[tuple[str, str]]:
    """Return (url, name) of the file behind a URL, or of all files in the folder, by name.

    DataError where it is not there, EnvironmentProblem where its package is not.
    """
    system, path = _system(url)
    protocol = url.partition("://")[0]

    def listed() -> list[tuple[str, str]]:
        if protocol in _HTTP or system.isfile(path):
            return [(url, PurePosixPath(urlsplit(url).path if protocol in _HTTP else path).name)]
        if not system.exists(path):
            raise FileNotFoundError(path)
        base = system._strip_protocol(path).rstrip("/")
        names = sorted(one.removeprefix(base).lstrip("/") for one in system.find(path))
        return [(f"{url.rstrip('/')}/{name}", name) for name in names]

    try:
        return _retried(listed, url, 0)
    except FileNotFoundError as error:
        raise DataError(DATA_SOURCE_UNREADABLE.problem(f"source {url} is not there")) from error


def open_url(url: str) -> io.BufferedReader:
    """Return a stream of what is behind a URL; DataError where it fails for good."""
    return io.BufferedReader(UrlStream(url), buffer_size=_PIECE_BYTES)


def sha256_of_url(url: str) -> str:
    """Return the sha256 of the content behind a URL, which is read for it."""
    digest = hashlib.sha256()
    with open_url(url) as stream:
        while piece := stream.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


class UrlStream(io.RawIOBase):
    """Read a URL from any place; a read that fails opens it again at the same place."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._system, self._path = _system(url)
        self._place = 0
        self._stream: Any = None
        try:
            self._size = _retried(lambda: self._system.size(self._path), url, 0)
        except FileNotFoundError as error:
            raise DataError(DATA_SOURCE_UNREADABLE.problem(f"source {url} is not there")) from error

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return whether its length is known: a file of columns is read from its end."""
        return self._size is not None

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place, and return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size or 0}[whence]
        self._place = base + offset
        self._drop()
        return self._place

    def tell(self) -> int:
        """Return the place."""
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer, and return how many bytes those were."""
        wanted = len(buffer)
        piece = _retried(lambda: self._read(wanted), self._url, self._place)
        buffer[: len(piece)] = piece
        self._place += len(piece)
        return len(piece)

    def close(self) -> None:
        """Close the connection."""
        self._drop()
        super().close()

    def _read(self, wanted: int) -> bytes:
        try:
            if self._stream is None:
                self._stream = self._system.open(self._path, "rb")
                if self._place:
                    self._stream.seek(self._place)
            piece = self._stream.read(wanted)
        except Exception:
            self._drop()
            raise
        if not piece and self._size is not None and self._place < self._size:
            self._drop()
            raise OSError(f"it ended after {self._place} of {self._size} bytes")
        return piece

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


class _Http:
    """Files of an HTTP server, in ranges of bytes, with what Python itself has."""

    def isfile(self, url: str) -> bool:
        """Return True: there are no folders."""
        return bool(url)

    def size(self, url: str) -> int | None:
        """Return the bytes of a file; None where the server does not say."""
        with self._asked(Request(url, method="HEAD")) as answer:
            length = answer.headers.get("Content-Length")
        return None if length is None else int(length)

    def open(self, url: str, mode: str) -> _HttpFile:
        """Return the file, to be read from where `seek` says."""
        assert mode == "rb"
        return _HttpFile(self, url)

    def get(self, url: str, place: int) -> Any:
        """Return the answer that begins at a place."""
        answer = self._asked(Request(url, headers={"Range": f"bytes={place}-"} if place else {}))
        if place and answer.status != HTTPStatus.PARTIAL_CONTENT:
            answer.close()
            raise OSError(f"the server has no ranges of bytes (status {answer.status})")
        return answer

    def _asked(self, request: Request) -> Any:
        try:
            return urlopen(request, timeout=_TIMEOUT_S)
        except HTTPError as error:
            error.close()
            if error.code in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
                raise FileNotFoundError(request.full_url) from error
            raise OSError(f"status {error.code} {error.reason}") from error


class _HttpFile:
    """One connection, from a place to the end."""

    def __init__(self, system: _Http, url: str) -> None:
        self._system, self._url, self._place = system, url, 0
        self._answer: Any = None

    def seek(self, place: int) -> None:
        """Begin there."""
        self._place = place

    def read(self, wanted: int) -> bytes:
        """Return the next bytes; none at the end."""
        if self._answer is None:
            self._answer = self._system.get(self._url, self._place)
        return self._answer.read(wanted)

    def close(self) -> None:
        """Close the connection."""
        if self._answer is not None:
            self._answer.close()


def _system(url: str) -> tuple[Any, str]:
    if "@" in urlsplit(url).netloc:
        raise DataError(
            DATA_URL_PLAIN.problem(
                f"the URL of {urlsplit(url).hostname} has a user or a password in it",
                suggestions=("the URL alone; its package reads accounts from its own settings",),
            )
        )
    if url.partition("://")[0] in _HTTP:
        return _Http(), url
    core: Any = optional_package("fsspec.core", extra="data", purpose=f"reading {url}")
    try:
        system, path = core.url_to_fs(url)
    except ImportError as error:
        raise EnvironmentProblem(
            PACKAGE_INSTALLED.problem(
                f"reading {url} needs a package: {error}",
                suggestions=(_install(url, str(error)),),
            )
        ) from error
    except ValueError as error:
        raise DataError(DATA_SOURCE_UNREADABLE.problem(f"source {url}: {error}")) from error
    return system, path


def _install(url: str, error: str) -> str:
    """Return the command that installs the package that fsspec names in its error."""
    named = re.search(r"[Ii]nstall ([A-Za-z0-9_-]+)", error)
    if url.startswith("hf://") or named is None:
        return install_command("hf" if url.startswith("hf://") else "data")
    return f"pip install {named[1]}"


def _retried(work: Callable[[], Any], url: str, place: int) -> Any:
    """Do some work, a few times where it fails; what is not there is not asked for again."""
    pause_s = FIRST_PAUSE_S
    for left in reversed(range(RETRIES + 1)):
        try:
            return work()
        except (FileNotFoundError, DataError):
            raise
        except Exception as error:  # Each protocol has errors of its own.
            if not left:
                said = " ".join(f"{type(error).__name__}: {error}".split())
                raise DataError(
                    DATA_URL_FAILS.problem(
                        f"{url} failed {RETRIES + 1} times at byte {place}: {said}; nothing of it "
                        "was kept"
                    )
                ) from error
            time.sleep(pause_s)
            pause_s *= 2
    raise AssertionError("the last try returned or raised")
