"""``python -m agent_sandbox.cli``: how the local server is started, and the command without its script."""

from agent_sandbox.cli import main

main()
