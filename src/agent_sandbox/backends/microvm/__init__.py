"""MicroVMs: one backend on QEMU, and one on Firecracker."""

from agent_sandbox.backends.microvm.backend import FirecrackerBackend, MicrovmBackend

__all__ = ["FirecrackerBackend", "MicrovmBackend"]
