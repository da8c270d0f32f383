"""Kill the server at random moments under mixed load, and hold it to everything that it had acknowledged.

``python -m tests.kills --kills 100 --seed 1`` (root) runs a server on the embedded backend, lets several clients work
on it, kills it with SIGKILL, starts it again and looks, again and again. What must hold after each kill:

* a sandbox whose creation was acknowledged is there with its files, status and expiry, unless it was deleted or its
  time is over; what was deleted stays deleted; nothing else is there than what an unanswered request explains;
* a snapshot that was acknowledged is there and restores to the exact tree; so does one whose reply was lost;
* commands that were started go on; their output is what they print, byte for byte, or an honest gap, and their exit
  code can be read;
* the host holds what the listed sandboxes need and nothing else, and at the end nothing.

The parts
---------
``expected.py`` says what must be there, ``worker.py`` does one client's work and notes what was acknowledged,
``aftermath.py`` settles what a kill left open and compares, ``gun.py`` draws and fires the kills, ``campaign.py``
runs it all. Each worker alone uses its sandboxes, so what must be there is always exactly known; what was under way
when the server died may have happened or not, but never half.

A run is repeated by its seed: it draws the same kills and the same work. When within a request a kill falls is up to
the machine.
"""
