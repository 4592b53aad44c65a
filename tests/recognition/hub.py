"""A fake Hugging Face hub on 127.0.0.1 that creates, fills and serves repositories, of models and data sets alike."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

COMMIT = "1" * 40


class Hub:
    """`with Hub() as hub:` — `hub.address`, and `hub.files[repository][path]`."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.requests: list[str] = []

    def __enter__(self) -> Hub:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_) -> None:
                pass

            def do_GET(self) -> None:
                hub.answer(self, b"")

            do_HEAD = do_GET

            def do_POST(self) -> None:
                hub.answer(self, self.rfile.read(int(self.headers.get("Content-Length", 0))))

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        path = unquote(request.path.split("?")[0]).replace("/datasets/", "/models/" if "/api/" in request.path else "/")
        self.requests.append(f"{request.command} {path}")
        if path == "/api/repos/create":
            body_json = json.loads(body)
            name = "/".join(filter(None, (body_json.get("organization"), body_json["name"])))
            self.files.setdefault(name, {})
            self._send(request, {"url": f"{self.address}/{name}", "name": name})
        elif path == "/api/validate-yaml":
            self._send(request, {"errors": [], "warnings": []})
        elif path == "/api/whoami-v2":
            self._send(request, {"name": "owner", "type": "user", "orgs": []})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
            asked = [file["path"] for file in json.loads(body)["files"]]
            mode = {"uploadMode": "regular", "shouldIgnore": False}
            self._send(request, {"files": [{"path": path, **mode} for path in asked]})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            for line in body.splitlines():
                record = json.loads(line)
                if record["key"] == "file":
                    value = record["value"]
                    self.files[match[1]][value["path"]] = base64.b64decode(value["content"])
            self._send(request, {"commitOid": COMMIT, "commitUrl": f"{self.address}/{match[1]}/commit/{COMMIT}"})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/.+)?", path):
            siblings = [{"rfilename": name} for name in self.files.get(match[1], {})]
            info = {"id": match[1], "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
            known = match[1] in self.files
            self._send(request, info if known else {"error": "no such repository"}, 200 if known else 404)
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+/?", path):
            held = self.files[match[1]].items()
            self._send(request, [{"type": "file", "path": n, "size": len(d), "oid": _sha(d)} for n, d in held])
        elif (match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)) and match[2] in self.files.get(
            match[1], {}
        ):
            data = self.files[match[1]][match[2]]
            headers = {"ETag": f'"{_sha(data)}"', "X-Repo-Commit": COMMIT}
            self._send(request, data, 200, headers)
        else:
            self._send(request, {"error": "not match"}, 404)

    def _send(
        self, request: BaseHTTPRequestHandler, reply, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        request.send_response(status)
        common = {"Content-Type": "application/json", "Content-Length": str(len(data))}
        for key, value in {**common, **(headers or {})}.items():
            request.send_header(key, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(data)


def _sha(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
