"""OCI runtimes without an engine: the embedded backends on runc and on runsc (gVisor)."""

from agent_sandbox.backends.oci.backend import OciBackend
from agent_sandbox.backends.oci.gvisor import GvisorBackend

__all__ = ["GvisorBackend", "OciBackend"]
