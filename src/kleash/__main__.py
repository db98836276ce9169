"""`kleash` and `python -m kleash`."""

from __future__ import annotations

import logging
import sys

from kleash.allocator import keep_freed_memory
from kleash.terminal import plain_messages, report_crash, write_what_can_be_written


def main() -> None:
    """Set the process up, before torch allocates anything, and run the command line."""
    keep_freed_memory()
    logging.basicConfig(format="%(message)s")
    sys.excepthook = report_crash
    write_what_can_be_written()
    plain_messages()
    from kleash.cli import command

    command()(prog_name="kleash")


if __name__ == "__main__":
    main()
