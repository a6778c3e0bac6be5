"""The cluster that is not there: nodes of eight H100, each figure with its source, in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from laconic.plan.cluster_spec import DEFAULT_HEADER_FACTOR, ClusterSpec

NODES = (2, 4, 16)
RANKS_PER_NODE = 8
RATES_GBIT_PER_S = (25, 100, 400)
"""The rate that gives a node's wire its name. The eight ranks of the node share the wire."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of the cluster, and where it comes from."""

    name: str
    value: float
    text: str
    """The value in units for people."""
    source: str


_PEAK_FLOPS_PER_S, _PEAK_BYTES_PER_S, _PEAK_LOCAL_BYTES_PER_S = 989e12, 3.35e12, 450e9
"""NVIDIA, H100 SXM data sheet, 2023: dense bfloat16, HBM3, and NVLink 4 in one direction."""

MATMUL = Figure(
    name="products in bf16", value=0.724 * _PEAK_FLOPS_PER_S, text="716 TFLOP/s",
    source="72 % of the peak: a product of 8192 x 8192 random values by cuBLAS (P. Shankhdhar, Outperforming cuBLAS on "
    "H100, 2024). No step of ours went into it",
)  # fmt: skip
ATTENTION = Figure(
    name="fused attention", value=0.35 * _PEAK_FLOPS_PER_S, text="346 TFLOP/s",
    source="35 % of the peak: FlashAttention-2, which torch runs, on an H100 (arXiv 2407.08608, abstract)",
)  # fmt: skip
MEMORY = Figure(
    name="device memory, read and written", value=0.85 * _PEAK_BYTES_PER_S, text="2.85 TB/s",
    source="85 % of the peak: the copies beside the codecs (section gpu, row codecs) move 5 bytes a value in 1.23 ps, "
    "85 % of an H200's 4.8 TB/s; the same share is taken for an H100",
)  # fmt: skip
HOST_LINK = Figure(
    name="copies between host and device, each way", value=55.3e9, text="55.3 GB/s a rank",
    source="measured on an H200's PCIe 5 (section gpu, row pinned)",
)  # fmt: skip
LOCAL = Figure(
    name="NVLink inside a node", value=0.8 * _PEAK_LOCAL_BYTES_PER_S, text="360 GB/s a rank, each way",
    source="80 % of 450 GB/s, the share that nccl-tests reach on A100s (230 to 250 of 300 GB/s); latency 7.2 us by "
    "NCCL's own model (src/graph/tuning.cc)",
)  # fmt: skip
WIRE = Figure(
    name="the wire of a node", value=0.97 / DEFAULT_HEADER_FACTOR, text="92.8 % of its name is payload; 50 us",
    source="an assumption: TCP over switched Ethernet loses 3 %, and headers take 4.6 %. RDMA loses less, for all "
    "strategies alike",
)  # fmt: skip
HOST_MEMORY = Figure(
    name="host memory, read and written", value=400e9, text="400 GB/s and 2 TB a node",
    source="an assumption: 65 % of two sockets with eight channels of DDR5-4800, 614 GB/s. Only optimizers on the host "
    "use it",
)  # fmt: skip
FIGURES: Sequence[Figure] = (MATMUL, ATTENTION, MEMORY, HOST_LINK, LOCAL, WIRE, HOST_MEMORY)
"""All figures on which the simulated seconds hang. None was fitted to a step of ours."""

_DEVICE_MEMORY_BYTES = round(79.1 * 2**30)
"""The device memory that one process gets on an H100 of 80 GB: CUDA's messages name it."""
_FP32_FLOPS_PER_S = 0.724 * 67e12


def h100_nodes(nodes: int, rate_gbit_per_s: float, *, ranks_per_node: int = RANKS_PER_NODE) -> ClusterSpec:
    """`nodes` of eight H100 whose wire has this name, such as 25 Gbit/s."""
    return ClusterSpec(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        device="H100 SXM",
        network=f"{rate_gbit_per_s:g} Gbit/s",
        device_memory_bytes=_DEVICE_MEMORY_BYTES,
        device_flops_per_s={"bfloat16": MATMUL.value, "float32": _FP32_FLOPS_PER_S},
        device_attention_share=ATTENTION.value / MATMUL.value,
        device_memory_bytes_per_s=MEMORY.value,
        host_memory_bytes=2 * 10**12,
        host_memory_bytes_per_s=HOST_MEMORY.value,
        host_to_device_bytes_per_s=HOST_LINK.value,
        device_to_host_bytes_per_s=HOST_LINK.value,
        local_bytes_per_s=LOCAL.value,
        local_latency_s=7.2e-6,
        wire_bits_per_s=WIRE.value * DEFAULT_HEADER_FACTOR * rate_gbit_per_s * 1e9,
        wire_latency_s=50e-6,
        wire_header_factor=DEFAULT_HEADER_FACTOR,
    )


MEASURED_S = {"plain": 0.2891, "fsdp2": 0.2952, "none": 0.2896}
"""A step that one H100 has taken, by contestant (section gpu, row step-plain, 2026-11-26): medians of five blocks."""
