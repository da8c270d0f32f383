"""The golden vectors of the stored format as Python values; ``spec/vectors/store/make_vectors.py`` writes them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from blake3 import blake3

from agent_sandbox.store.objects import Child, Commit, Entry, Extent, Type

FOLDER = Path(__file__).resolve().parents[3] / "spec" / "vectors" / "store"


def load(name: str) -> Any:
    """Return what a file of vectors holds."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def unhex(text: str) -> bytes:
    """Return bytes from hex with runs."""
    return bytes.fromhex(re.sub(r"\((..)\*(\d+)\)", lambda run: run[1] * int(run[2]), text))


def optional(text: str | None) -> bytes | None:
    return None if text is None else unhex(text)


def stream(seed: str, length: int, offset: int = 0) -> bytes:
    """Return bytes of the BLAKE3 output stream of a seed."""
    return blake3(seed.encode()).digest(length=length, seek=offset)


def described(parts: list[dict[str, Any]]) -> bytes:
    """Return the data that a vector describes."""
    return b"".join(stream(**part) if "seed" in part else bytes((part["byte"],)) * part["length"] for part in parts)


def entry_of(value: dict[str, Any]) -> Entry:
    return Entry(
        unhex(value["name"]),
        Type[value["type"].upper()],
        value["mode"],
        value["seconds"] * 1_000_000_000 + value["nanoseconds"],
        None if value["owner"] is None else (value["owner"][0], value["owner"][1]),
        optional(value["attrs"]),
        optional(value["link"]),
        value["size"],
        optional(value["content"]),
        value["paged"],
        unhex(value["target"]),
    )


def value_of(kind: str, value: dict[str, Any]) -> Any:
    """Return what the decoder of the kind must return for the vector's value."""
    match kind:
        case "attrs":
            return [(unhex(name), unhex(data)) for name, data in value["attributes"]]
        case "commit":
            return Commit(
                entry_of(value["root"]),
                tuple(unhex(id) for id in value["parents"]),
                optional(value["base"]),
                value["seconds"] * 1_000_000_000 + value["nanoseconds"],
                unhex(value["author"]).decode(),
                unhex(value["message"]).decode(),
            )
        case "page" if value["level"] == 0:
            return 0, [Extent(length, optional(id)) for length, id in value["extents"]]
        case "page":
            return value["level"], [Child(weight, unhex(id)) for weight, id in value["children"]]
        case "tree" if value["level"] == 0:
            return 0, [entry_of(entry) for entry in value["entries"]]
        case _:
            return value["level"], [Child(weight, unhex(id), unhex(last)) for weight, last, id in value["children"]]


def extents_of(made_by: dict[str, Any]) -> list[Extent]:
    """Return the extents that a vector of pages describes."""
    if "runs" in made_by:
        return [
            Extent(length, None if last is None else b"\x11" * 31 + bytes((last,)))
            for count, length, last in made_by["runs"]
            for _ in range(count)
        ]
    found = []
    data = stream(made_by["seed"], 36 * made_by["count"])
    every = made_by["hole_every"]
    for at in range(made_by["count"]):
        number = int.from_bytes(data[36 * at : 36 * at + 4], "little")
        if every and at % every == every - 1:
            found.append(Extent(4_096 * (1 + number % 1_000), None))
        else:
            found.append(Extent(1 + number % 32_768, data[36 * at + 4 : 36 * at + 36]))
    return found


def entries_of(made_by: dict[str, Any]) -> list[Entry]:
    """Return the entries that a vector of directories describes."""
    found = []
    content = stream(made_by["prefix"], 32 * made_by["count"])
    for number in range(made_by["count"]):
        name = f"{made_by['prefix']}{number:06d}".ljust(made_by["length"], "x").encode()
        if made_by["type"] == "file":
            id = content[32 * number : 32 * number + 32]
            size = 1 + number % 131_071
            found.append(Entry(name, Type.FILE, 0o644, number * 1_000_000_001, size=size, content=id))
        else:
            target = bytes((0x61 + number % 26,)) * made_by["target"]
            found.append(Entry(name, Type.SYMLINK, 0o777, 0, target=target))
    return found
