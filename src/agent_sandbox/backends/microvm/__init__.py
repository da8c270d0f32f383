"""MicroVMs: the backend on QEMU."""

from agent_sandbox.backends.microvm.backend import MicrovmBackend

__all__ = ["MicrovmBackend"]
