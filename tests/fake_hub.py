"""A Hub on this machine: the Hub's own host, and the one that it redirects large files to. Both do wrong what they are told to."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import unquote

import download
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http

REPO, COMMIT, TOKEN = "maker/Tiny-8B-Chat", "c" * 40, "hf_secret"
BIG = bytes(range(256)) * 8192  # 2 MiB, more than one chunk
SHARDS = {"model-00001-of-00002.safetensors": BIG, "model-00002-of-00002.safetensors": BIG[::-1] + b"end"}
INDEX = json.dumps({"weight_map": {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}})
NEEDED = {
    **SHARDS,
    "model.safetensors.index.json": INDEX.encode(),
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"model": {}}' * 1000,
    "tokenizer_config.json": b"{}\n",
    "special.tiktoken": b"AA== 0\n",
}
OTHERS = {
    "README.md": b"# Tiny", ".gitattributes": b"* lfs", "pytorch_model.bin": b"pickle", "consolidated.safetensors": b"twice",
    "model-q4.gguf": b"GGUF", "consolidated.00.pth": b"pth",
    "model.safetensors": b"twice",
}  # fmt: skip
FIRST = next(iter(SHARDS))


class Server(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """A client that hangs up is no fault here."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class FakeHub:
    """What the two servers know. ``faults``: for a file's name or an API call's kind, what goes wrong, request by request."""

    def __init__(self, files, repository=REPO):
        self.files, self.commit, self.faults, self.log = dict(files), COMMIT, {}, []
        self.repository = repository
        self.extra_rows, self.barrier = [], None
        self.listed: dict[str, bytes] = {}  # where it isn't what is sent
        self.hub, self.cdn = (self.serve(role) for role in ("hub", "cdn"))

    def serve(self, role):
        server = Server(("127.0.0.1", 0), Handler)
        server.daemon_threads, server.fake, server.role = True, self, role
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.005,), daemon=True).start()
        return server

    def close(self):
        for server in (self.hub, self.cdn):
            server.shutdown()
            server.server_close()

    def is_the_hub(self, monkeypatch, home):
        """Let ``download.py`` find this one, impatiently, and no token of this machine's."""
        for name in [name for name in os.environ if name.startswith("HF_") or name.lower().endswith("_proxy")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("HF_ENDPOINT", self.hub.url)
        monkeypatch.setenv("HF_HOME", str(home))
        # huggingface_hub reads its environment once, as it is imported
        monkeypatch.setattr(constants, "ENDPOINT", self.hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", self.hub.url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        monkeypatch.setattr(download, "WAITS", (0, 0, 0, 0))
        for module in (file_download, _http):
            monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda seconds: None))

    def rows(self):
        """The files as `HfApi.model_info` wants to hear of them."""
        rows = [{"rfilename": "original/consolidated.00.pth", "size": 1, "blobId": "0" * 40}]
        for name, sent in self.files.items():
            data = self.listed.get(name, sent)
            row = {"rfilename": name, "size": len(data), "blobId": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()}
            if name.endswith(".safetensors") or name == "tokenizer.json":
                row |= {"lfs": {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}}
                row["blobId"] = "1" * 40  # the pointer's
            rows.append(row)
        return rows + self.extra_rows

    def requests(self, role, kind):
        """What was asked of one server: (kind or file's name, Authorization, Range)."""
        return [entry[1:] for entry in self.log if entry[:2] == (role, kind)]


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        fake, role = self.server.fake, self.server.role
        path = unquote(self.path).partition("?")[0]
        revision = re.fullmatch(f"/api/models/{fake.repository}/revision/(.+)", path)
        kind = "revision" if revision else path.rpartition("/")[2]
        fake.log.append((role, kind, self.headers.get("Authorization"), self.headers.get("Range")))
        if "/maker/Old-Name/" in path:
            return self.answer(307, Location=self.path.replace("Old-Name", "Tiny-8B-Chat"))
        faults = fake.faults.get(kind if role == "hub" else f"cdn {kind}", [])
        fault = faults.pop(0) if faults else None
        if isinstance(fault, tuple):
            status, headers = fault
            return self.answer(status, b"<html>", **headers)
        if isinstance(fault, bytes):
            return self.answer(200, fault)
        if revision:
            about = {"id": fake.repository, "sha": fake.commit, "siblings": fake.rows()}
            return self.answer(200, json.dumps(about).encode())
        if role == "hub" and (kind.endswith(".safetensors") or kind == "tokenizer.json") and fault is None:
            assert path == f"/{fake.repository}/resolve/{fake.commit}/{kind}"
            return self.answer(302, Location=f"{fake.cdn.url}/blobs/{kind}?signature=hidden")
        self.send_file(fake.files[kind], fault)

    def send_file(self, data, fault):
        fake = self.server.fake
        if fake.barrier:
            fake.barrier.wait()
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(asked.group(1)) if asked and fault != "whole" else 0
        self.send_response(206 if asked and fault != "whole" else 200)
        if asked and fault != "whole":
            start -= fault == "shifted"
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        body = data[start:]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if isinstance(fault, int):
            body = body[:fault]
        if fault == "reset":
            self.wfile.write(body[:1000])
            time.sleep(0.05)  # a reset takes along what was not read yet
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())
            raise ConnectionError
        if fault == "slow":
            self.wfile.write(body[: 11 * 2**20])
            time.sleep(20)
        self.wfile.write(body)
