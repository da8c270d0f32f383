"""Random values of the stored format by hypothesis: anything that an object may hold, with its borders often."""

from __future__ import annotations

from hypothesis import strategies as st

from agent_sandbox.store.objects import (
    MAX_CHUNK,
    MAX_MODE,
    MAX_OWNER,
    MAX_SIZE,
    SMALL_FILE,
    SYMLINK_MODE,
    Child,
    Commit,
    Entry,
    Extent,
    Type,
)

ids = st.binary(min_size=32, max_size=32)
names = st.binary(min_size=1, max_size=255).filter(
    lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b"..")
)
times = st.integers(-(1 << 63), (1 << 63) - 1).flatmap(
    lambda seconds: st.integers(0, 999_999_999).map(lambda nanoseconds: seconds * 1_000_000_000 + nanoseconds)
)
modes = st.integers(0, MAX_MODE)
owners = st.none() | st.tuples(st.integers(0, MAX_OWNER), st.integers(0, MAX_OWNER))
attrs = st.none() | ids
links = st.none() | st.binary(min_size=16, max_size=16)
targets = st.binary(min_size=1, max_size=300).filter(lambda target: b"\0" not in target)

empty_files = st.builds(Entry, names, st.just(Type.FILE), modes, times, owners, attrs, links)
small_files = st.builds(
    Entry, names, st.just(Type.FILE), modes, times, owners, attrs, links, st.integers(1, SMALL_FILE - 1), ids
)
paged_files = st.builds(
    Entry, names, st.just(Type.FILE), modes, times, owners, attrs, links, st.integers(1, MAX_SIZE), ids, st.just(True)
)
directories = st.builds(Entry, names, st.just(Type.DIRECTORY), modes, times, owners, attrs, st.none(), st.just(0), ids)
symlinks = st.builds(
    Entry, names, st.just(Type.SYMLINK), st.just(SYMLINK_MODE), times, owners, st.none(), links, target=targets
)
fifos = st.builds(Entry, names, st.just(Type.FIFO), modes, times, owners, st.none(), links)
entries = empty_files | small_files | paged_files | directories | symlinks | fifos
"""One name with anything that it may be."""

roots = st.builds(Entry, st.just(b""), st.just(Type.DIRECTORY), modes, times, owners, attrs, st.none(), st.just(0), ids)


def listings(max_size: int = 12) -> st.SearchStrategy[list[Entry]]:
    """The entries of a directory, sorted."""
    return st.lists(entries, max_size=max_size, unique_by=lambda entry: entry.name).map(
        lambda found: sorted(found, key=lambda entry: entry.name)
    )


chunks = st.builds(Extent, st.integers(1, MAX_CHUNK), ids)
holes = st.builds(Extent, st.integers(1, 1 << 50), st.none())


def extents(max_size: int = 12) -> st.SearchStrategy[list[Extent]]:
    """The chunks and holes of a file, at least one, never two holes in a row."""

    def apart(found: list[Extent]) -> list[Extent]:
        return [
            extent
            for before, extent in zip([None, *found], found, strict=False)
            if extent.id or not before or before.id
        ]

    return st.lists(chunks | chunks | holes, min_size=1, max_size=max_size).map(apart)


weights = st.integers(1, MAX_SIZE)
page_children = st.lists(st.builds(Child, weights, ids), min_size=1, max_size=12)
tree_children = st.lists(
    st.builds(Child, weights, ids, names), min_size=1, max_size=12, unique_by=lambda c: c.last
).map(lambda found: sorted(found, key=lambda child: child.last))
levels = st.integers(1, 12)
attributes = st.lists(
    st.tuples(
        st.binary(min_size=1, max_size=250).filter(lambda name: b"\0" not in name).map(lambda name: b"user." + name),
        st.binary(max_size=300),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda attribute: attribute[0],
).map(sorted)
commits = st.builds(
    Commit,
    roots,
    st.lists(ids, max_size=8, unique=True).map(tuple),
    st.none() | ids,
    times,
    st.text(max_size=200).filter(lambda text: len(text.encode()) <= 1_024),
    st.text(max_size=500),
)
