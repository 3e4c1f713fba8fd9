"""The part of MLflow's REST interface that its client uses for a run, served from memory."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit


class RunStore(ThreadingHTTPServer):
    """Hold the experiments and runs of a server on the loopback interface."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.is_away = False
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}

    @property
    def url(self) -> str:
        """Return the address that MLFLOW_TRACKING_URI takes."""
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, path: str, given: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return the status and the object that answer a request."""
        if self.is_away:
            return 503, {"error_code": "TEMPORARILY_UNAVAILABLE", "message": "away"}
        if path == "experiments/get-by-name" and given["experiment_name"] not in self.experiments:
            return 404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no experiment"}
        return 200, self._found(path, given)

    def _found(self, path: str, given: dict[str, Any]) -> dict[str, Any]:
        if path == "experiments/get-by-name":
            name = given["experiment_name"]
            return {"experiment": {"experiment_id": self.experiments[name], "name": name}}
        if path == "experiments/create":
            self.experiments[given["name"]] = str(len(self.experiments) + 1)
            return {"experiment_id": self.experiments[given["name"]]}
        if path == "runs/create":
            run_id = f"run{len(self.runs)}"
            info = {"run_id": run_id, "experiment_id": given["experiment_id"], "status": "RUNNING"}
            self.runs[run_id] = {"info": info, "metrics": [], "params": [], "tags": given["tags"]}
            return self._told(run_id)
        run = self.runs[given["run_id"]]
        if path == "runs/log-batch":
            for kind in ("metrics", "params", "tags"):
                run[kind] += given.get(kind, [])
            return {}
        if path == "metrics/get-history":
            key = given["metric_key"]
            return {"metrics": [one for one in run["metrics"] if one["key"] == key]}
        if path == "runs/update":
            run["info"]["status"] = given.get("status", "RUNNING")
            return {"run_info": run["info"]}
        assert path == "runs/get", path
        return self._told(given["run_id"])

    def _told(self, run_id: str) -> dict[str, Any]:
        run = self.runs[run_id]
        last = {one["key"]: one for one in sorted(run["metrics"], key=lambda one: int(one["step"]))}
        data = {"metrics": list(last.values()), "params": run["params"], "tags": run["tags"]}
        return {"run": {"info": run["info"], "data": data}}


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        self._answer(asked.path, {key: one[0] for key, one in parse_qs(asked.query).items()})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(urlsplit(self.path).path, json.loads(body))

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _answer(self, path: str, given: dict[str, Any]) -> None:
        store = cast(RunStore, self.server)
        status, found = store.answer(path.rpartition("/mlflow/")[2], given)
        body = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def mlflow_server() -> Generator[RunStore]:
    """Serve for as long as the block runs."""
    server = RunStore()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
