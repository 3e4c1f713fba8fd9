"""The page of a run that goes on: for who has the link, on this machine, and to read only."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from echelon.page.serve import served_run
from tests.page.documents.test_run import steps, written

pytestmark = pytest.mark.timeout(60)


def ask(
    link: str, path: str | None = None, *, method: str = "GET", host: str | None = None
) -> tuple[int, str]:
    address = urlsplit(link)
    assert address.hostname == "127.0.0.1"
    connection = http.client.HTTPConnection(address.hostname, address.port or 0, timeout=20)
    try:
        headers = {} if host is None else {"Host": host}
        connection.request(method, address.path if path is None else path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_a_page_follows_its_run(tmp_path: Path) -> None:
    run = written(tmp_path, steps(2))
    with served_run(run) as link:
        status, page = ask(link)
        assert status == 200
        assert 'data-live="document.json"' in page
        assert "connect-src 'self'" in page
        path = urlsplit(link).path
        first = json.loads(ask(link, f"{path}document.json")[1])
        assert first["verdict"].startswith("The run finished, 2 of 2 steps")
        (run / "metrics.jsonl").write_text(steps(5))
        again = json.loads(ask(link, f"{path}document.json")[1])
        assert again["verdict"].startswith("The run finished, 5 of 5 steps")
    with pytest.raises(ConnectionRefusedError):
        ask(link)


def test_without_the_token_or_by_another_name_there_is_nothing(tmp_path: Path) -> None:
    run = written(tmp_path, steps(2))
    with served_run(run) as link:
        path = urlsplit(link).path
        for wrong in ("/", "/x/", "/x/document.json", path[:-2] + "/", "//", "/%2e%2e/"):
            assert ask(link, wrong)[0] == 404
        assert ask(link, f"{path}../run.toml")[0] == 404
        assert ask(link, f"{path}metrics.jsonl")[0] == 404
        assert ask(link, host="evil.example")[0] == 403
        for method in ("POST", "PUT", "DELETE"):
            assert ask(link, method=method)[0] == 501
        status, body = ask(link, method="HEAD")
        assert (status, body) == (200, "")


def test_a_damaged_run_says_so_and_the_server_goes_on(tmp_path: Path) -> None:
    run = written(tmp_path, steps(2))
    with served_run(run) as link:
        (run / "metrics.jsonl").write_text('{"kind": 3}\n')
        status, text = ask(link)
        assert status == 503
        assert "events-readable" in text
        (run / "metrics.jsonl").write_text(steps(3))
        assert ask(link)[0] == 200
