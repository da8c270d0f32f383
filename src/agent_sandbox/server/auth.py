"""Who may speak to the server: keys, names of this host, and the peer of a unix socket. Pure, but for one digest.

* A key comes as ``Authorization: Bearer KEY`` or ``X-API-Key: KEY``. Digests are compared, every one of them, so the
  time says neither which key was near nor how long it is.
* On a loopback address the ``Host`` header must name this machine: a web page whose name was re-pointed to 127.0.0.1
  (DNS rebinding) cannot change that header. A request that a page of another origin makes is refused where no key is
  asked for.
* Over the unix socket no key is asked for: :mod:`agent_sandbox.server.peer` admitted the process by its user.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Sequence

from agent_sandbox.config import MIN_KEY_LENGTH, Settings
from agent_sandbox.errors import ForbiddenError, InvalidRequestError, UnauthorizedError

Headers = Iterable[tuple[bytes, bytes]]


class Keys:
    """The set of keys that are let in."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(self, headers: Headers) -> str:
        """Give the digest of the key that one of the two headers holds; :class:`UnauthorizedError` for unknown ones."""
        given: bytes | None = None
        for name, value in headers:
            if name == b"x-api-key":
                given = value
            elif name == b"authorization":
                scheme, _, credentials = value.partition(b" ")
                if scheme.lower() == b"bearer":
                    given = credentials.strip()
                    break
        if given is None:
            raise UnauthorizedError("this route needs a key: send Authorization: Bearer KEY, or X-API-Key: KEY")
        digest = hashlib.sha256(given).digest()
        known = False
        for candidate in self._digests:
            known |= hmac.compare_digest(candidate, digest)
        if not known:
            raise UnauthorizedError("the key is not one of this server's")
        return digest.hex()


class Hosts:
    """The names by which a loopback server may be called; a server on another address takes any."""

    def __init__(self, host: str) -> None:
        self._any = not is_loopback(host)
        self._names = {b"localhost", b"127.0.0.1", b"[::1]", _bracketed(host).lower().encode()}

    def check(self, headers: Headers, *, same_origin: bool) -> None:
        """Raise :class:`ForbiddenError` for a foreign ``Host`` and, with ``same_origin``, for a foreign ``Origin``."""
        host = b""
        origin: bytes | None = None
        for name, value in headers:
            if name == b"host":
                host = value
                if not self._any and without_port(value).lower() not in self._names:
                    raise ForbiddenError("the Host header does not name this machine; call it localhost or 127.0.0.1")
            elif name == b"origin":
                origin = value
        if same_origin and origin is not None and origin.partition(b"://")[2] != host:
            raise ForbiddenError("requests from web pages of another origin are refused while no key is asked for")


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def without_port(host: bytes) -> bytes:
    """Cut ``:port`` from a ``Host`` header, minding the brackets of an IPv6 address."""
    if host.startswith(b"["):
        address, bracket, port = host.partition(b"]")
        return address + bracket if not port or (port[:1] == b":" and port[1:].isdigit()) else host
    name, colon, port = host.rpartition(b":")
    return name if colon and port.isdigit() else host


def require_keys(settings: Settings) -> None:
    """Raise :class:`InvalidRequestError`, which says how to make a key, when a TCP server would have none."""
    if not settings.api_keys and not settings.insecure_no_auth:
        raise InvalidRequestError(
            "no API key is set, and everyone who can reach the port could run code. Make one of at least "
            f'{MIN_KEY_LENGTH} characters: export AGENT_SANDBOX_API_KEYS="$(openssl rand -hex 24)"'
        )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
