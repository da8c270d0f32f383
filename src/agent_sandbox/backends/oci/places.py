"""Where the things of one backend of one server are on the host, and which environments have left something there.

::

    DATA_DIR/<backend>/env/<id>/           what outlives a reboot (environment.py)
    DATA_DIR/<backend>/templates/          blank disks (disk.py)
    /run/agent-sandbox/<here>/box/         where disks are mounted
    /run/agent-sandbox/<here>/<program>/   the runtime's state
    agent-sandbox-<here>/<id>              its control group, in every hierarchy
    /var/lib/agent-sandbox-ids/            ranges of host ids, shared by all servers (linux/idranges.py)

``<instance>`` is made of the data directory's path: it names the same server again, and no other. ``<here>`` is that
for runc, and ``<instance>-<backend>`` for every other backend of the same server, so that two of them share nothing but
the images, which neither may clear of what the other runs from. Everything blocks.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from agent_sandbox.backends.linux.environments import RUN_DIRECTORY, DiskPlaces
from agent_sandbox.backends.linux.idranges import IdRanges
from agent_sandbox.backends.linux.rundir import RunDirectory, instance_of
from agent_sandbox.backends.oci import idmap
from agent_sandbox.backends.oci.environment import Environment, Record
from agent_sandbox.errors import BackendError, NotFoundError

_log = logging.getLogger(__name__)

ID_DIRECTORY = Path("/var/lib/agent-sandbox-ids")
"""Shared by all servers on a host, whatever their data directories, and kept over reboots."""
BACKENDS = ("runc", "gvisor")
"""The backends with such places: what one of them runs from, the others keep."""


class Places(DiskPlaces):
    """The directories of ``backend`` in the server with ``data_dir``. Making it touches nothing but to resolve links.

    ``program`` is its runtime's, and ``socket`` the name of a daemon's socket in its environment's directory.
    """

    def __init__(
        self, data_dir: Path, id_range_base: int, backend: str = "runc", program: str = "runc", socket: str = "sock"
    ) -> None:
        self.data_dir = Path(os.path.realpath(data_dir))  # the mount table has no symbolic links
        self.home = self.data_dir / backend
        self.environments = self.home / "env"
        self.templates = self.home / "templates"
        self.instance = instance_of(self.data_dir)
        here = self.instance if backend == "runc" else f"{self.instance}-{backend}"
        self.group = f"agent-sandbox-{here}"
        self.run = RUN_DIRECTORY / here
        self.run_directory = RunDirectory(self.run, self.data_dir)
        self.box = self.run / "box"
        self.runtime = self.run / program
        self._socket = socket
        self.ranges = IdRanges(ID_DIRECTORY, id_range_base)

    def environment(self, id: str) -> Environment:
        """The files of environment ``id``, which need not exist."""
        return Environment(self.environments, self.box, id, self._socket)

    def prepare(self) -> None:
        """Make the directories."""
        self.make_directories(self.data_dir, self.home)
        self.make_run_directories((self.runtime, 0o700))

    def prepare_ranges(self) -> str:
        """Claim the ranges that records have, and try whether there can be such ranges here; return why not."""
        try:
            self.ranges.prepare()
            for environment, record in self.records():
                if record.ids is not None and not self.ranges.keep(record.ids, environment.directory):
                    _log.error("the host ids of environment %s are another one's; it cannot start again", record.id)
        except OSError as error:
            return f"{ID_DIRECTORY} cannot be used ({error.strerror})"
        return idmap.why_not((Path("/usr"), self.data_dir))

    def close(self) -> None:
        """Remove the directories below ``/run`` where nothing is left in them."""
        self.remove_empty(self.runtime)

    def records(self) -> list[tuple[Environment, Record]]:
        """The environments whose records can be read; of the others the log tells."""
        found = []
        for directory in self.environments.iterdir():
            environment = self.environment(directory.name)
            try:
                found.append((environment, environment.record()))
            except NotFoundError:
                continue
            except BackendError as error:
                _log.warning("%s", error.message)
        return found

    def root_directories(self) -> set[Path]:
        """The image directories that environments of any backend may run from.

        All of the host's, when a record is damaged.
        """
        found: set[Path] = set()
        for home in (self.data_dir / backend for backend in BACKENDS):
            for spec in (home / "env").glob("*/spec.json"):
                try:
                    found.add(Environment(home / "env", self.box, spec.parent.name).record().rootfs)
                except NotFoundError:
                    continue
                except BackendError as error:
                    _log.warning("%s", error.message)
                    return set(self.data_dir.glob("images/host/*/rootfs"))
        return found
