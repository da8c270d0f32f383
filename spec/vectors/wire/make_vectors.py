"""Write the golden bytes of the wire from first principles: struct, hmac and MessagePack by hand.

It uses nothing of the project, so that an error in an implementation cannot hide in its own vectors. Run it in this
folder; it rewrites ``frames.json``, ``hello.json``, ``reject.json`` and ``channel.json``, which are committed.
"""

import hashlib
import hmac
import json
import pathlib
import struct
from typing import Any

KIND = {
    "HELLO": 1, "OPEN": 2, "DATA": 3, "EOF": 4, "CREDIT": 5,
    "END": 6, "RESET": 7, "PING": 8, "PONG": 9, "GOAWAY": 10,
}  # fmt: skip


def frame(kind: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">IBI", len(payload), kind, stream) + payload


def pack(value: Any) -> bytes:
    """MessagePack, the parts used here, in their shortest form."""
    if value is None:
        return b"\xc0"
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        if 0 <= value < 128:
            return bytes([value])
        for limit, head, form in (
            (1 << 8, 0xCC, ">B"),
            (1 << 16, 0xCD, ">H"),
            (1 << 32, 0xCE, ">I"),
            (1 << 64, 0xCF, ">Q"),
        ):
            if 0 <= value < limit:
                return bytes([head]) + struct.pack(form, value)
    if isinstance(value, bytes):
        head = b"\xc4" + bytes([len(value)]) if len(value) < 256 else b"\xc5" + struct.pack(">H", len(value))
        return head + value
    if isinstance(value, str):
        raw = value.encode()
        return (bytes([0xA0 | len(raw)]) if len(raw) < 32 else b"\xd9" + bytes([len(raw)])) + raw
    if isinstance(value, list):
        return bytes([0x90 | len(value)]) + b"".join(map(pack, value))
    if isinstance(value, dict):
        return bytes([0x80 | len(value)]) + b"".join(pack(k) + pack(v) for k, v in value.items())
    raise TypeError(value)


EXEC = {
    "op": "exec.start",
    "args": {
        "argv": [b"/bin/sh", b"-c", b"printf '\xff'"],
        "env": [[b"PATH", b"/usr/bin:/bin"], [b"HOME", b"/workspace"]],
        "cwd": b"/workspace",
        "timeout_ms": 60000,
    },
}
EXIT = {"code": 3, "timed_out": False, "user_us": 1200, "system_us": 800, "max_rss_kb": 3400, "wall_us": 2100}
ENTRY = {
    "name": b"a\xffb",
    "path": b"/workspace/a\xffb",
    "type": "file",
    "size": 5,
    "mode": 0o644,
    "mtime_ns": 1700000000123456789,
}

STATUS = {
    "id": "build-1",
    "tag": "ci",
    "argv": [b"make", b"-j\xff"],
    "pid": 4194304,
    "started_ms": 1700000000123,
    "running": False,
    "tty": True,
    "cursor": 9007199254740993,
    "first": 9007199253692417,
    "exit": EXIT,
}
CHANGES = [
    {"kind": "created", "path": b"/workspace/new\xff", "directory": True},
    {"kind": "moved", "path": b"/workspace/a", "to": b"/workspace/b", "directory": False},
    {"overflow": True},
]

