"""What the fork server does after its imports, before its first fork: [Note: Fork server] in launch.py."""

import contextlib
import gc

with contextlib.suppress(ImportError):  # a table of compiled patterns, which every rank with adapters would make
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")

gc.collect()
gc.freeze()
# laconic asks for this number in each job. To count takes 60 ms, as long as many jobs of the tests.
_num_frozen = gc.get_freeze_count()
gc.get_freeze_count = lambda: _num_frozen
