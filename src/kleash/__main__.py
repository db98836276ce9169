"""`kleash` and `python -m kleash`."""

from __future__ import annotations

import logging
import sys

from kleash.allocator import keep_freed_memory
from kleash.terminal import report_crash


def main() -> None:
    """Set the process up, before torch allocates anything, and run the command line."""
    keep_freed_memory()
    logging.basicConfig(format="%(message)s")
    sys.excepthook = report_crash
    from kleash.cli import command

    command()(prog_name="kleash")


if __name__ == "__main__":
    main()
