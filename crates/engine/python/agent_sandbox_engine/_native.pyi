"""The extension module. `agent_sandbox.store.native` is its only caller."""
