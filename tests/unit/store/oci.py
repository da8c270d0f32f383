"""OCI image layouts made of layers, and their unpacking by umoci: what others make of our layers."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path


def layout(directory: Path, layers: Sequence[bytes]) -> None:
    """Write an image layout with one image of these layers, tagged ``image``."""
    blobs = directory / "blobs/sha256"
    blobs.mkdir(parents=True)

    def blob(data: bytes, kind: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    kept = [blob(layer, "layer.v1.tar") for layer in layers]
    root = {"type": "layers", "diff_ids": [layer["digest"] for layer in kept]}
    config = blob(json.dumps({"architecture": "amd64", "os": "linux", "rootfs": root}).encode(), "config.v1+json")
    manifest = blob(json.dumps({"schemaVersion": 2, "config": config, "layers": kept}).encode(), "manifest.v1+json")
    manifest["annotations"] = {"org.opencontainers.image.ref.name": "image"}
    (directory / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [manifest]}))
    (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')


def unpack(place: Path, layers: Sequence[bytes]) -> Path:
    """Return the directory, below ``place``, into which umoci unpacks these layers one on the other."""
    layout(place / "layout", layers)
    (place / "unpacked").mkdir()
    rootless = [] if os.geteuid() == 0 else ["--rootless"]
    command = ["umoci", "raw", "unpack", *rootless, "--image", "layout:image", "unpacked/root"]
    subprocess.run(command, cwd=place, check=True, capture_output=True)
    return place / "unpacked/root"
