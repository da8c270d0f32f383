"""The SDK for code on an event loop; its names are those of :mod:`agent_sandbox.client`."""
