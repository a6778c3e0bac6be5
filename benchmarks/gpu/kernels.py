"""Rows about single operations on the device: codecs against a copy, page-locked copies, and the 8-bit optimizer."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.training import BENCHMARK, Bench, Sizes, device_of, seconds_per_call
from laconic.codec import CODECS, Codec, lossless
from laconic.optim.adamw8bit import AdamW8bit
from laconic.shard.cache import free_slab, make_slab
from tests.support.record import Row, ratio_row

_CODED = ("int8", "int4", "e2m1", "int2")
_REPEATS = 15


def seconds_of(call: Callable[[], object], device: torch.device, *, repeats: int = _REPEATS, calls: int = 4) -> float:
    """Return the median seconds of a call on a device, each time of several calls, after three that are not timed."""
    for _ in range(3):
        call()
    return statistics.median(seconds_per_call(call, device, calls) for _ in range(repeats))


def codecs_rank(sizes: Sizes, device_type: str) -> dict[str, tuple[float, float, float]]:
    """Return by codec the seconds a value of encoding, of decoding, and of a copy of as many bytes."""
    return {name: _of_codec(CODECS[name], sizes.piece_numel, device_of(device_type)) for name in _CODED}


def _of_codec(codec: Codec, numel: int, device: torch.device) -> tuple[float, float, float]:
    values = torch.randn(numel, device=device)
    payload = codec.encode(values, check=False)
    encode_s = seconds_of(lambda: codec.encode(values, check=False), device)
    decode_s = seconds_of(lambda: codec.decode(payload, numel), device)
    source = torch.empty((values.nbytes + payload.nbytes) // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = seconds_of(lambda: target.copy_(source), device)
    return encode_s / numel, decode_s / numel, copy_s / numel


@BENCHMARK.row("codecs")
def codecs(bench: Bench) -> Row:
    """Encode and decode against a copy that reads and writes as many bytes."""
    found = bench.launch(codecs_rank, num_ranks=1)[0]
    worst = max(max(encode, decode) / copy for encode, decode, copy in found.values())
    each = "; ".join(
        f"{name}: encode {encode * 1e12:.2f}, decode {decode * 1e12:.2f}, copy {copy * 1e12:.2f} ps a value"
        for name, (encode, decode, copy) in found.items()
    )
    return ratio_row(
        claim="encode or decode a piece, against a copy of the same bytes, worst codec", ratio=worst,
        note=f"pieces of {bench.sizes.piece_numel} values, fp32, without rotation; medians of {_REPEATS}: {each}.",
    )  # fmt: skip


_LOSSLESS_BYTES = 12
"""The bytes that the lossless coder's kernels may move for a bf16 value: tests/kernels."""
_LOSSLESS_RATE = 3e-4


@dataclass(kw_only=True)
class Coding:
    """The bits, seconds and kernels of a piece of bf16 values that is coded without loss."""

    numel: int
    bits: float = 0.0
    """Of the payload, a value."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of "encode" and "decode", and of a "copy"."""
    kernels: dict[str, dict[str, float]] = field(default_factory=dict)
    """For "encode" and "decode": the microseconds of each kernel, and of copies and fills. Empty on a CPU."""
    launches: dict[str, int] = field(default_factory=dict)
    is_right: bool = False
    """Payloads are those of a CPU, and decode to the new values, to the bit."""

    @property
    def ratio(self) -> float:
        """Of the slower way, to a copy."""
        return max(self.seconds["encode"], self.seconds["decode"]) / self.seconds["copy"]

    def __str__(self) -> str:
        seconds = {what: f"{each / self.numel * 1e12:.1f}" for what, each in self.seconds.items()}
        parts = [
            f"{way} {seconds[way]} ps a value ({2e-9 * self.numel / self.seconds[way]:.0f} GB/s of values)"
            + f"; {self.launches[way]} launches: {', '.join(f'{k} {v:.0f} us' for k, v in self.kernels[way].items())}"
            * bool(self.launches[way])
            for way in ("encode", "decode")
        ]
        told = f"{self.numel} values, {self.bits:.2f} bits"
        return f"{told}: {'; '.join(parts)}; copy {seconds['copy']}" + "; WRONG BITS" * (not self.is_right)


def versions_of_weights(numel: int, device: torch.device) -> list[Tensor]:
    """Two versions of bf16 weights, a step of AdamW apart."""
    generator = torch.Generator(device).manual_seed(0)
    weights, step = (torch.randn(numel, generator=generator, device=device) for _ in range(2))
    weights *= 0.02
    return [weights.bfloat16(), (weights + _LOSSLESS_RATE * 0.3 * step).bfloat16()]


def launched_by(call: Callable[[], object], device: torch.device) -> tuple[int, dict[str, float]]:
    """Return the launches of a call on a GPU, and the microseconds of each kernel, copy and fill, longest first."""
    if device.type != "cuda":
        return 0, {}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    events = [event for event in profiled.key_averages() if event.device_type is DeviceType.CUDA]
    times = Counter[str]()
    for event in events:
        times[event.key[:24]] += event.self_device_time_total
    return sum(event.count for event in events), dict(times.most_common())


