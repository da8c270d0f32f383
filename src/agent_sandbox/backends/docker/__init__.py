"""Sandboxes as containers of a Docker engine. See ``backend.py``."""

from agent_sandbox.backends.docker.backend import DockerBackend

__all__ = ["DockerBackend"]
