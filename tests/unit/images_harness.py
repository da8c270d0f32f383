"""Packed images made by hand, and a registry that serves them: honest ones and others."""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import http.server
import io
import json
import os
import tarfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import zstandard

from agent_sandbox.images.layout import this_platform

ARCHITECTURE = this_platform().partition("/")[2]
Member = tuple[tarfile.TarInfo, bytes]
PACKERS = {
    "": lambda data: data,
    "gzip": lambda data: gzip.compress(data, mtime=0),
    "zstd": zstandard.ZstdCompressor().compress,
}


def member(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", link: str = "", mode: int = 0o644) -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.size = kind, link, mode, len(data)
    info.uid, info.gid, info.mtime = os.getuid(), os.getgid(), 1_700_000_000
    return info, data


def archive(members: Iterable[Member]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class LayoutBuilder:
    """Makes an OCI layout in a directory, part by part; each part may be wrong."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.blobs = directory / "blobs" / "sha256"
        self.blobs.mkdir(parents=True)
        (directory / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')

    def put(self, content: bytes, media_type: str, **more: Any) -> dict[str, Any]:
        digest = sha256(content)
        (self.blobs / digest.removeprefix("sha256:")).write_bytes(content)
        return {"mediaType": media_type, "digest": digest, "size": len(content), **more}

    def layer(self, content: bytes | Iterable[Member], pack: str = "gzip") -> tuple[dict[str, Any], str]:
        """A layer's descriptor and its diff id."""
        plain = content if isinstance(content, bytes) else archive(content)
        suffix = f"+{pack}" if pack else ""
        packed = PACKERS[pack](plain)
        return self.put(packed, f"application/vnd.oci.image.layer.v1.tar{suffix}"), sha256(plain)

    def manifest(
        self,
        layers: list[tuple[dict[str, Any], str]],
        config: dict[str, Any] | None = None,
        *,
        architecture: str = ARCHITECTURE,
        config_type: str = "application/vnd.oci.image.config.v1+json",
        **more: Any,
    ) -> dict[str, Any]:
        """A manifest's descriptor."""
        document = {
            "architecture": architecture,
            "os": "linux",
            "config": config or {},
            "rootfs": {"type": "layers", "diff_ids": [diff_id for _, diff_id in layers]},
        }
        media_type = "application/vnd.oci.image.manifest.v1+json"
        text = {
            "schemaVersion": 2,
            "mediaType": media_type,
            "config": self.put(json.dumps(document).encode(), config_type),
            "layers": [layer for layer, _ in layers],
        }
        return self.put(json.dumps(text).encode(), media_type, **more)

    def index(self, *entries: dict[str, Any]) -> dict[str, Any]:
        """The descriptor of an index within the layout."""
        media_type = "application/vnd.oci.image.index.v1+json"
        text = {"schemaVersion": 2, "mediaType": media_type, "manifests": list(entries)}
        return self.put(json.dumps(text).encode(), media_type)

    def finish(self, *entries: dict[str, Any]) -> Path:
        """Write index.json."""
        (self.directory / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": list(entries)}))
        return self.directory


def tagged(descriptor: dict[str, Any], tag: str) -> dict[str, Any]:
    return {**descriptor, "annotations": {"org.opencontainers.image.ref.name": tag}}


def on(descriptor: dict[str, Any], platform: str) -> dict[str, Any]:
    os_, _, architecture = platform.partition("/")
    return {**descriptor, "platform": {"os": os_, "architecture": architecture}}


def tar_of(directory: Path, path: Path) -> Path:
    """A tar of a layout, as other tools make one."""
    with tarfile.open(path, "w") as tar:
        for entry in sorted(directory.rglob("*")):
            tar.add(entry, entry.relative_to(directory), recursive=False)
    return path


def docker_archive(
    path: Path,
    images: list[tuple[list[str], list[bytes], dict[str, Any]]],
    *,
    manifest: Any = None,
    more: Iterable[Member] = (),
) -> Path:
    """What ``docker save`` writes: for each image its tags, its layers' tars, and its config."""
    members: dict[str, Member] = {}
    listed = []
    for tags, layers, config in images:
        document = {
            "architecture": ARCHITECTURE,
            "os": "linux",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": [sha256(layer) for layer in layers]},
        }
        text = json.dumps(document).encode()
        name = f"{sha256(text)[7:]}.json"
        files = [f"{sha256(layer)[7:]}/layer.tar" for layer in layers]
        members |= {file: member(file, data=layer) for file, layer in zip(files, layers, strict=True)}
        members[name] = member(name, data=text)
        listed.append({"Config": name, "RepoTags": tags, "Layers": files})
    members["manifest.json"] = member(
        "manifest.json", data=json.dumps(listed if manifest is None else manifest).encode()
    )
    path.write_bytes(archive([*members.values(), *more]))
    return path


class Registry(http.server.ThreadingHTTPServer):
    """Serves a layout as the repository ``tools`` over the pull half of the OCI distribution API, on loopback.

    ``password`` asks for it; ``replaced`` gives other bytes for a digest; ``slow`` sends layers by the kilobyte.
    """

    daemon_threads = True

    def __init__(self, layout: Path, *, password: str = "", slow: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.layout, self.slow = layout, slow
        self.password = base64.b64encode(f"user:{password}".encode()).decode() if password else ""
        self.replaced: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.closing = threading.Event()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Registry

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.server.password and self.headers.get("Authorization") != f"Basic {self.server.password}":
            self._send(401, _problem("UNAUTHORIZED"), ("WWW-Authenticate", 'Basic realm="tools"'))
            return
        if self.path == "/v2/":
            self._send(200, b"{}")
            return
        name, kind, wanted = ["", "", *self.path.removeprefix("/v2/").rsplit("/", 2)][-3:]
        found = self._find(kind, wanted) if name == "tools" else None
        if found is None:
            code = "NAME_UNKNOWN" if name != "tools" else "MANIFEST_UNKNOWN" if kind == "manifests" else "BLOB_UNKNOWN"
            self._send(404, _problem(code))
        else:
            content, media_type = found
            self._send(200, content, ("Content-Type", media_type), ("Docker-Content-Digest", sha256(content)))

    do_HEAD = do_GET

    def _find(self, kind: str, wanted: str) -> tuple[bytes, str] | None:
        media_type = "application/octet-stream"
        if kind == "manifests" and not wanted.startswith("sha256:"):
            entries = json.loads((self.server.layout / "index.json").read_text())["manifests"]
            tags = {entry.get("annotations", {}).get("org.opencontainers.image.ref.name"): entry for entry in entries}
            if wanted not in tags:
                return None
            wanted = tags[wanted]["digest"]
        if wanted in self.server.replaced:
            content = self.server.replaced[wanted]
        else:
            path = self.server.layout / "blobs" / "sha256" / wanted.removeprefix("sha256:")
            if not path.is_file():
                return None
            content = path.read_bytes()
        if kind == "manifests":
            media_type = json.loads(content)["mediaType"]
        return content, media_type

    def _send(self, status: int, content: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in (*headers, ("Content-Length", str(len(content)))):
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        with contextlib.suppress(OSError):
            if self.server.slow and "/blobs/" in self.path and len(content) > 4096:
                for at in range(0, len(content), 1024):
                    self.wfile.write(content[at : at + 1024])
                    if self.server.closing.wait(0.05):
                        return
            else:
                self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _problem(code: str) -> bytes:
    return json.dumps({"errors": [{"code": code, "message": code.replace("_", " ").lower()}]}).encode()


@contextlib.contextmanager
def serving(layout: Path, *, password: str = "", slow: bool = False) -> Iterator[Registry]:
    """Run a registry on a thread."""
    registry = Registry(layout, password=password, slow=slow)
    thread = threading.Thread(target=registry.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield registry
    finally:
        registry.closing.set()
        registry.shutdown()
        registry.server_close()
        thread.join()


def left_over(data: Path, seconds: float = 10.0) -> list[str]:
    """What is in an image store besides its images, once removals had their time."""
    deadline = time.monotonic() + seconds
    while True:
        left = sorted(path.name for path in (data / "images").glob(".*"))
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)
