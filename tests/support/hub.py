"""The part of the Hugging Face Hub that a push needs, on 127.0.0.1: accounts, repositories, files, commits."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.support.loopback_server import LoopbackServer, serving

WRITER, READER = "hf_writer", "hf_reader"


class FakeHub(LoopbackServer):
    """Holds the files of each repository; a commit changes all of its files at once, or none.

    The token `WRITER` may write in the name of `someone`, `READER` may only read; any other is unknown. `answer` is the
    status of every answer, if it is set.
    """

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.commits: list[str] = []
        self.answer: int | None = None
        self.refused_commits = 0  # so many commits are answered with 503

    def commit(self, repository: str, lines: list[dict[str, Any]]) -> None:
        """Apply a commit."""
        files = dict(self.files[repository])
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.commits.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        self.files[repository] = files


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def _reply(self, status: int, content: Any, **headers: str) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json", "Content-Length": str(len(data))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        path, hub = self.path.partition("?")[0], self.server
        if hub.answer is not None:
            self._reply(hub.answer, {"error": "for a test"})
        elif token not in (WRITER, READER):
            self._reply(401, {"error": f"Invalid token {token}"})
        elif path == "/api/whoami-v2":
            self._reply(200, {"type": "user", "name": "someone"})
        elif path == "/api/validate-yaml":
            self._reply(200, {"warnings": [], "errors": []})
        elif path == "/api/repos/create":
            self._create(json.loads(body), token)
        else:
            repository = "/".join(path.removeprefix("/api/models/").split("/")[:2])
            self._on(repository, path.partition(repository)[2], token, body)

    def _create(self, asked: dict[str, Any], token: str) -> None:
        repository = f"{asked.get('organization') or 'someone'}/{asked['name']}"
        if token != WRITER or not repository.startswith("someone/"):
            self._reply(403, {"error": "no rights"})
            return
        if repository in self.server.files:
            self._reply(409, {"error": "exists", "url": f"{self.server.endpoint_url}/{repository}"})
            return
        self.server.files[repository] = {}
        self.server.private[repository] = asked.get("private", False) or asked.get("visibility") == "private"
        self._reply(200, {"url": f"{self.server.endpoint_url}/{repository}"})

    def _on(self, repository: str, what: str, token: str, body: bytes) -> None:
        hub = self.server
        if repository not in hub.files:
            self._reply(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        elif what in ("", "/revision/main"):
            entries = [{"rfilename": name} for name in hub.files[repository]]
            self._reply(200, {"id": repository, "sha": "0" * 40, "siblings": entries, "private": True})
        elif what.startswith("/tree/main"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                for name, data in hub.files[repository].items()
            ]
            self._reply(200, entries)
        elif what == "/preupload/main":
            names = [each["path"] for each in json.loads(body)["files"]]
            self._reply(
                200, {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
            )
        elif what == "/commit/main" and hub.refused_commits:
            hub.refused_commits -= 1
            self._reply(503, {"error": "for a test"})
        elif what == "/commit/main":
            hub.commit(repository, [json.loads(line) for line in body.decode().splitlines()])
            url = f"{hub.endpoint_url}/{repository}/commit/{'0' * 40}"
            self._reply(200, {"success": True, "commitOid": "0" * 40, "commitUrl": url})
        else:
            self._reply(404, {"error": f"no such address: {what}"})

    do_GET = do_POST = _answer  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Be quiet."""


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Serve one from a thread of this process."""
    with serving(FakeHub()) as hub:
        yield hub
