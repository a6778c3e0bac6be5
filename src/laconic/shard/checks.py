"""The error that checks against silent corruption raise."""


class CorruptionError(RuntimeError):
    """Ranks have other bits than they should: weights or gradients were damaged, or changed unnoticed.

    All ranks of the mesh raise it alike. No optimizer has used the damaged values if the error comes out of a backward.
    """
