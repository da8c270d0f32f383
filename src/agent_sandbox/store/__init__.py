"""The versioned workspace store: states of a directory tree, kept once, with history.

``spec/store.md`` gives every stored byte; :class:`Store` (``store.py``) is the one face.
"""
