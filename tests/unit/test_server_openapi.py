"""The generated document is current and says how each route fails."""

from __future__ import annotations

import json
from pathlib import Path

from agent_sandbox.server.openapi import openapi_document
from tests.unit.server_harness import running, settings_for

SPEC = Path(__file__).parents[2] / "spec" / "openapi.json"


def test_the_document_is_current_and_always_the_same() -> None:
    document = openapi_document()
    assert document == openapi_document()
    assert SPEC.read_text() == document, "run: make openapi"


def test_every_route_says_how_it_fails_and_what_key_it_needs() -> None:
    paths = json.loads(openapi_document())["paths"]
    for path, operations in paths.items():
        for operation in operations.values():
            failures = {status: reply for status, reply in operation["responses"].items() if int(status) >= 400}
            assert "500" in failures
            for reply in failures.values():
                schema = reply["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorReply"}, (path, reply)
            if path.startswith("/v1"):
                assert {"401", "422"} <= set(failures)
                assert operation["security"] == [{"bearer": []}, {"apiKey": []}]


# The fixed block of api.md: method, path, status of success.
FIXED = [
    ("get", "/healthz", "200"),
    ("post", "/v1/sandboxes", "201"),
    ("get", "/v1/sandboxes", "200"),
    ("get", "/v1/sandboxes/{sandbox_id}", "200"),
    ("delete", "/v1/sandboxes/{sandbox_id}", "204"),
    ("post", "/v1/sandboxes/{sandbox_id}/timeout", "200"),
    ("post", "/v1/sandboxes/{sandbox_id}/exec", "200"),
    ("post", "/v1/sandboxes/{sandbox_id}/exec/stream", "200"),
    ("get", "/v1/sandboxes/{sandbox_id}/files", "200"),
    ("put", "/v1/sandboxes/{sandbox_id}/files", "200"),
    ("get", "/v1/sandboxes/{sandbox_id}/files/list", "200"),
    ("post", "/v1/sandboxes/{sandbox_id}/snapshots", "201"),
    ("post", "/v1/sandboxes/{sandbox_id}/rollback", "200"),
    ("get", "/v1/snapshots", "200"),
    ("get", "/v1/snapshots/{snapshot_id}", "200"),
    ("delete", "/v1/snapshots/{snapshot_id}", "204"),
    ("post", "/v1/snapshots/{snapshot_id}/fork", "201"),
]


def test_every_route_of_the_fixed_block_is_there() -> None:
    paths = json.loads(openapi_document())["paths"]
    for method, path, success in FIXED:
        assert min(paths[path][method]["responses"]) == success


def test_every_route_refuses_unknown_parameters_and_takes_its_own(tmp_path: Path) -> None:
    known = 0
    with running(settings_for(tmp_path)) as server:
        sandbox = server.create()
        for path, operations in json.loads(openapi_document())["paths"].items():
            if not path.startswith("/v1"):
                continue
            place = (
                path.replace("{sandbox_id}", sandbox)
                .replace("{exec_id}", "none")
                .replace("{snapshot_id}", "none")
                .replace("{later_id}", "none")
            )
            for method, operation in operations.items():
                reply = server.call(method.upper(), f"{place}?sandboxid=x&%20=1")
                assert (reply.status, reply.error["code"]) == (422, "validation_error"), (method, path)
                assert reply.error["message"] == "sandboxid: unknown parameter"
                fields = reply.error["details"]["fields"]
                assert fields == [{"field": "sandboxid", "problem": "unknown parameter"}]
                for parameter in operation.get("parameters", ()):
                    if parameter["in"] == "query":
                        known += 1
                        reply = server.call(method.upper(), f"{place}?{parameter['name']}=none")
                        assert "unknown parameter" not in reply.body.decode(errors="replace"), (path, parameter)
        assert [item["id"] for item in server.call("GET", "/v1/sandboxes").json["sandboxes"]] == [sandbox]
        assert server.call("GET", "/healthz?probe=1", key=False).status == 200, "whose probes add what they like"
    assert known >= 15


def test_requests_refuse_unknown_fields() -> None:
    schemas = json.loads(openapi_document())["components"]["schemas"]
    names = ("SandboxCreate", "TimeoutUpdate", "ExecRequest", "SnapshotCreate", "RollbackRequest", "ForkRequest")
    assert all(schemas[name]["additionalProperties"] is False for name in names)
    assert schemas["ExecRequest"]["required"] == ["command"]
    assert schemas["SandboxCreate"]["properties"]["network"]["default"] is False
    assert schemas["SandboxCreate"]["properties"]["read_only_rootfs"]["default"] is True
