"""Errors that a user can mend."""


class JobError(ValueError):
    """A user can mend this: a command shows it as one message without a traceback and exits with code 2."""
