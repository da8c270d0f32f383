"""Write the fixture store of the format that the code writes now: ``format-N/``, and what must be read from it.

Unlike the golden bytes this is made by the store itself, from directories that are built here. ``format-N.json`` says
what must be read from it, from what was built and not from what was read; only the ids of commits come from the store.
A folder that is there already is left alone: a format that was released keeps its fixture, and every later version of
the code must read it or refuse it before it writes anything. Run it in this folder with the project installed, where
the folder for temporary files (``TMPDIR``) has ``user.*`` attributes and holes.

Bytes in the JSON are hex. Of a file it gives the BLAKE3 of its content, and of a sparse one where its data is. A
state is that of an earlier commit (``like``) without the paths that were ``removed`` and with ``entries`` added or
replaced.
"""

import io
import json
import os
import pathlib
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from blake3 import blake3

from agent_sandbox.store import Created, Store
from agent_sandbox.store.directory import FORMAT

SECOND = 1_000_000_000
START = 1_700_000_000 * SECOND
STORE_ID = "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"


@dataclass(frozen=True)
class Node:
    """One path. ``data``: content of a file as (offset, bytes), what is between is a hole; ``same``: another name."""

    type: str = "file"
    mode: int = 0o644
    mtime: int = START
    data: tuple[tuple[int, bytes], ...] = ()
    size: int = 0
    target: bytes = b""
    attributes: dict[bytes, bytes] = field(default_factory=dict)
    same: bytes | None = None
    owner: tuple[int, int] | None = None


Tree = dict[bytes, Node]


def text(content: bytes, **rest: Any) -> Node:
    return Node(data=((0, content),) if content else (), size=len(content), **rest)


def directory(**rest: Any) -> Node:
    return Node("directory", **{"mode": 0o755} | rest)


LINES = b"".join(b"line %06d of a file that is kept in chunks\n" % number for number in range(5_000))
RUN = text(b"#!/bin/sh\nexec true\n", mode=0o4755, mtime=START + 5)
FIRST: Tree = {
    b"": directory(mtime=START + 1, attributes={b"user.root": b"yes"}),
    b"README.md": text(b"# A project\n", mtime=START + 123_456_789),
    b"a": directory(mode=0o2775),
    b"a/b": replace(RUN, same=b"a.b"),
    b"a.b": RUN,
    b"c": replace(RUN, same=b"a.b"),
    b"data": directory(mode=0o1777),
    b"data/large.txt": text(LINES),
    b"data/sparse": Node(data=((1 << 16, b"between 2 holes\n" * 4_096),), size=1 << 20),
    b"data/hole": Node(size=1 << 16),
    b"emptydir": directory(mode=0o700, mtime=0),
    b"emptyfile": text(b"", mode=0o400),
    b"fifo": Node("fifo", mode=0o622),
    b"link": Node("symlink", mode=0o777, target=b"../else where/\xff"),
    b"many": directory(),
    **{b"many/%04d" % number: text(b"", mtime=START + number) for number in range(150)},
    b"marked": text(b"x", attributes={b"user.a": b"", b"user.b": b"\x00\xff", b"user.mime_type": b"text/plain"}),
    b"n\xff\x01me": text(b"a name that is no text\n", mtime=-2 * SECOND + 500_000_000),
}
LARGE = LINES[:110_000] + b"0123456789" + LINES[110_010:]
SECOND_STATE: Tree = {path: node for path, node in FIRST.items() if path not in (b"fifo", b"c")} | {
    b"data/large.txt": text(LARGE, mtime=START + 60),
    b"many/0100x": text(b"new\n"),
    b"README.md": text(b"# A project\n", mode=0o600, mtime=START + 123_456_789),
}
THIRD: Tree = {path: node for path, node in SECOND_STATE.items() if path != b"link"} | {
    b"data/large.txt": text(b"0123456789" + LARGE, mtime=START + 120),
    b"link": directory(mtime=START + 120),
    b"link/file": text(b"where a symlink was\n", mtime=START + 120),
}
OTHER: Tree = FIRST | {b"try": directory(), b"try/this": text(b"on another branch\n"), b"marked": text(b"y")}
MERGED: Tree = THIRD | {path: OTHER[path] for path in (b"try", b"try/this", b"marked")}
OWNED: Tree = {
    b"": directory(mtime=START, owner=(1_000, 100)),
    b"mine": text(b"mine\n", owner=(1_000, 100)),
    b"yours": text(b"yours\n", owner=(4_294_967_294, 0)),
}