FRAMES = [
    ("hello with unknown field", "HELLO", 0, pack({"generation": 1, "nonce": bytes(range(32)), "later": [1]})),
    ("open exec", "OPEN", 1, pack(EXEC)),
    ("open with args to follow", "OPEN", 3, pack({"op": "exec.start", "args_len": 1048576})),
    ("open list", "OPEN", 5, pack({"op": "fs.list", "args": {"path": b"/workspace"}})),
    ("open read", "OPEN", 7, pack({"op": "fs.read", "args": {"path": b"/workspace/x", "max_bytes": 52428800}})),
    ("open write", "OPEN", 9, pack({"op": "fs.write", "args": {"path": b"/workspace/\xff", "mode": 0o755}})),
    ("open info", "OPEN", 4294967295, pack({"op": "sys.info", "args": {}})),
    ("stdout with bytes that are not UTF-8", "DATA", 1, b"\x01\xff\x00\r\n"),
    ("stderr", "DATA", 1, b"\x02oops"),
    ("largest data", "DATA", 1, b"\x01" + b"x" * 65535),
    ("upload", "DATA", 9, b"\x00#!/bin/sh\n"),
    ("end of upload", "EOF", 9, b"\x00"),
    ("credit", "CREDIT", 1, struct.pack(">I", 131072)),
    ("exit", "END", 1, pack(EXIT)),
    ("killed", "END", 1, pack({"signal": 9, "timed_out": True, "user_us": 0, "system_us": 0, "max_rss_kb": 0, "wall_us": 2000000})),
    ("not found program", "END", 1, pack({"code": 127, "message": "nope: not found", "timed_out": False, "user_us": 0, "system_us": 0, "max_rss_kb": 0, "wall_us": 900})),
    ("error", "END", 7, pack({"error": {"code": "not_found", "message": "/workspace/x: no such file"}})),
    ("entry", "END", 9, pack({"entry": ENTRY})),
    ("reset", "RESET", 1, pack({"reason": "the client went away"})),
    ("ping", "PING", 0, b"12345678"),
    ("pong", "PONG", 0, b"12345678"),
    ("go away", "GOAWAY", 0, pack({"code": "shutdown", "message": "the sandbox ends"})),
    ("open exec as an object", "OPEN", 11, pack({"op": "exec.start", "args": EXEC["args"] | {"id": "build-1", "tag": "ci", "stdin": True, "tty": {"rows": 24, "cols": 80}, "detach": True}})),
    ("detached", "END", 11, pack({"id": "build-1", "pid": 4194304})),
    ("open attach", "OPEN", 13, pack({"op": "exec.attach", "args": {"id": "build-1", "cursor": 1048576, "follow": False}})),
    ("note of a gap", "DATA", 13, b"\x04" + pack({"gap": 4294967296})),
    ("end of an attachment, still running", "END", 13, pack({"cursor": 5368709120})),
    ("end of an attachment, ended", "END", 13, pack({"exit": EXIT, "cursor": 5368709120})),
    ("open freeze", "OPEN", 15, pack({"op": "sys.freeze", "args": {}})),
    ("open thaw", "OPEN", 17, pack({"op": "sys.thaw", "args": {"clock_ns": 1700000000123456789}})),
    ("note of a start", "DATA", 1, b"\x04" + pack({"started": True, "pid": 17})),
    ("open list of commands", "OPEN", 15, pack({"op": "exec.list", "args": {}})),
    ("commands", "DATA", 15, b"\x01" + pack([STATUS, {"id": "0", "argv": [b"sh"], "pid": 7, "started_ms": 0, "running": True, "tty": False, "cursor": 0, "first": 0}])),
    ("open stdin", "OPEN", 17, pack({"op": "exec.stdin", "args": {"id": "build-1"}})),
    ("input taken", "END", 17, pack({"taken": 300000})),
    ("open close", "OPEN", 19, pack({"op": "exec.close", "args": {"id": "build-1"}})),
    ("nothing to say", "END", 19, pack({})),
    ("open signal", "OPEN", 21, pack({"op": "exec.signal", "args": {"id": "build-1", "signal": 15}})),
    ("signalled", "END", 21, pack({"processes": 3})),
    ("open resize", "OPEN", 23, pack({"op": "exec.resize", "args": {"id": "build-1", "rows": 50, "cols": 65535}})),
    ("open forget", "OPEN", 25, pack({"op": "exec.forget", "args": {"id": "build-1"}})),
    ("open stat", "OPEN", 27, pack({"op": "fs.stat", "args": {"path": b"/workspace/x", "follow": False}})),
    ("open range", "OPEN", 29, pack({"op": "fs.read", "args": {"path": b"/workspace/x", "offset": 4294967296, "length": 10}})),
    ("bytes sent", "END", 29, pack({"size": 10})),
    ("open mkdir", "OPEN", 31, pack({"op": "fs.mkdir", "args": {"path": b"/workspace/\xff/d", "mode": 0o755, "parents": True}})),
    ("open move", "OPEN", 33, pack({"op": "fs.move", "args": {"from": b"/workspace/a", "to": b"/workspace/b", "replace": False}})),
    ("conflict", "END", 33, pack({"error": {"code": "conflict", "message": "/workspace/b: File exists"}})),
    ("open remove", "OPEN", 35, pack({"op": "fs.remove", "args": {"path": b"/workspace/a", "recursive": True}})),
    ("removed", "END", 35, pack({"removed": 70000})),
    ("open chmod", "OPEN", 37, pack({"op": "fs.chmod", "args": {"path": b"/workspace/a", "mode": 0o7777}})),
    ("open watch", "OPEN", 39, pack({"op": "fs.watch", "args": {"path": b"/workspace", "recursive": True}})),
    ("note of a watch", "DATA", 39, b"\x04" + pack({"ready": True})),
    ("changes", "DATA", 39, b"\x01" + pack(CHANGES)),
    ("open export of a directory", "OPEN", 41, pack({"op": "tar.export", "args": {"max_bytes": 1073741824, "path": b"/workspace/d"}})),
    ("exported", "END", 41, pack({"entries": 3, "file_bytes": 12, "skipped": [[b"sock\xff", "a socket"]], "skipped_total": 1})),
    ("open import to a directory", "OPEN", 43, pack({"op": "tar.import", "args": {"max_bytes": 1073741824, "path": b"/workspace/d"}})),
    ("imported", "END", 43, pack({"entries": 3, "file_bytes": 12})),
    ("open dial of a port", "OPEN", 45, pack({"op": "net.dial", "args": {"port": 65535}})),
    ("open dial of a socket", "OPEN", 47, pack({"op": "net.dial", "args": {"path": b"/workspace/s"}})),
    ("note of a connection", "DATA", 45, b"\x04" + pack({"connected": True})),
    ("end of the server's half", "EOF", 45, b"\x01"),
    ("both directions are over", "END", 45, pack({"sent": 7, "received": 9})),
    ("open stats", "OPEN", 49, pack({"op": "sys.stats", "args": {}})),
    ("stats", "END", 49, pack({"processes": 3, "execs": 2, "memory_bytes": 6291456, "ring_bytes": 1048576})),
    ("open sync", "OPEN", 51, pack({"op": "sys.sync", "args": {}})),
    ("open prepare-checkpoint", "OPEN", 57, pack({"op": "sys.prepare-checkpoint", "args": {}})),
    ("go away for a checkpoint", "GOAWAY", 0, pack({"code": "checkpoint", "message": "the daemon closes its sockets"})),
    ("open shutdown", "OPEN", 53, pack({"op": "sys.shutdown", "args": {}})),
    ("open status", "OPEN", 55, pack({"op": "exec.status", "args": {"id": "build-1"}})),
    ("status", "END", 55, pack({"exec": STATUS})),
    ("killed for want of memory", "END", 11, pack({"signal": 9, "timed_out": False, "oom_killed": True, "user_us": 0, "system_us": 0, "max_rss_kb": 65536, "wall_us": 2000000})),
]  # fmt: skip

