"""The error table and the one shape."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from agent_sandbox import errors
from agent_sandbox.server import errors as table

# api.md, "Codes"
CODES = {
    "invalid_request": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "conflict": 409,
    "payload_too_large": 413,
    "validation_error": 422,
    "limit_exceeded": 429,
    "unsupported": 501,
    "backend_error": 502,
    "store_error": 500,
    "store_damaged": 500,
    "store_version": 500,
    "store_busy": 503,
    "store_full": 507,
}


def tree(root: type[errors.SandboxError]) -> list[type[errors.SandboxError]]:
    """The classes that errors.py itself draws."""
    found = [root]
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            found += tree(child)
    return found


def test_every_class_has_the_status_of_its_code() -> None:
    classes = tree(errors.SandboxError)
    assert len(classes) == 17
    for cls in classes:
        error = cls("what", "fake") if cls is errors.UnsupportedError else cls("what")
        assert table.status_of(error) == CODES[cls.code], cls
    assert {cls.code for cls in classes} == set(CODES)


def test_every_row_of_the_table_is_a_class_of_the_tree() -> None:
    assert set(table.STATUS) <= set(tree(errors.SandboxError))


def test_every_status_of_the_table_has_a_meaning_for_the_document() -> None:
    for status in table.STATUS.values():
        assert table.documented(status)[status]["description"]


def body(response: Any) -> Any:
    return json.loads(bytes(response.body))


def test_details_are_there_only_where_there_is_something_to_say() -> None:
    assert body(table.for_error(errors.NotFoundError("gone"))) == {"error": {"code": "not_found", "message": "gone"}}
    answer = table.for_error(errors.UnsupportedError("pause", "runc"))
    assert answer.status_code == 501
    assert body(answer)["error"]["details"] == {"capability": "pause", "backend": "runc"}


@pytest.mark.parametrize(
    ("status", "code"), [(404, "not_found"), (405, "method_not_allowed"), (400, "invalid_request")]
)
def test_the_frameworks_errors_have_the_shape(status: int, code: str) -> None:
    answer = table.for_http(HTTPException(status, "words", headers={"Allow": "GET"}))
    assert (answer.status_code, answer.headers["allow"]) == (status, "GET")
    assert body(answer) == {"error": {"code": code, "message": "words"}}


def test_a_crash_says_a_number_and_nothing_of_the_exception(caplog: pytest.LogCaptureFixture) -> None:
    answer = table.for_crash(RuntimeError("secret-path"))
    assert answer.status_code == 500
    error = body(answer)["error"]
    assert error["code"] == "internal_error"
    assert "secret-path" not in bytes(answer.body).decode()
    assert error["details"]["id"] in error["message"]
    assert error["details"]["id"] in caplog.text
    assert "secret-path" in caplog.text


def test_problems_name_each_field_and_are_bounded() -> None:
    problems = [{"loc": ("body", "env", f"K{n}"), "type": "x", "msg": "bad"} for n in range(1000)]
    error = table.from_problems(problems)
    assert error.details["fields"][0] == {"field": "env.K0", "problem": "bad"}
    assert len(error.details["fields"]) == 20