# ---- building ------------------------------------------------------------------------------------------------------


@contextmanager
def built(tree: Tree) -> Iterator[pathlib.Path]:
    """A directory that looks like the tree."""
    with tempfile.TemporaryDirectory() as scratch:
        root = pathlib.Path(scratch) / "root"
        paths = sorted(tree, key=lambda path: (tree[path].same is not None, path.count(b"/"), path))
        for path in paths:
            make(root, path, tree[path])
        for path in reversed(paths):
            if tree[path].type == "directory":
                finish(root / os.fsdecode(path), tree[path])
        yield root


def make(root: pathlib.Path, path: bytes, node: Node) -> None:
    at = root / os.fsdecode(path)
    match node.type:
        case "directory":
            at.mkdir()
            return
        case "symlink":
            at.symlink_to(os.fsdecode(node.target))
            os.utime(at, ns=(node.mtime, node.mtime), follow_symlinks=False)
            return
        case "fifo":
            os.mkfifo(at)
        case _ if node.same is not None:
            at.hardlink_to(root / os.fsdecode(node.same))
        case _:
            with at.open("wb") as file:
                file.truncate(node.size)
                for offset, data in node.data:
                    file.seek(offset)
                    file.write(data)
    finish(at, node)


def finish(at: pathlib.Path, node: Node) -> None:
    for name, value in node.attributes.items():
        os.setxattr(at, name, value)
    at.chmod(node.mode)
    os.utime(at, ns=(node.mtime, node.mtime))


