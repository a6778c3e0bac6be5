"""The error for mistakes that a user can fix."""


class JobError(ValueError):
    """A mistake that the user can fix. Commands show the message without a traceback, and exit with code 2."""
