"""A loopback server that speaks just enough of W&B's API, and can fall silent or go away."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeWandb:
    """Accepts runs and keeps what the client posts.

    Attributes:
        rows: history rows posted so far.
        runs: runs created.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.runs = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def die(self) -> None:
        """Refuse every connection from now on."""
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path.endswith("/file_stream"):
            content = body.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            self.rows += [json.loads(line) for line in content]
            return {"limits": {}}
        query, variables = body.get("query", ""), body.get("variables", {})
        if "mutation UpsertBucket" in query:
            self.runs += 1
            project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}
            bucket = {
                "id": "b",
                "name": variables["name"],
                "displayName": "x",
                "description": "",
                "config": "{}",
            }
            bucket |= {"sweepName": None, "project": project, "historyLineCount": 0}
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        if "mutation CreateRunFiles" in query:
            return {"data": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": []}}}
        return {"data": {}}


def _handler(server: FakeWandb) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("content-length") or 0))
            if self.headers.get("content-encoding") == "gzip":
                raw = gzip.decompress(raw)
            try:
                body = json.loads(raw)
            except ValueError:
                body = {}
            self._send(200, json.dumps(server.answer(self.path, body)).encode())

        def do_GET(self) -> None:
            self._send(404, b"")

        def _send(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


class SilentServer:
    """Accepts connections and never answers."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        self._socket.close()
        for one in self._open:
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                self._open.append(self._socket.accept()[0])
            except OSError:
                return


def refusing_url() -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return f"http://127.0.0.1:{one.getsockname()[1]}"
