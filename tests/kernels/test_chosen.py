"""Codecs call triton's kernels for tensors on CUDA, once for each piece, and get the bits of their chains."""

from __future__ import annotations

import pytest

from tests.kernels.test_kernels import told

pytestmark = pytest.mark.machine


def test_a_codec_calls_its_kernels_once() -> None:
    assert told("tests.kernels.chosen", TRITON_INTERPRET="1") == {}
