"""Errors that a user can fix."""


class JobError(ValueError):
    """The user can fix the cause. Commands show the message without a traceback and exit with code 2."""
