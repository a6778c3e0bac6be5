"""Measurements of a training step on one rank."""

import time

import psutil
import torch

from laconic.comm.launch import RankInfo
from laconic.comm.traffic import Snapshot
from laconic.lab.counters import InterfaceBytes, interface_bytes, loopback_bytes
from laconic.strategies.stepper import Stepper, StepResult
from laconic.train.records import StepRecord

_Interfaces = tuple[InterfaceBytes | None, InterfaceBytes | None]
"""The wire's counters and the loopback's."""


class StepMeter:
    """Measures the time, bytes and memory of steps. Call `fetch`, `start` and `stop` once per step, in this order.

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
        self._synchronize()
        self._interfaces = self._last_interfaces or self._read_interfaces()
        self._traffic = self._stepper.traffic(self._last_traffic)
        self._start_s = time.perf_counter()

    def stop(self, step: int, lr: float, result: StepResult) -> StepRecord:
        """End the measurement; return the record of the step."""
        self._synchronize()
        step_s = time.perf_counter() - self._start_s
        now = self._last_interfaces = self._read_interfaces()
        interface, loopback = (
            end - begin if end and begin else None for end, begin in zip(now, self._interfaces, strict=True)
        )
        traffic = self._last_traffic = self._stepper.traffic()
        return StepRecord(
            step=step,
            lr=lr,
            result=result,
            data_s=self._start_s - self._fetch_start_s,
            step_s=step_s,
            traffic=traffic - self._traffic if traffic is not None and self._traffic is not None else None,
            interface=interface,
            memory=self._stepper.memory(),
            loopback=loopback,
            allocated_peak_bytes=0 if self._is_on_cpu else torch.accelerator.max_memory_allocated(self._device),
            resident_bytes=psutil.Process().memory_info().rss,
        )

    def skip(self) -> None:
        """Ignore the bytes of the interfaces since the last step, for example those of an evaluation."""
        self._last_interfaces = None

    def _synchronize(self) -> None:
        if not self._is_on_cpu:
            torch.accelerator.synchronize(self._device)

    def _read_interfaces(self) -> _Interfaces:
        return (interface_bytes(), loopback_bytes()) if self._reads_interface else (None, None)
