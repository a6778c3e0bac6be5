"""Fine-tuning in one process: one document a row, nothing padded or packed, and the loss by its definition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

Conversation = Sequence[dict[str, str]]


def chatml(messages: Conversation) -> tuple[list[int], list[bool]]:
    """The bytes of a conversation, and whether the assistant wrote each of them."""
    tokens: list[int] = []
    counted: list[bool] = []
    for message in messages:
        head = f"<|im_start|>{message['role']}\n".encode()
        body = f"{message['content']}<|im_end|>\n".encode()
        tokens += [*head, *body]
        counted += [False] * len(head) + [message["role"] == "assistant"] * len(body)
    return tokens, counted


def loss_sum(model: nn.Module, conversation: Conversation) -> tuple[Tensor, int]:
    """The sum of the losses of the assistant's tokens, and their number."""
    tokens, counted = chatml(conversation)
    logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    losses = [
        nn.functional.cross_entropy(logits[place - 1], torch.tensor(tokens[place]))
        for place in range(1, len(tokens))
        if counted[place]
    ]
    return torch.stack(losses).sum(), len(losses)


def mean_loss(model: nn.Module, conversations: Sequence[Conversation]) -> Tensor:
    """The mean over all tokens of the assistant in all conversations."""
    sums, counts = zip(*(loss_sum(model, conversation) for conversation in conversations), strict=True)
    return torch.stack(sums).sum() / sum(counts)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[Sequence[Conversation]], max_norm: float
) -> tuple[list[float], list[float]]:
    """Take one optimizer step on each of these global batches; return the losses and gradient norms."""
    losses, norms = [], []
    for conversations in steps:
        loss = mean_loss(model, conversations)
        loss.backward()
        parameters: Any = [parameter for parameter in model.parameters() if parameter.requires_grad]
        norms.append(float(nn.utils.clip_grad_norm_(parameters, max_norm)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms
