"""Run the code of AI agents in disposable sandboxes: snapshot, roll back, fork."""

__version__ = "0.1.0"
