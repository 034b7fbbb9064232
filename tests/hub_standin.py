"""A stand-in of the Hub's HTTP API on this machine: as much of it as uploads and downloads of models need.

It keeps every commit's files in memory. Repositories are made by `create_repo`, small files come with the commit, large
ones and all `.safetensors` through Git LFS, as the Hub takes them from clients without xet.
"""

import base64
import gzip
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


USER = "someone"
LFS_FROM = 100_000  # bytes


@dataclass
class Commit:
    """The whole tree after one commit."""

    message: str
    files: dict[str, bytes]

    @property
    def sha(self) -> str:
        return hashlib.sha1(repr((self.message, sorted(self.files.items()))).encode()).hexdigest()


@dataclass
class Repository:
    private: bool
    commits: list[Commit] = field(default_factory=lambda: [Commit("initial commit", {})])

    @property
    def files(self) -> dict[str, bytes]:
        """Those of the last commit."""
        return self.commits[-1].files

    def at(self, revision: str) -> Commit | None:
        found = [commit for commit in self.commits if commit.sha == revision]
        return self.commits[-1] if revision == "main" else found[0] if found else None


class Hub:
    """
    The server; `with Hub() as hub:` runs it in a thread of its own.

    Attributes:
        repositories: By name.
        token: The one that every upload must carry.
        refuse_commits: Answer each commit with an error of the server.
    """

    def __init__(self, token: str):
        self.token = token
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.refuse_commits = False
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> "Hub":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.server.shutdown()
        self.server.server_close()

    def create(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        name = f"{body.get('organization') or USER}/{body['name']}"
        status = 409 if name in self.repositories else 200
        self.repositories.setdefault(name, Repository(bool(body.get("private"))))
        return status, {"url": f"{self.endpoint}/{name}", "name": name, "error": "You already created this model repo"}

    def preupload(self, body: dict[str, Any]) -> dict[str, Any]:
        def mode(path: str, size: int) -> str:
            return "lfs" if size >= LFS_FROM or path.endswith(".safetensors") else "regular"

        files = body["files"]
        return {
            "files": [
                {"path": f["path"], "uploadMode": mode(f["path"], f["size"]), "shouldIgnore": False, "oid": None}
                for f in files
            ]
        }

    def batch(self, body: dict[str, Any]) -> dict[str, Any]:
        objects = []
        for item in body["objects"]:
            upload = {"upload": {"href": f"{self.endpoint}/lfs/{item['oid']}"}}
            objects.append(item if item["oid"] in self.blobs else item | {"actions": upload})
        return {"transfer": "basic", "objects": objects}

    def commit(self, name: str, lines: bytes) -> tuple[int, dict[str, Any]]:
        if self.refuse_commits:
            return 400, {"error": "no commits today"}
        repository = self.repositories[name]
        entries = [json.loads(line) for line in lines.splitlines() if line.strip()]
        files, message = dict(repository.files), ""
        for entry in entries:
            key, value = entry["key"], entry["value"]
            if key == "header":
                message = value["summary"]
            elif key == "file":
                assert value["encoding"] == "base64"
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.blobs[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
            else:
                return 400, {"error": f"the stand-in knows no {key}"}
        repository.commits.append(Commit(message, files))
        sha = repository.commits[-1].sha
        return 200, {"success": True, "commitOid": sha, "commitUrl": f"{self.endpoint}/{name}/commit/{sha}"}


class Handler(BaseHTTPRequestHandler):
    """One request."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            data = b"".join(parts)
        else:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_json(self, status: int, body: Any, **headers: str) -> None:
        self.answer(status, json.dumps(body).encode(), Content_Type="application/json", **headers)

    def missing(self, code: str) -> None:
        self.answer_json(404, {"error": f"{code}: {self.path}"}, X_Error_Code=code, X_Error_Message=code)

    def do_POST(self) -> None:
        data, path = self.body(), unquote(urlsplit(self.path).path)
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self.answer_json(401, {"error": "no token"})
        if path == "/api/repos/create":
            return self.answer_json(*self.hub.create(json.loads(data)))
        if path == "/api/validate-yaml":
            return self.answer_json(200, {"errors": [], "warnings": []})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main", path):
            if match[1] not in self.hub.repositories:
                return self.missing("RepoNotFound")
            if match[2] == "preupload":
                return self.answer_json(200, self.hub.preupload(json.loads(data)))
            return self.answer_json(*self.hub.commit(match[1], data))
        if re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return self.answer_json(200, self.hub.batch(json.loads(data)))
        return self.answer_json(501, {"error": f"the stand-in knows no POST {path}"})

    def do_PUT(self) -> None:
        data, oid = self.body(), self.path.removeprefix("/lfs/")
        if hashlib.sha256(data).hexdigest() != oid:
            return self.answer_json(400, {"error": "another content"})
        self.hub.blobs[oid] = data
        return self.answer(200)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path == "/api/whoami-v2":
            return self.answer_json(200, {"name": USER, "type": "user", "orgs": []})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+)|/tree/([^/]+)(?:/(.+))?)?", path):
            name, revision = match[1], match[2] or match[3] or "main"
            commit = self.find(name, revision)
            if commit is None:
                return None
            if match[3]:
                inside = f"{match[4]}/" if match[4] else ""
                tree = [entry(path, data) for path, data in commit.files.items() if path.startswith(inside)]
                return self.answer_json(200, tree)
            siblings = [{"rfilename": path} for path in sorted(commit.files)]
            private = self.hub.repositories[name].private
            info = {"id": name, "modelId": name, "sha": commit.sha, "siblings": siblings, "private": private}
            return self.answer_json(200, info | {"tags": [], "downloads": 0, "likes": 0})
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            commit = self.find(match[1], match[2])
            if commit is None:
                return None
            if match[3] not in commit.files:
                return self.missing("EntryNotFound")
            data = commit.files[match[3]]
            return self.answer(
                200, data, ETag=f'"{hashlib.sha256(data).hexdigest()}"', X_Repo_Commit=commit.sha,
                Content_Type="application/octet-stream",
            )  # fmt: skip
        return self.answer_json(501, {"error": f"the stand-in knows no GET {path}"})

    def find(self, name: str, revision: str) -> Commit | None:
        """The commit; what is missing has been answered where it is `None`."""
        if name not in self.hub.repositories:
            self.missing("RepoNotFound")
            return None
        commit = self.hub.repositories[name].at(revision)
        if commit is None:
            self.missing("RevisionNotFound")
        return commit


def entry(path: str, data: bytes) -> dict[str, Any]:
    oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    return {"type": "file", "path": path, "size": len(data), "oid": oid}
