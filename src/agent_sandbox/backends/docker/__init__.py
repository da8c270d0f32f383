"""Sandboxes as containers of a Docker engine. See ``backend.py``."""
