"""The addresses of the Hub that uploads and loads need, answered on this machine; what was committed is kept."""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from conftest import REPOSITORY


NO_COMMIT = "0" * 40


class HubStub:
    """One repository, someone/model.

    branches: name -> path -> content; created: bodies of the requests that made the repository; requests: "METHOD path" of
    each; cards: the cards that it was asked about. `fail` answers the next requests whose path holds a word with a status, or breaks the connection (status 0).
    """

    def __init__(self):
        self.branches: dict[str, dict[str, bytes]] = {"main": {}}
        self.commits: dict[str, dict[str, bytes]] = {NO_COMMIT: {}}
        self.created: list[dict] = []
        self.requests: list[str] = []
        self.cards: list[str] = []
        self._failures: dict[str, list[int]] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def files(self) -> dict[str, bytes]:
        return self.branches["main"]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def fail(self, word: str, status: int, times: int = 1):
        self._failures[word] = [status] * times

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def environment(self, folder: Path) -> dict[str, str]:
        """For a process that takes this for the Hub; its cache is in `folder`."""
        settings = {
            "HF_ENDPOINT": self.address,
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": "hf_secret",
            "HF_HOME": str(folder),
        }
        settings |= {"HF_HUB_DISABLE_XET": "1", "HF_MODULES_CACHE": str(folder / "modules")}
        return os.environ | settings

    def run(self, folder: Path, *words: str, **others: str):
        """python WORDS in `folder`, with the project at hand."""
        environment = self.environment(folder / "hub-cache") | {"PYTHONPATH": str(REPOSITORY), **others}
        return subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)

    def files_at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if revision in self.commits:
            return revision, self.commits[revision]
        if revision not in self.branches:
            return None
        files = self.branches[revision]
        sha = NO_COMMIT if not files else hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[sha] = dict(files)
        return sha, self.commits[sha]

    def commit(self, branch: str, lines: list[dict]) -> str | None:
        """Applies a commit; None where its parent is not the branch's newest commit."""
        for line in lines:
            key, value = line["key"], line["value"]
            if key == "header" and value.get("parentCommit", self.files_at(branch)[0]) != self.files_at(branch)[0]:
                return None
            if key == "file":
                self.branches[branch][value["path"]] = base64.b64decode(value["content"])
            if key == "deletedFile":
                del self.branches[branch][value["path"]]
        return self.files_at(branch)[0]

    def next_failure(self, path: str) -> int | None:
        return next((left.pop() for word, left in self._failures.items() if word in path and left), None)

    def _handler(stub):
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments):
                pass

            def answer(self, content: bytes, status: int = 200, **headers: str):
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            def answer_json(self, body, status: int = 200, **headers: str):
                self.answer(json.dumps(body).encode(), status, Content_Type="application/json", **headers)

            def fails(self) -> bool:
                stub.requests.append(f"{self.command} {self.path}")
                status = stub.next_failure(self.path)
                if status == 0:
                    self.close_connection = True
                    self.connection.close()
                elif status:
                    self.answer_json({"error": f"answer {status}"}, status)
                return status is not None

            def not_found(self, code: str):
                self.answer_json({"error": code}, 404, X_Error_Code=code)

            def do_GET(self):
                if self.fails():
                    return
                if not stub.created:
                    return self.not_found("RepoNotFound")
                if found := re.fullmatch(r"/someone/model/resolve/([^/]+)/(.+)", self.path):
                    return self.resolve(*found.groups())
                if found := re.fullmatch(r"/api/models/someone/model(?:/revision/([^/?]+))?(?:\?.*)?", self.path):
                    return self.describe(found[1] or "main")
                if found := re.fullmatch(r"/api/models/someone/model/tree/([^/?]+)(?:\?.*)?", self.path):
                    return self.list_top(found[1])
                self.not_found("EntryNotFound")

            do_HEAD = do_GET

            def resolve(self, revision: str, path: str):
                commit = stub.files_at(revision)
                if commit is None:
                    return self.not_found("RevisionNotFound")
                sha, files = commit
                if path not in files:
                    return self.answer(b"", 404, X_Error_Code="EntryNotFound", X_Repo_Commit=sha)
                content = files[path]
                self.answer(content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=sha)

            def describe(self, revision: str):
                commit = stub.files_at(revision)
                if commit is None:
                    return self.not_found("RevisionNotFound")
                siblings = [{"rfilename": path} for path in commit[1]]
                self.answer_json({"id": "someone/model", "sha": commit[0], "siblings": siblings, "tags": []})

            def list_top(self, revision: str):
                commit = stub.files_at(revision)
                if commit is None:
                    return self.not_found("RevisionNotFound")
                files = {path: content for path, content in commit[1].items() if "/" not in path}
                folders = {path.partition("/")[0] for path in commit[1]} - set(files)
                entries = [{"type": "directory", "path": path, "oid": NO_COMMIT} for path in sorted(folders)]
                entries += [
                    {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for path, content in files.items()
                ]
                self.answer_json(entries)

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.fails():
                    return
                if self.path == "/api/repos/create":
                    exists = bool(stub.created)
                    stub.created.append(json.loads(body))
                    url = f"{stub.address}/someone/model"
                    return self.answer_json({"url": url, "id": "someone/model"}, 409 if exists else 200)
                if self.path == "/api/validate-yaml":
                    stub.cards.append(json.loads(body)["content"])
                    return self.answer_json({"errors": [], "warnings": []})
                if found := re.fullmatch(r"/api/models/someone/model/branch/(.+)", self.path):
                    exists = found[1] in stub.branches
                    stub.branches.setdefault(found[1], dict(stub.files))
                    return self.answer_json({}, 409 if exists else 200)
                if "/preupload/" in self.path:
                    files = json.loads(body)["files"]
                    answer = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]
                    return self.answer_json({"files": answer})
                found = re.fullmatch(r"/api/models/someone/model/commit/(.+)", self.path)
                sha = stub.commit(found[1], [json.loads(line) for line in body.decode().splitlines()])
                if sha is None:
                    return self.answer_json(
                        {"error": "A commit has happened since. Please refresh and try again."}, 412
                    )
                url = f"{stub.address}/someone/model/commit/{sha}"
                self.answer_json({"commitUrl": url, "commitOid": sha, "success": True})

        return Handler
