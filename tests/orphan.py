"""Helper processes of tests end with their parent, also when that is killed with SIGKILL.

Helpers are programs, so they find this file by its folder: ``sys.path.insert(0, TESTS)``.
"""

from __future__ import annotations

import os
import threading
import time


def end_with_parent() -> None:
    """From now on this process ends within half a second of its parent."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.25)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
