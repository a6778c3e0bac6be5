"""Errors that name a mistake which a user can fix."""


class JobError(ValueError):
    """A mistake that the user can fix. Commands show the message without a traceback, and exit with code 2."""


class RanksDifferError(ValueError, RuntimeError):
    """Ranks of one job run different programs, or one of them does not take part.

    A ValueError, as it may be raised for settings before training; a RuntimeError, as transfers raise in training.
    """
