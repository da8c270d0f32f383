"""``python -m tests.kills``: see the package's page."""

from __future__ import annotations

import argparse
import secrets
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.kills.campaign import Campaign, target
from tests.kills.worker import OPS


def main() -> int:
    """Run a campaign; exit code 1 for any finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description="Kill the server under load and look.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None, help="repeat a run; drawn and printed when left out")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no kill after so many seconds")
    parser.add_argument("--ops", default=",".join(OPS), help="do only these, to narrow something down")
    parser.add_argument("--workspaces", default="auto", help="how workspaces begin as a state: overlay or copy")
    arguments = parser.parse_args()
    seed = secrets.randbelow(1_000_000) if arguments.seed is None else arguments.seed
    ops = {op: OPS[op] for op in arguments.ops.split(",")}
    place = Path(tempfile.mkdtemp(prefix="agent-sandbox-kills-"))
    begun = time.monotonic()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that it cleans up
    with target(place, workspaces=arguments.workspaces) as served:
        campaign = Campaign(served, seed, ops=ops, say=lambda text: print(text, flush=True))
        print(f"seed {seed}; the server's log is {served.log}", flush=True)
        try:
            campaign.run(arguments.kills, arguments.seconds)
        finally:
            for text in campaign.findings:
                print(text)
            print(f"{campaign.summary()}; {time.monotonic() - begun:.0f} s", flush=True)
    if not campaign.findings:
        shutil.rmtree(place)
    return 1 if campaign.findings else 0


if __name__ == "__main__":
    sys.exit(main())
