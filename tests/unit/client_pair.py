"""Both SDKs under one name for one suite: what blocks is awaited on a thread, so that a test is written once.

``Awaited(x)`` of a blocking object has its methods as coroutines, its iterators as asynchronous iterators and its
context manager as an asynchronous one; whatever it returns that belongs to the SDK is ``Awaited`` as well.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Generator
from contextlib import AbstractContextManager
from typing import Any

from agent_sandbox.client import Execution, Sandbox, SandboxClient, Terminal

_END = object()
_OURS = (SandboxClient, Sandbox, Execution, Terminal)


class Awaited:
    """A blocking object of the SDK as if it were the asynchronous one."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if not inspect.ismethod(value):
            return wrapped(value)
        if inspect.isgeneratorfunction(value.__func__) or name == "stream_archive":
            return lambda *args, **options: AwaitedIterator(value(*args, **options))
        if hasattr(value.__func__, "__wrapped__"):  # a context manager made of a generator
            return lambda *args, **options: AwaitedContext(value(*args, **options))

        async def call(*args: Any, **options: Any) -> Any:
            plain = [getattr(arg, "inner", arg) for arg in args]
            return wrapped(await asyncio.to_thread(value, *plain, **options))

        return call

    async def __aenter__(self) -> Awaited:
        await asyncio.to_thread(self.inner.__enter__)
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await asyncio.to_thread(self.inner.__exit__, *exc)

    def __repr__(self) -> str:
        return repr(self.inner)


class AwaitedIterator:
    """A blocking iterator as an asynchronous one."""

    def __init__(self, inner: Generator[Any, None, None]) -> None:
        self.inner = inner

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        value = await asyncio.to_thread(next, self.inner, _END)
        if value is _END:
            raise StopAsyncIteration
        return value

    async def aclose(self) -> None:
        await asyncio.to_thread(self.inner.close)


class AwaitedContext:
    """A blocking context manager as an asynchronous one."""

    def __init__(self, inner: AbstractContextManager[Any]) -> None:
        self.inner = inner

    async def __aenter__(self) -> Any:
        return await asyncio.to_thread(self.inner.__enter__)

    async def __aexit__(self, *exc: Any) -> bool | None:
        return await asyncio.to_thread(self.inner.__exit__, *exc)


def wrapped(value: Any) -> Any:
    """Wrap what belongs to the SDK; leave everything else."""
    if isinstance(value, list):
        return [wrapped(item) for item in value]
    return Awaited(value) if isinstance(value, _OURS) else value
