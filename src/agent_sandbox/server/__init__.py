"""The REST server: :func:`~agent_sandbox.server.app.create_app`, and :mod:`~agent_sandbox.server.run` to serve it."""
