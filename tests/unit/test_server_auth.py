"""Keys, names of the host, and what is asked for before anything else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.config import Settings
from agent_sandbox.errors import ForbiddenError, InvalidRequestError, UnauthorizedError
from agent_sandbox.server.auth import Hosts, Keys, is_loopback, require_keys, without_port
from agent_sandbox.server.gate import is_keyed
from tests.unit.server_harness import KEY, Running, running, settings_for


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(settings_for(tmp_path_factory.mktemp("server"), api_keys=("other-key-0123456789", KEY))) as it:
        yield it


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer key-0123456789abcd")],
        [(b"authorization", b"bearer  key-0123456789abcd ")],
        [(b"x-api-key", b"key-0123456789abcd")],
        [(b"authorization", b"Basic Zm9v"), (b"x-api-key", b"key-0123456789abcd")],
    ],
)
def test_a_known_key_is_let_in(headers: list[tuple[bytes, bytes]]) -> None:
    Keys(["another-0123456789", "key-0123456789abcd"]).check(headers)


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"key-0123456789abcd")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Bearer key-0123456789abc")],
        [(b"authorization", b"Bearer key-0123456789abcd,")],
        [(b"x-api-key", b"KEY-0123456789ABCD")],
        [(b"x-api-key", b"\xff\xfe")],
    ],
)
def test_anything_else_is_not(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(UnauthorizedError):
        Keys(["key-0123456789abcd"]).check(headers)


def test_no_keys_let_nobody_in() -> None:
    with pytest.raises(UnauthorizedError):
        Keys([]).check([(b"x-api-key", b"")])


@pytest.mark.parametrize(
    ("host", "name"),
    [
        (b"localhost", b"localhost"),
        (b"localhost:8080", b"localhost"),
        (b"127.0.0.1:1", b"127.0.0.1"),
        (b"[::1]:8080", b"[::1]"),
        (b"[::1]", b"[::1]"),
        (b"[::1]evil:80", b"[::1]evil:80"),
        (b"a:b", b"a:b"),
    ],
)
def test_ports_are_cut_from_host_headers(host: bytes, name: bytes) -> None:
    assert without_port(host) == name


@pytest.mark.parametrize("host", [b"evil.example", b"localhost.evil.example", b"127.0.0.1.evil:80", b"", b"[::2]"])
def test_a_loopback_server_is_not_called_by_another_name(host: bytes) -> None:
    with pytest.raises(ForbiddenError):
        Hosts("127.0.0.1").check([(b"host", host)], same_origin=False)


def test_other_servers_take_any_name() -> None:
    Hosts("0.0.0.0").check([(b"host", b"sandbox.example")], same_origin=False)
    Hosts("127.0.0.2").check([(b"host", b"127.0.0.2:80")], same_origin=False)


def test_pages_of_other_origins_are_refused_without_keys() -> None:
    hosts = Hosts("127.0.0.1")
    own = [(b"host", b"localhost:8080"), (b"origin", b"http://localhost:8080")]
    hosts.check(own, same_origin=True)
    for origin in (b"http://evil.example", b"null", b"http://localhost:9999"):
        with pytest.raises(ForbiddenError):
            hosts.check([(b"host", b"localhost:8080"), (b"origin", origin)], same_origin=True)
        hosts.check([(b"host", b"localhost:8080"), (b"origin", origin)], same_origin=False)


def test_loopback_addresses() -> None:
    assert all(is_loopback(host) for host in ("localhost", "127.0.0.1", "127.9.9.9", "::1"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "192.168.0.1", "example.org"))


def test_a_server_without_keys_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="AGENT_SANDBOX_API_KEYS="):
        require_keys(Settings(data_dir=tmp_path))
    require_keys(Settings(data_dir=tmp_path, insecure_no_auth=True))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/sandboxes"),
        ("GET", "/v1"),
        ("GET", "/v1/nothing/here"),
        ("PATCH", "/v1/sandboxes"),
        ("POST", "/v1/sandboxes"),
        ("GET", "/%76%31/sandboxes"),
        ("OPTIONS", "/v1/sandboxes"),
        ("HEAD", "/v1/sandboxes"),
    ],
)
def test_the_key_is_asked_for_first(server: Running, method: str, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong-key-0123456789"}):
        reply = server.call(method, path, b"not json" if method == "POST" else None, key=False, **headers)
        assert reply.status == 401
        assert reply.headers["www-authenticate"] == "Bearer"
        if method != "HEAD":
            assert reply.error["code"] == "unauthorized"


def test_both_headers_and_every_key_work(server: Running) -> None:
    for headers in ({"X-API-Key": KEY}, {"Authorization": f"Bearer {KEY}"}, {"x-api-key": "other-key-0123456789"}):
        assert server.call("GET", "/v1/sandboxes", key=False, **headers).json == {"sandboxes": []}


def test_open_routes_are_few(server: Running) -> None:
    routes = set(server.call("GET", "/openapi.json", key=False).json["paths"])
    assert {path for path in routes if not is_keyed(path)} == {"/healthz"}
    assert server.call("GET", "/docs", key=False).status == 200


def test_the_host_header_is_checked_on_every_route(server: Running) -> None:
    for path in ("/healthz", "/v1/sandboxes", "/docs"):
        reply = server.call("GET", path, Host="rebound.example")
        assert (reply.status, reply.error["code"]) == (403, "forbidden")
    assert server.call("GET", "/healthz", Host="localhost:1").status == 200


def test_no_auth_needs_no_key_but_the_origin(tmp_path: Path) -> None:
    with running(settings_for(tmp_path, api_keys=(), insecure_no_auth=True)) as server:
        assert server.call("GET", "/v1/sandboxes", key=False).status == 200
        assert server.call("POST", "/v1/sandboxes", {}, key=False, Origin="http://evil.example").status == 403


def test_unknown_routes_and_methods_have_the_shape(server: Running) -> None:
    reply = server.call("GET", "/v1/nothing")
    assert (reply.status, reply.error["code"]) == (404, "not_found")
    assert reply.error["message"] == "there is no route GET /v1/nothing; see /docs"
    assert server.call("GET", "/nothing", key=False).error["code"] == "not_found"
    assert server.call("GET", "/v1/sandboxes/").status == 404
    reply = server.call("PATCH", "/v1/snapshots")
    assert (reply.status, reply.error["code"], reply.headers["allow"]) == (405, "method_not_allowed", "GET")
    assert reply.error["message"] == "/v1/snapshots takes no PATCH"
    assert server.call("HEAD", "/healthz").status == 405
    assert server.call("OPTIONS", "/v1/snapshots").status == 405
