"""Run the code of AI agents in disposable sandboxes: snapshot, roll back, fork."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from agent_sandbox.client import AsyncSandbox, AsyncSandboxClient, Sandbox, SandboxClient

__all__ = ["AsyncSandbox", "AsyncSandboxClient", "Sandbox", "SandboxClient", "__version__"]


def __getattr__(name: str) -> Any:
    # The server imports this package too, and has no use for an HTTP client.
    if name in __all__:
        from agent_sandbox import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
