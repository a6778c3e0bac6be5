"""A first forward that shows whether a model treats rows of documents as the data means them.

No list says which models do: it depends on their layers, on the attention's implementation, and on the release of
transformers. For example, gpt-oss in transformers 5.23 does not tell its masks about positions. So the model is asked.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from laconic.config import JobError
from laconic.data.batches import Batch

_TOKENS = 8  # of each of the two documents in a row


def check_model(run: Callable[[Batch], Any], *, is_packed: bool) -> None:
    """Run a model on two rows. The second documents of the rows are equal, and the first ones are not.

    With `is_packed`, the logits of the second documents must be equal too. And the loss must be the sum over all
    targets, divided by the batch's `num_items`.

    Raises:
        JobError: one of the two is not so.
    """
    first, second = torch.tensor([[1], [2]]).expand(2, _TOKENS), (torch.arange(_TOKENS) % 3).expand(2, _TOKENS)
    ids = torch.cat([first, second], dim=1)
    positions = torch.arange(_TOKENS).repeat(2).expand(2, 2 * _TOKENS)
    batch = Batch(
        input_ids=ids,
        labels=ids,
        position_ids=positions.contiguous() if is_packed else None,
        num_items=torch.tensor(1.0),
    )
    try:
        output = run(batch)
    except TypeError as error:  # an unexpected keyword argument
        advice = "set data.packing = false, or " if is_packed else ""
        raise JobError(
            f"this model cannot train on rows of documents: {error}; {advice}choose another model"
        ) from error
    logits = output.logits.detach().float().cpu()
    second_documents = logits[:, _TOKENS:]
    difference = (second_documents[0] - second_documents[1]).abs().mean() / second_documents.abs().mean()
    # equal to the bit as a rule, but a layer of experts may add in another order; a leak is at least 0.3 %
    if is_packed and difference > max(1e-4, torch.finfo(output.logits.dtype).eps / 4):
        raise JobError(
            "data.packing = true puts several documents in a row, and this model lets a document see the ones before "
            "it: its layers, or the implementation of its attention, take no notice of position_ids; set data.packing "
            "= false"
        )
    total = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    if float(output.loss.detach()) < 0.5 * float(total):  # a mean is far smaller, and a model may add a loss of its own
        raise JobError(
            "this model divides its loss by the number of tokens of each micro-batch (it takes no num_items_in_batch), "
            "so rows with few tokens that count would weigh too much; for text, leave data.packing out to train on a "
            "stream of tokens, whose rows count equally; for chat data, choose another model"
        )
