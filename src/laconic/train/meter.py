"""Measurements of a training step on one rank, and the share of the devices' FLOP/s that it uses (MFU).

[Note: Seconds without a wait]
An accelerator works behind the host, so the host's clock tells nothing of a step unless the host waits for the device.
So the meter records an event before a step and one after it, on the stream that computes, and goes on. The device notes
when it passes them. The seconds between are read with the record, when the figures of several steps are combined: the
host then waits for the last of these steps. What runs on other streams and no longer holds up the computation belongs
to the step that will need it. All other figures are the host's own, and complete when it has issued the step: bytes are
counted where transfers are issued, memory where it is allocated.
"""

import time
from collections import Counter
from functools import partial
from typing import Any

import psutil
import torch
from torch import nn

from laconic.comm.launch import RankInfo
from laconic.comm.traffic import Snapshot
from laconic.hf.layers import base_model
from laconic.lab.counters import InterfaceBytes, interface_bytes, loopback_bytes
from laconic.layers.linear import quantized_layers
from laconic.plan.known import device_named
from laconic.strategies.memory import whole_numel
from laconic.strategies.stepper import Stepper, StepResult
from laconic.train.records import StepRecord

_Interfaces = tuple[InterfaceBytes | None, InterfaceBytes | None]
"""The wire's counters and the loopback's."""


class StepMeter:
    """Measures the time, bytes and memory of steps. Call `fetch`, `start` and `stop` once per step, in this order.

    None of them waits for the device: [Note: Seconds without a wait].

    A step's counters start where the last step's ended, since another rank may send before this rank begins the step.
    """

    def __init__(self, stepper: Stepper, ranks: RankInfo, device: torch.device) -> None:
        self._stepper, self._device = stepper, device
        self._is_on_cpu = device.type == "cpu"
        self._reads_interface = ranks.is_first_on_node
        self._last_interfaces: _Interfaces | None = None
        self._last_traffic: Snapshot | None = None

    def fetch(self) -> None:
        """Start to measure the time to fetch rows, before the step."""
        self._fetch_start_s = time.perf_counter()

    def start(self) -> None:
        """Start to measure the step."""
        self._interfaces = self._last_interfaces or self._read_interfaces()
        self._traffic = self._stepper.traffic(self._last_traffic)
        self._data_s = time.perf_counter() - self._fetch_start_s
        self._begin = moment_on(self._device)

    def stop(self, step: int, lr: float, result: StepResult) -> StepRecord:
        """End the measurement; return the record of the step."""
        end = moment_on(self._device)
        now = self._last_interfaces = self._read_interfaces()
        interface, loopback = (
            end - begin if end and begin else None for end, begin in zip(now, self._interfaces, strict=True)
        )
        traffic = self._last_traffic = self._stepper.traffic()
        return StepRecord(
            step=step,
            lr=lr,
            result=result,
            data_s=self._data_s,
            measured_s=partial(seconds_between, self._begin, end),
            traffic=traffic - self._traffic if traffic is not None and self._traffic is not None else None,
            interface=interface,
            memory=self._stepper.memory(),
            resting=dict(Counter(placement.weights for placement in self._stepper.placements().values())),
            loopback=loopback,
            allocated_peak_bytes=0 if self._is_on_cpu else torch.accelerator.max_memory_allocated(self._device),
            resident_bytes=psutil.Process().memory_info().rss,
        )

    def skip(self) -> None:
        """Ignore the bytes of the interfaces since the last step, for example those of an evaluation."""
        self._last_interfaces = None

    def _read_interfaces(self) -> _Interfaces:
        return (interface_bytes(), loopback_bytes()) if self._reads_interface else (None, None)


def moment_on(device: torch.device) -> Any:
    """The present moment: the host's clock or, on an accelerator, an event behind all that computes so far."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.get_device_module(device).Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """The seconds between two moments. Waits until the device has passed both."""
    if isinstance(begin, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """The FLOP/s that a device can do in a 16-bit `dtype`; None for another type, or a device that is not known."""
    return peak_of(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None


def peak_of(torch_name: str, dtype: str) -> float | None:
    """As `peak_flops`, for the device of this name in torch. The figures are those of plan/devices.toml."""
    known = device_named(torch_name)
    return known.peak_flops_per_s.get(dtype) if known and dtype in ("bfloat16", "float16") else None


def flops_per_token(model: nn.Module, sequence_length: int) -> float | None:
    """The FLOPs of forward and backward per token; None for a mixture of experts, which uses a part of its weights.

    A multiplication by a weight takes 2 FLOPs in forward, 2 for the gradient of the input and, if the weight trains, 2
    for its own. Attention takes 12 times layers x hidden size x tokens. Looking up an embedding takes none.
    Recomputation for activation checkpointing does not count. Source: PaLM (arXiv 2204.02311, appendix B).
    """
    base: Any = base_model(model)
    text: Any = base.config.get_text_config()
    if any(getattr(text, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        return None
    quantized = list(quantized_layers(model))
    coded = {id(p): 0 for layer in quantized for p in (layer.weight_codes, layer.weight_scales)}
    embedding = base.get_input_embeddings().weight
    output = base.get_output_embeddings()
    if output is not None and (output in quantized or output.weight is not embedding):
        coded[id(embedding)] = 0
    total = 4.0 * sum(layer.in_features * layer.out_features for layer in quantized)
    for parameter in model.parameters():
        total += coded.get(id(parameter), whole_numel(parameter)) * (6 if parameter.requires_grad else 4)
    return total + 12.0 * text.num_hidden_layers * text.hidden_size * sequence_length
