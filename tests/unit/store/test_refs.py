"""References: the grammar, what they lead to, and what an error tells instead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.errors import InvalidRequestError, NotFoundError, SandboxError
from agent_sandbox.store import refs
from agent_sandbox.store.catalog import Ref, RefKind
from agent_sandbox.store.objectdb import ObjectDatabase
from agent_sandbox.store.objects import Commit, Entry, Kind, Type, encode_commit
from agent_sandbox.store.refs import Reference, Target


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("p", Reference("p", name="main")),
        ("a.b_c-9", Reference("a.b_c-9", name="main")),
        ("p:work", Reference("p", name="work")),
        ("p:0123abcd", Reference("p", name="0123abcd")),
        ("p@0", Reference("p", layer=0)),
        ("p@12", Reference("p", layer=12)),
        ("0123abcd", Reference(digits="0123abcd")),
        ("0123ABCD9", Reference(digits="0123abcd9")),
        ("f" * 64, Reference(digits="f" * 64)),
        ("0123abc", Reference("0123abc", name="main")),
        ("f" * 65, Reference("f" * 65, name="main")),
    ],
)
def test_references_are_parsed(text: str, reference: Reference) -> None:
    assert refs.parse(text) == reference


@pytest.mark.parametrize(
    "text",
    ["", ":", "@", "p:", ":b", "p@", "p@01", "p@-1", "p@1x", "p@" + "9" * 19, "p:a:b", "p:a@1", "p@1:a", ".p", "-p",
     "p/q", "p q", "p\n", "p:b\n", "ä", "p:١", "p@١", "x" * 101, "p:" + "x" * 101, "p\0"],
)  # fmt: skip
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        refs.parse(text)
    assert raised.value.message.isascii()
    assert raised.value.message.isprintable()


def test_names_have_a_rule() -> None:
    assert refs.check_name("x" * 100) == "x" * 100
    for name in ("", "x" * 101, ".a", "a b", "a\n", "é", "a:b"):
        with pytest.raises(InvalidRequestError, match="cannot be a"):
            refs.check_name(name)
    with pytest.raises(InvalidRequestError, match="mean a commit"):
        refs.check_project("deadBEEF")
    assert refs.check_project("deadbee") == "deadbee"


@pytest.fixture
def database(tmp_path: Path) -> Iterator[ObjectDatabase]:
    with ObjectDatabase.create(tmp_path / "store") as database:
        yield database


def add(database: ObjectDatabase, *, message: str = "") -> bytes:
    """Keep a commit of an empty tree."""
    with database.writer() as writer:
        tree = writer.put(Kind.TREE, b"\0")
        root = Entry(b"", Type.DIRECTORY, 0o755, 0, content=tree)
        commit = writer.put(Kind.COMMIT, encode_commit(Commit(root, (), None, 0, "", message)))
        writer.seal()
        with database.transaction(writer):
            pass
    return commit


def test_references_lead_to_commits(database: ObjectDatabase) -> None:
    one, two = add(database, message="1"), add(database, message="2")
    tag = Ref("p", "v1", RefKind.TAG, one, 0)
    with database.transaction() as change:
        change.add_project("p", 0)
        change.add_layer("p", one)
        change.add_ref(Ref("p", "main", RefKind.BRANCH, two, 0))
        change.add_ref(tag)
    assert refs.resolve(database, "p") == Target(two, "p", 0, Ref("p", "main", RefKind.BRANCH, two, 0))
    assert refs.resolve(database, "p:v1") == Target(one, "p", 0, tag)
    assert refs.resolve(database, "p@0") == Target(one, "p", 0)
    assert refs.resolve(database, one.hex()) == Target(one)
    assert refs.resolve(database, two.hex()[:9].upper()) == Target(two)
    assert refs.branch(database.index, "p").head == two
    with pytest.raises(InvalidRequestError, match="is a tag"):
        refs.branch(database.index, "p:v1")
    for text in ("p@0", one.hex()):
        with pytest.raises(InvalidRequestError, match="is no branch"):
            refs.branch(database.index, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "no project 'x'; there are: p, q"),
        ("x:y", "no project 'x'; there are: p, q"),
        ("x@1", "no project 'x'; there are: p, q"),
        ("p:dev", "no branch or tag 'dev' in project 'p'; there are: main, v1"),
        ("p@7", "no layer 7 in project 'p'; its last one is 0"),
        ("q", "no branch or tag 'main' in project 'q'; there is none"),
        ("q@0", "no layer 0 in project 'q'; it has none"),
        ("0" * 64, "no commit whose id begins with " + "0" * 64),
    ],
)
def test_an_error_says_what_there_is(database: ObjectDatabase, text: str, message: str) -> None:
    one = add(database)
    with database.transaction() as change:
        change.add_project("p", 0)
        change.add_project("q", 0)
        change.add_layer("p", one)
        change.add_ref(Ref("p", "main", RefKind.BRANCH, one, 0))
        change.add_ref(Ref("p", "v1", RefKind.TAG, one, 0))
    with pytest.raises(NotFoundError) as raised:
        refs.resolve(database, text)
    assert raised.value.message == message


def test_an_error_lists_ten_names(database: ObjectDatabase) -> None:
    with database.transaction() as change:
        for number in range(12):
            change.add_project(f"p{number:02}", 0)
    with pytest.raises(NotFoundError) as raised:
        refs.resolve(database, "x")
    assert raised.value.message == "no project 'x'; there are: " + ", ".join(f"p{n:02}" for n in range(10)) + ", …"


class Digits:
    """A database in which ids and kinds are as told."""

    def __init__(self, database: ObjectDatabase, ids: list[bytes]) -> None:
        self._database = database
        self._ids = ids
        self.index = self
        self.reading = database.reading
        self.load = database.load

    def find(self, prefix: str, limit: int) -> list[bytes]:
        return self._ids[:limit]


def test_digits_mean_commits_alone_and_one_of_them(database: ObjectDatabase) -> None:
    one, two = add(database, message="1"), add(database, message="2")
    with database.writer() as writer:
        blobs = [writer.put(Kind.BLOB, b"%d" % number) for number in range(20)]
        writer.seal()
        with database.transaction(writer):
            pass

    def found(*ids: bytes) -> bytes | SandboxError:
        try:
            return refs.resolve(Digits(database, list(ids)), "00000000").commit  # type: ignore[arg-type]
        except SandboxError as error:
            return error

    assert found(one) == one
    assert found(blobs[0], one, blobs[1]) == one
    assert isinstance(found(blobs[0]), NotFoundError)
    assert isinstance(found(one, two), InvalidRequestError)
    assert isinstance(found(*blobs[:11]), InvalidRequestError)  # a commit may hide behind them
    assert isinstance(found(one, *blobs[:11]), InvalidRequestError)
    with pytest.raises(NotFoundError):
        refs.resolve(database, blobs[0].hex())
