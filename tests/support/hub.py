"""The part of the Hugging Face Hub that a push needs, on 127.0.0.1: accounts, repositories, files, commits."""

import base64
import json
from contextlib import contextmanager
from types import MappingProxyType

from tests.support.scripted_server import Reply, ScriptedServer, serving

WRITER, READER = "hf_writer", "hf_reader"
NO_COMMIT = "0" * 40


class FakeHub(ScriptedServer):
    """Holds the files of each repository; a commit changes all of its files at once, or none.

    The token `WRITER` may write in the name of `someone`, `READER` may only read; any other is unknown. `answer` is the
    status of every answer, if it is set.
    """

    def __init__(self):
        super().__init__(self._reply)
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.commits: list[str] = []
        self.answer: int | None = None
        self.refused_commits = 0  # so many commits are answered with 503

    def _reply(self, request):
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        path = request.path.partition("?")[0]
        if self.answer is not None:
            return _answer(self.answer, {"error": "for a test"})
        if token not in (WRITER, READER):
            return _answer(401, {"error": f"Invalid token {token}"})
        if path == "/api/whoami-v2":
            return _answer(200, {"type": "user", "name": "someone"})
        if path == "/api/validate-yaml":
            return _answer(200, {"warnings": [], "errors": []})
        if path == "/api/repos/create":
            return self._create(json.loads(request.body), token)
        repository = "/".join(path.removeprefix("/api/models/").split("/")[:2])
        return self._on(repository, path.partition(repository)[2], request.body)

    def _create(self, asked, token):
        repository = f"{asked.get('organization') or 'someone'}/{asked['name']}"
        if token != WRITER or not repository.startswith("someone/"):
            return _answer(403, {"error": "no rights"})
        if repository in self.files:
            return _answer(409, {"error": "exists", "url": f"{self.endpoint_url}/{repository}"})
        self.files[repository] = {}
        self.private[repository] = asked.get("private", False) or asked.get("visibility") == "private"
        return _answer(200, {"url": f"{self.endpoint_url}/{repository}"})

    def _on(self, repository, what, body):
        if repository not in self.files:
            return _answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        files = self.files[repository]
        if what in ("", "/revision/main"):
            entries = [{"rfilename": name} for name in files]
            return _answer(200, {"id": repository, "sha": NO_COMMIT, "siblings": entries, "private": True})
        if what.startswith("/tree/main"):
            paths = [(name, len(data)) for name, data in files.items()]
            return _answer(
                200, [{"type": "file", "path": path, "size": size, "oid": NO_COMMIT} for path, size in paths]
            )
        if what == "/preupload/main":
            names = [each["path"] for each in json.loads(body)["files"]]
            regular = {"uploadMode": "regular", "shouldIgnore": False}
            return _answer(200, {"files": [{"path": name, **regular} for name in names]})
        if what == "/commit/main":
            return self._commit(repository, [json.loads(line) for line in body.decode().splitlines()])
        return _answer(404, {"error": f"no such address: {what}"})

    def _commit(self, repository, lines):
        if self.refused_commits:
            self.refused_commits -= 1
            return _answer(503, {"error": "for a test"})
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
        url = f"{self.endpoint_url}/{repository}/commit/{NO_COMMIT}"
        return _answer(200, {"success": True, "commitOid": NO_COMMIT, "commitUrl": url})


def _answer(status, content, headers=MappingProxyType({})):
    return Reply(status, json.dumps(content).encode(), {"Content-Type": "application/json", **headers})


@contextmanager
def fake_hub():
    with serving(FakeHub()) as hub:
        yield hub
