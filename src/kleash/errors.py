"""The two kinds of error a user can meet: a wrong request, and a run that failed."""


class KLeashError(Exception):
    """Base of every error KLeash raises on purpose; its message is one paragraph meant for the user."""

    exit_code = 1


class UsageError(KLeashError):
    """The request itself is wrong: an option, a file, a row, a model folder. Exit code 2."""

    exit_code = 2


class RunError(KLeashError):
    """The request was right but the run failed: a full disk, a reward that raised, a non-finite loss.

    Exit code 1.
    """