def lossless_coding_rank(sizes: Sizes, device_type: str) -> list[Coding]:
    """Return what pieces of each size take."""
    device = device_of(device_type)
    return [_coding(numel, device) for numel in sizes.lossless_numels]


def _coding(numel: int, device: torch.device) -> Coding:
    held, new = versions_of_weights(numel, device)
    payload = lossless.encode(held, new)
    found = Coding(numel=numel, bits=8 * len(payload) / numel)
    found.is_right = torch.equal(lossless.decode(held, payload).view(torch.int16), new.view(torch.int16))
    found.is_right &= torch.equal(lossless.encode(held.cpu(), new.cpu()), payload.cpu())
    calls: dict[str, Callable[[], object]] = {
        "encode": lambda: lossless.encode(held, new),
        "decode": lambda: lossless.decode(held, payload),
    }
    for way, call in calls.items():
        found.seconds[way] = seconds_of(call, device)
        found.launches[way], found.kernels[way] = launched_by(call, device)
    source = torch.empty(numel * _LOSSLESS_BYTES // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found.seconds["copy"] = seconds_of(lambda: target.copy_(source), device)
    return found


@BENCHMARK.row("lossless")
def lossless_coding(bench: Bench) -> Row:
    """Encode and decode without loss, against a copy that reads and writes as many bytes as the kernels may."""
    found = bench.launch(lossless_coding_rank, num_ranks=1)[0]
    pieces = [each for each in found if each.numel >= bench.sizes.lossless_numels[1]]
    row = ratio_row(
        claim=f"encode or decode a piece without loss, against a copy of {_LOSSLESS_BYTES} bytes a value, worst",
        ratio=max(each.ratio for each in pieces),
        note=f"bf16 weights, a step of AdamW at {_LOSSLESS_RATE:g} apart; medians of {_REPEATS}, with the time that "
        f"the host waits for a length; the worst is of {bench.sizes.lossless_numels[1]} values and more. "
        f"{'. '.join(map(str, found))}.",
    )  # fmt: skip
    return row if all(each.is_right for each in found) else replace(row, is_met=False)


def pinned_rank(sizes: Sizes, device_type: str) -> tuple[float, float, float]:
    """Return the bytes a second to the host, from it, and from memory that torch has page-locked."""
    device, nbytes = device_of(device_type), sizes.slab_bytes
    slab, on_device = make_slab(nbytes, device), torch.empty(nbytes, dtype=torch.uint8, device=device)
    to_host = nbytes / seconds_of(lambda: slab.copy_(on_device, non_blocking=True), device, repeats=3, calls=1)
    to_device = nbytes / seconds_of(lambda: on_device.copy_(slab, non_blocking=True), device, repeats=3, calls=1)
    by_torch = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    reference = nbytes / seconds_of(lambda: on_device.copy_(by_torch, non_blocking=True), device, repeats=3, calls=1)
    free_slab(slab, device)
    return to_host, to_device, reference


@BENCHMARK.row("pinned")
def pinned(bench: Bench) -> Row:
    """Copies from the cache's own memory are as fast as from torch's page-locked memory."""
    to_host, to_device, reference = bench.launch(pinned_rank, num_ranks=1)[0]
    return Row(
        claim="copies from the host cache / from torch's page-locked memory, bytes a second",
        measured=f"{to_device / reference:.3f}x",
        note=f"{bench.sizes.slab_bytes / 2**30:.2f} GiB; {to_device / 1e9:.1f} GB/s to the device, "
        f"{to_host / 1e9:.1f} to the host, torch's {reference / 1e9:.1f}.",
    )


def optimizers_rank(sizes: Sizes, device_type: str) -> dict[str, float]:
    """Return the seconds of a step of each optimizer."""
    device = device_of(device_type)
    found = {}
    for name, make in {
        "AdamW": lambda p: torch.optim.AdamW(p, fused=device.type == "cuda"),
        "AdamW8bit": AdamW8bit,
    }.items():
        parameters = [nn.Parameter(torch.randn(shape, device=device, dtype=torch.bfloat16)) for shape in sizes.matrices]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer: torch.optim.Optimizer = make(parameters)
        found[name] = seconds_of(lambda: optimizer.step(), device, repeats=7, calls=2)  # noqa: B023
    return found


@BENCHMARK.row("adamw8bit")
def adamw8bit(bench: Bench) -> Row:
    """The step of AdamW8bit against torch's fused AdamW."""
    found = bench.launch(optimizers_rank, num_ranks=1)[0]
    numel = sum(rows * columns for rows, columns in bench.sizes.matrices)
    note = f"{len(bench.sizes.matrices)} bf16 matrices of {numel / 1e6:.0f} million parameters; " + ", ".join(
        f"{name} {seconds * 1e3:.2f} ms" for name, seconds in found.items()
    )
    return ratio_row(
        claim="a step of AdamW8bit / of torch's fused AdamW", ratio=found["AdamW8bit"] / found["AdamW"],
        note=f"{note}. Both have fp32 arithmetic; AdamW keeps its moments in bf16, AdamW8bit in eight bits.",
    )  # fmt: skip