OPEN_1 = frame(2, 1, pack({"op": "fs.list", "args": {"path": b"/"}}))
REJECT = [
    ("a length above the cap, as soon as four bytes are there", "daemon", False, struct.pack(">I", 65537)),
    ("a hello above 1,024 bytes", "daemon", False, struct.pack(">IBI", 1025, 1, 0)),
    ("unknown kind 0", "daemon", True, frame(0, 0, b"")),
    ("unknown kind 11", "client", True, frame(11, 0, b"")),
    ("an operation before the hello", "daemon", False, OPEN_1),
    ("a ping before the hello", "daemon", False, frame(8, 0, b"12345678")),
    ("a hello without nonce", "daemon", False, frame(1, 0, pack({"generation": 1}))),
    ("a hello with a short nonce", "daemon", False, frame(1, 0, pack({"generation": 1, "nonce": b"x" * 31}))),
    ("a hello of generation 0", "daemon", False, frame(1, 0, pack({"generation": 0, "nonce": b"x" * 32}))),
    ("a hello of a generation far ahead", "daemon", False, frame(1, 0, pack({"generation": 3, "nonce": b"x" * 32}))),
    ("a hello that is no map", "daemon", False, frame(1, 0, b"\x93\x01\x02\x03")),
    ("a hello with bytes behind the map", "daemon", False, frame(1, 0, pack({"generation": 1, "nonce": b"x" * 32}) + b"\x00")),
    ("a hello on a stream", "daemon", False, frame(1, 1, pack({"generation": 1, "nonce": b"x" * 32}))),
    ("a second hello", "daemon", True, frame(1, 0, pack({"generation": 1, "nonce": b"x" * 32}))),
    ("ping with 7 bytes", "daemon", True, frame(8, 0, b"1234567")),
    ("ping on a stream", "daemon", True, frame(8, 1, b"12345678")),
    ("an even stream from the client", "daemon", True, frame(2, 2, pack({"op": "sys.info", "args": {}}))),
    ("stream 0", "daemon", True, frame(2, 0, pack({"op": "sys.info", "args": {}}))),
    ("an odd stream from the daemon", "client", True, frame(2, 3, pack({"op": "sys.info", "args": {}}))),
    ("the same stream twice", "daemon", True, OPEN_1 + OPEN_1),
    ("open without args", "daemon", True, frame(2, 1, pack({"op": "sys.info"}))),
    ("open whose args are no map", "daemon", True, frame(2, 1, pack({"op": "sys.info", "args": 3}))),
    ("open whose op is no text", "daemon", True, frame(2, 1, pack({"op": 3, "args": {}}))),
    ("open with a truncated map", "daemon", True, frame(2, 1, pack({"op": "sys.info", "args": {}})[:-1])),
    ("arguments above 4 MiB", "daemon", True, frame(2, 1, pack({"op": "exec.start", "args_len": 4194305}))),
    ("more arguments than announced", "daemon", True, frame(2, 1, pack({"op": "exec.start", "args_len": 2})) + frame(3, 1, b"\x03abc")),
    ("data before the arguments are whole", "daemon", True, frame(2, 1, pack({"op": "fs.write", "args_len": 20})) + frame(3, 1, b"\x00abc")),
    ("arguments that are no map", "daemon", True, frame(2, 1, pack({"op": "exec.start", "args_len": 1})) + frame(3, 1, b"\x03\x01")),
    ("data for a stream never opened", "daemon", True, frame(3, 1, b"\x00abc")),
    ("data without a byte", "client", True, frame(3, 1, b"\x01")),
    ("data on the wrong channel", "client", True, frame(3, 1, b"\x00abc")),
    ("data on channel 5", "client", True, frame(3, 1, b"\x05abc")),
    ("a note towards the daemon", "daemon", True, OPEN_1 + frame(3, 1, b"\x04\x80")),
    ("the end of notes towards the daemon", "daemon", True, OPEN_1 + frame(4, 1, b"\x04")),
    ("a note without a byte", "client", True, frame(3, 1, b"\x04")),
    ("a note after the end of notes", "client", True, frame(4, 1, b"\x04") + frame(3, 1, b"\x04\x80")),
    ("notes beyond the credit", "client", True, frame(3, 1, b"\x04" + b"x" * 65535) * 4 + frame(3, 1, b"\x04x")),
    ("standard output towards the daemon", "daemon", True, OPEN_1 + frame(3, 1, b"\x01abc")),
    ("data beyond the credit", "client", True, frame(3, 1, b"\x01" + b"x" * 65535) * 4 + frame(3, 1, b"\x01x")),
    ("data after end of file", "client", True, frame(4, 1, b"\x01") + frame(3, 1, b"\x01abc")),
    ("end of file twice", "client", True, frame(4, 1, b"\x01") * 2),
    ("end of file without a channel", "client", True, frame(4, 1, b"")),
    ("credit of nothing", "client", True, frame(5, 1, b"\0\0\0\0")),
    ("credit with 3 bytes", "client", True, frame(5, 1, b"\0\0\1")),
    ("credit above the maximum", "client", True, frame(5, 1, b"\x7f\xff\xff\xff")),
    ("end from the client", "daemon", True, OPEN_1 + frame(6, 1, pack({}))),
    ("end of a stream never opened", "client", True, frame(6, 3, pack({}))),
    ("end that is no map", "client", True, frame(6, 1, pack([1]))),
    ("end with keys that are not text", "client", True, frame(6, 1, b"\x81\x01\x02")),
]  # fmt: skip


