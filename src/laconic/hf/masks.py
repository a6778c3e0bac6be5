"""Attention masks of transformers on tensors without elements."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def rows_packed(is_packed: bool) -> Iterator[None]:
    """Tell transformers whether rows hold several documents, which it otherwise reads out of the elements of positions.

    Without elements it assumes several, and builds a mask of (rows, tokens, tokens) that most jobs do not have.
    """
    from transformers import masking_utils

    find = getattr(masking_utils, "find_packed_sequence_indices", None)
    if find is None or is_packed:  # older releases of transformers build no such mask
        yield
        return

    def find_none(*args: Any, **kwargs: Any) -> None:
        find(*args, **kwargs)  # what it computes takes time

    masking_utils.find_packed_sequence_indices = find_none
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find
