"""``python -m tests.nested [--seconds N] -- COMMAND…``: run a command where Firecracker runs, and end with its code."""

from __future__ import annotations

import argparse
import sys

from tests.nested import outer


def main() -> int:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m tests.nested", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600, help="how long it may take")
    parser.add_argument("command", nargs="+")
    told = parser.parse_args()
    try:
        return outer.run(told.command, seconds=told.seconds, say=lambda line: print(line, flush=True))
    except (TimeoutError, outer.MachineDiedError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
