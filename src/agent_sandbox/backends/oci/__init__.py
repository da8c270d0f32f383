"""OCI runtimes without an engine: the embedded backend on runc."""

from agent_sandbox.backends.oci.backend import OciBackend

__all__ = ["OciBackend"]
