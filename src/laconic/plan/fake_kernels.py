"""Kernels that fake tensors lack, and the choice of kernels on a device that is not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_ATEN = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_FLASH_HEAD = 256
"""The largest head that flash attention takes: sdp_utils.cpp of torch."""


class CudaChoices(TorchFunctionMode):
    """Chooses the kernels that torch chooses on CUDA, for fake tensors that say they are on the CPU.

    Attention takes flash attention without a mask in half precision, else memory-efficient attention, as in
    `sdp::select_sdp_backend` of torch; cuDNN's attention, which Hopper devices may take, keeps as much as flash
    attention. Where neither takes the arguments, the products are written out. Dropout is one kernel with a mask of a
    byte per element.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func`, or CUDA's choice for it."""
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is functional.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    settings = {"scale": scale}
    head, has_equal_heads = query.shape[-1], query.shape[-3] == key.shape[-3]
    fits = query.ndim == 4 and head == value.shape[-1] and head % 8 == 0
    result: Tensor
    if attn_mask is None and fits and head <= _FLASH_HEAD and query.dtype in _HALF and (has_equal_heads or enable_gqa):
        result = _ATEN._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, **settings)[0]
        return result
    if fits and has_equal_heads:
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        keeps = any(tensor.requires_grad for tensor in (query, key, value))
        result = _ATEN._scaled_dot_product_efficient_attention(
            query, key, value, bias, keeps, dropout_p, is_causal, **settings
        )[0]
        return result
    result = _ATEN._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return result


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as a sum to attention's logits, its rows aligned: `preprocess_mask` of torch."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, float("-inf")).to(query.dtype)
    excess = -key.shape[-2] % 8
    if excess:
        mask = functional.pad(mask, (0, excess))[..., : key.shape[-2]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return input
    return torch.native_dropout(input, p, True)[0]


def grouped_product(left: Tensor, right: Tensor, offsets: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """The result of `torch._grouped_mm` in any dtype, without elements; torch's own fake kernel takes bf16 alone.

    Shapes: (T, K) @ (E, K, N) -> (T, N), (M, T) @ (T, N) -> (E, M, N), (E, M, K) @ (K, T) -> (M, T), or one product
    for each of E.
    """
    if left.ndim == 2 and right.ndim == 2:
        assert offsets is not None
        shape = [offsets.shape[0], left.shape[0], right.shape[1]]
    elif left.ndim == 2:
        shape = [left.shape[0], right.shape[2]]
    elif right.ndim == 2:
        shape = [left.shape[1], right.shape[1]]
    else:
        shape = [left.shape[0], left.shape[1], right.shape[2]]
    return left.new_empty(shape)


def grouped_flops(left: Tensor, right: Tensor) -> float:
    """The FLOPs of `torch._grouped_mm`: every row takes part in one product."""
    flops = 2.0 * left.shape[-2] * left.shape[-1] * right.shape[-1]
    return flops * left.shape[0] if left.ndim == right.ndim == 3 else flops