MAGIC = b"\xf5sandboxd-begin\n"
CHANNEL = [
    ("nothing of the magic", b"\x22" * 16, b"hello", b"hello"),
    ("the whole magic", b"\x22" * 16, b"<" + MAGIC + b">", b"<" + MAGIC[:15] + b"\0\n>"),
    ("the first 15 bytes alone", b"\x22" * 16, MAGIC[:15], MAGIC[:15] + b"\0"),
    ("the first 15 bytes and another", b"\x22" * 16, MAGIC[:15] + b"\0", MAGIC[:15] + b"\0\0"),
    ("the first 14 bytes", b"\x22" * 16, MAGIC[:14] + b"!" + MAGIC[:14], MAGIC[:14] + b"!" + MAGIC[:14]),
    ("twice without a gap", b"\x22" * 16, MAGIC + MAGIC, MAGIC[:15] + b"\0\n" + MAGIC[:15] + b"\0\n"),
    ("a beginning in its own midst", b"\x22" * 16, MAGIC[:5] + MAGIC, MAGIC[:5] + MAGIC[:15] + b"\0\n"),
    ("a nonce like the magic", MAGIC, b"x", b"x"),
    ("a nonce whose end is the magic's", b"\x22" + MAGIC[:15], b"\nx", b"\nx"),
    ("a magic that the nonce begins", b"\x22" * 8 + MAGIC[:8], MAGIC[8:], MAGIC[8:15] + b"\0\n"),
]  # fmt: skip


def begin(nonce: bytes) -> bytes:
    """A nonce has room for one completion of the first 15 bytes at most."""
    return MAGIC + nonce.replace(MAGIC[:15], MAGIC[:15] + b"\0")


def main() -> None:
    here = pathlib.Path(__file__).parent
    frames = [
        {"name": name, "kind": KIND[kind], "stream": stream, "payload_hex": payload.hex(),
         "frame_hex": frame(KIND[kind], stream, payload).hex()}
        for name, kind, stream, payload in FRAMES
    ]  # fmt: skip
    key, nonce_client, nonce_daemon = bytes(range(32)), b"C" * 32, b"D" * 32
    said = struct.pack(">I", 1) + nonce_client + nonce_daemon
    proofs = {role: hmac.new(key, role.encode() + said, hashlib.sha256).digest() for role in ("client", "daemon")}
    hello = {
        "key_hex": key.hex(),
        "generation": 1,
        "nonce_client_hex": nonce_client.hex(),
        "nonce_daemon_hex": nonce_daemon.hex(),
        "proof_client_hex": proofs["client"].hex(),
        "proof_daemon_hex": proofs["daemon"].hex(),
        "client_hello1_hex": frame(1, 0, pack({"generation": 1, "nonce": nonce_client})).hex(),
        "daemon_hello_hex": frame(
            1, 0, pack({"generation": 1, "nonce": nonce_daemon, "proof": proofs["daemon"]})
        ).hex(),
        "client_hello2_hex": frame(1, 0, pack({"proof": proofs["client"]})).hex(),
        "clock_ns": 1700000000123456789,
        "client_hello2_with_clock_hex": frame(
            1, 0, pack({"proof": proofs["client"], "clock_ns": 1700000000123456789})
        ).hex(),
    }
    reject = [
        {"name": name, "role": role, "after_hello": after, "hex": data.hex(), "why": name}
        for name, role, after, data in REJECT
    ]
    channel = [
        {"name": name, "nonce_hex": nonce.hex(), "begin_hex": begin(nonce).hex(), "echo_hex": (MAGIC + nonce).hex(),
         "bytes_hex": data.hex(), "sent_hex": sent.hex()}
        for name, nonce, data, sent in CHANNEL
    ]  # fmt: skip
    files: dict[str, Any] = {"frames": {"frames": frames}, "hello": hello, "reject": {"reject": reject}}
    files["channel"] = {"magic_hex": MAGIC.hex(), "channel": channel}
    for name, value in files.items():
        (here / f"{name}.json").write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    main()