def archived(tree: Tree) -> io.BytesIO:
    """The same as an archive, with owners."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, node in sorted(tree.items()):
            member = tarfile.TarInfo(os.fsdecode(path) or "./")
            member.type = tarfile.DIRTYPE if node.type == "directory" else tarfile.REGTYPE
            member.mode, member.size, member.mtime = node.mode, node.size, node.mtime // SECOND
            assert node.owner is not None
            member.uid, member.gid = node.owner
            archive.addfile(member, io.BytesIO(node.data[0][1] if node.data else b""))
    file.seek(0)
    return file


# ---- describing ----------------------------------------------------------------------------------------------------


def described(tree: Tree) -> dict[str, dict[str, Any]]:
    names = [node.same for node in tree.values() if node.same is not None]
    found = {}
    for path, node in sorted(tree.items()):
        entry: dict[str, Any] = {"path": path.hex(), "type": node.type, "mode": node.mode}
        entry |= {"seconds": node.mtime // SECOND, "nanoseconds": node.mtime % SECOND}
        if node.type == "file":
            content = bytearray(node.size)
            for offset, data in node.data:
                content[offset : offset + len(data)] = data
            entry |= {"size": node.size, "blake3": blake3(content).hexdigest()}
            if sum(len(data) for _, data in node.data) != node.size:
                entry["data"] = [[offset, len(data)] for offset, data in node.data]
        if node.target:
            entry["target"] = node.target.hex()
        if node.attributes:
            entry["attributes"] = [[name.hex(), value.hex()] for name, value in sorted(node.attributes.items())]
        if node.same is not None or path in names:
            entry["first"] = (node.same or path).hex()
        if node.owner is not None:
            entry["owner"] = list(node.owner)
        found[path.hex()] = entry
    return found


def difference(like: str | None, old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    return {
        "like": like,
        "removed": [path for path in old if path not in new],
        "entries": [entry for path, entry in new.items() if entry != old.get(path)],
    }


def fill(store: Store, clock: list[int]) -> dict[str, Any]:
    """Do everything that leaves a trace, and say what must be read afterwards."""
    commits: list[dict[str, Any]] = []
    states: dict[bytes, dict[str, Any]] = {}

    def note(id: bytes, tree: Tree, parents: list[bytes], base: bytes | None, author: str, message: str) -> bytes:
        like = parents[0] if parents and parents[0] in states else None
        states[id] = described(tree)
        commits.append(
            {"id": id.hex(), "parents": [parent.hex() for parent in parents], "base": base.hex() if base else None}
            | {"author": author, "message": message, "seconds": clock[0] // SECOND, "nanoseconds": clock[0] % SECOND}
            | difference(like.hex() if like else None, states[like] if like else {}, states[id])
        )
        return id

    def made(outcome: object) -> bytes:
        assert isinstance(outcome, Created), outcome
        return outcome.commit

    def step(ref: str, tree: Tree, head: bytes, base: bytes, author: str, message: str) -> bytes:
        clock[0] += 60 * SECOND + 1
        with built(tree) as place:
            commit = made(store.commit(ref, place, author=author, message=message, expected=head))
        return note(commit, tree, [head], base, author, message)

    with built(FIRST) as place:
        zero = made(store.init("web", place, author="Zoë", message="the first state\n"))
    note(zero, FIRST, [], None, "Zoë", "the first state\n")
    one = step("web", SECOND_STATE, zero, zero, "", "")
    store.tag("web", "v1")
    two = step("web", THIRD, one, zero, "Zoë", "m" * 2_000)
    store.fork("web@0", "web:try")
    other = step("web:try", OTHER, zero, zero, "someone else", "another way\n")
    clock[0] += 60 * SECOND + 1
    merged = note(
        made(store.merge("web", "web:try", author="Zoë", message="both")), MERGED, [two, other], zero, "Zoë", "both"
    )
    store.add("web")
    store.pin("kept", "web:try")
    store.delete("web:try")
    store.init("empty")
    clock[0] += 60 * SECOND + 1
    empty = store.init("owned", owners=True)
    owned = made(store.import_tar("owned", archived(OWNED), message="with owners"))
    note(owned, OWNED, [empty.commit], empty.commit, "", "with owners")
    return {
        "format": FORMAT,
        "store": STORE_ID,
        "projects": [
            {"name": "empty", "owners": False, "layers": 1, "refs": ["main"]},
            {"name": "owned", "owners": True, "layers": 1, "refs": ["main"]},
            {"name": "web", "owners": False, "layers": 2, "refs": ["main", "v1"]},
        ],
        "heads": {
            "owned": owned.hex(), "web": merged.hex(), "web:main": merged.hex(), "web:v1": one.hex(),
            "web@0": zero.hex(), "web@1": merged.hex(), other.hex()[:12]: other.hex(),
        },
        "pins": {"kept": other.hex()},
        "logs": {"web": [id.hex() for id in (merged, other, two, one, zero)]},
        "commits": commits,
    }  # fmt: skip


# ---- writing -------------------------------------------------------------------------------------------------------


def main() -> int:
    here = pathlib.Path(__file__).parent
    place = here / f"format-{FORMAT}"
    if place.exists():
        print(f"{place} is there already, and stays as it is")
        return 1
    clock = [START]

    def now() -> int:
        return clock[0]

    with (
        mock.patch.object(time, "time_ns", now),
        mock.patch.object(os, "geteuid", return_value=0),
        mock.patch.object(os, "getegid", return_value=0),
        mock.patch("agent_sandbox.store.directory.secrets.token_hex", return_value=STORE_ID),
        tempfile.TemporaryDirectory() as scratch,
    ):
        new = pathlib.Path(scratch) / "store"
        with Store.create(new) as store:
            description = fill(store, clock)
        shutil.rmtree(new / "cache")
        shutil.copytree(new, place)
    (here / f"format-{FORMAT}.json").write_text(json.dumps(description, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
