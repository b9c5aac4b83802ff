"""The few addresses of the Hub that an upload needs, answered on this machine; what was committed is kept."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class HubStub:
    """`files` holds what was committed, by path; `created` the bodies of the requests that made a repository."""

    def __init__(self, refuse: bool = False):
        self.files: dict[str, bytes] = {}
        self.created: list[dict] = []
        self.refuse = refuse
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def _handler(stub):
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments):
                pass

            def _answer(self, body: dict, status: int = 200):
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def do_GET(self):
                self._answer({"error": "not found"}, 404)

            do_HEAD = do_GET

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.path == "/api/repos/create":
                    if stub.refuse:
                        return self._answer({"error": "you may not"}, 403)
                    stub.created.append(json.loads(body))
                    return self._answer({"url": f"{stub.address}/someone/model"})
                if self.path == "/api/validate-yaml":
                    return self._answer({"errors": [], "warnings": []})
                if "/preupload/" in self.path:
                    files = json.loads(body)["files"]
                    answer = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]
                    return self._answer({"files": answer})
                for line in body.decode().splitlines():
                    entry = json.loads(line)
                    if entry["key"] == "file":
                        stub.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                self._answer(
                    {"commitUrl": f"{stub.address}/someone/model/commit/1", "commitOid": "1" * 40, "success": True}
                )

        return Handler
