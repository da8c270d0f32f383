"""A real Firecracker where there is no KVM: in an emulated machine whose emulated processor can virtualize.

``outer.py`` makes that machine and runs a command in it; ``inside.py`` is its first process. The tests that run there
are the same that run on QEMU here, told by ``MICROVM_MONITOR`` which monitor they are about (``tests/microvms.py``).
``python -m tests.nested -- COMMAND`` runs anything there, as root, with this project and its tests.
"""
