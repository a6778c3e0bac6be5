"""How many bits lossless differences of weights take in real training: codec/lossless.py, one process, plain PyTorch.

    python -m benchmarks.lossless            the row, recorded: a minute on a GPU, hours on 2 cores
    python -m benchmarks.lossless --quick    a tiny model and few steps, printed only

A Llama of 10.8 million parameters learns bytes of Python's own sources, with AdamW on fp32 weights and bf16 copies of
them in forward and backward, as FSDP2 with `param_dtype=bf16` does it. It trains at 1e-3; from its last state short
runs go on at the smaller rates of fine-tuning and of reinforcement learning. At the end of each, a step's copies are
coded against those before it. Float8 copies are those of a scaled format of laconic, of the same weights. A weight's
bits are all bits of all payloads, with vectors and the format's scales as they are, over all weights.
"""

from __future__ import annotations

import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.llama import Llama, PlainLlama, loss_of
from laconic.codec import lossless
from laconic.codec.payload import DEVICE_PIECE_NUMEL, HOST_PIECE_NUMEL
from laconic.layers.scaled import SCALED_FORMATS
from tests.support.measure import Benchmark
from tests.support.record import Record, Row, Table

RATES = (1e-3, 3e-4, 1e-4, 1e-5, 1e-6)
"""The bits a weight that bf16 copies may take, by learning rate."""
FLOAT8_RATE = 1e-4
FLOAT8 = "fp8_128x128"
FORMATS = ("bf16", FLOAT8)
_SECTION = "bits of weights"
_TEXT_BYTES = 24_000_000
_VECTOR_BITS = 16


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The model, and the lengths of its runs in steps."""

    llama: Llama
    warmup: int
    first: int
    """The steps at the first rate, warm-up included."""
    tune: int
    """The steps of each run at a smaller rate."""
    measured: int
    """The steps at the end of each run whose copies are coded."""


FULL = Recipe(
    llama=Llama(
        hidden=384, intermediate=1024, layers=6, heads=6, kv_heads=6, vocab=256, batch=16, sequence=512
    ), warmup=50, first=1000, tune=40, measured=3,
)  # fmt: skip
QUICK = Recipe(
    llama=Llama(hidden=128, intermediate=384, layers=2, heads=2, kv_heads=2, vocab=256, batch=4, sequence=64),
    warmup=5, first=12, tune=4, measured=1,
)  # fmt: skip


@dataclass
class Bits:
    """The sums over some coded steps of one format at one rate."""

    weights: int = 0
    coded: float = 0.0
    plain: float = 0.0
    """The bits of vectors and of the format's scales."""
    unchanged: float = 0.0
    encode_s: list[float] = field(default_factory=list)
    """The seconds a value of each payload."""
    decode_s: list[float] = field(default_factory=list)

    @property
    def total(self) -> float:
        """Bits a weight, all included."""
        return (self.coded + self.plain) / self.weights


class Bench:
    """One training, whose steps are coded; it runs when a row first needs it."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.bits: dict[tuple[float, str], Bits] = {}
        """The bits by learning rate and format."""
        self.num_parameters = 0
        self.loss = math.nan
        """The loss of the last step at the first rate."""

    def measure(self) -> dict[tuple[float, str], Bits]:
        """Train, tune and code, once."""
        if not self.bits:
            run = _Run(self.recipe, self.device)
            self.num_parameters = sum(weight.numel() for weight in run.weights)
            first, *others = RATES
            recipe = self.recipe
            self._coded(first, run, recipe.first, lambda step: first * min(1.0, (step + 1) / recipe.warmup))
            self.loss = run.loss
            state = [weight.clone() for weight in run.weights]
            for rate in others:
                run.restart(state)
                self._coded(rate, run, recipe.tune, lambda step, rate=rate: rate)  # type: ignore[misc]
        return self.bits

    def _coded(self, rate: float, run: _Run, steps: int, rates: Callable[[int], float]) -> None:
        """Take steps, and code the last of them in each format."""
        for step in range(steps):
            is_measured = step >= steps - self.recipe.measured
            held = [weight.clone() for weight in run.weights] if is_measured else []
            run.step(rates(step))
            for name in FORMATS if is_measured else ():
                _add(self.bits.setdefault((rate, name), Bits()), held, run.weights, name, self.device)
        print(f"{rate:g}: loss {run.loss:.3f}", file=sys.stderr, flush=True)


class _Run:
    """Training of fp32 weights with bf16 copies in forward and backward."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.shape, self.device = recipe.llama, device
        torch.manual_seed(0)
        self.model: nn.Module = PlainLlama(self.shape).to(device).bfloat16()
        torch.manual_seed(0)
        self.weights = [each.detach().to(device) for each in PlainLlama(self.shape).parameters()]
        self.loss = math.nan
        self._text = _text()
        self._generator = torch.Generator().manual_seed(1)
        self._show()
        self._optimizer = torch.optim.AdamW(self.weights, betas=(0.9, 0.95), weight_decay=0.1)

    def restart(self, state: list[Tensor]) -> None:
        """Begin to tune from these weights."""
        for weight, saved in zip(self.weights, state, strict=True):
            weight.copy_(saved)
        self._show()
        self._optimizer = torch.optim.AdamW(self.weights, betas=(0.9, 0.999), weight_decay=0.01)

    def step(self, rate: float) -> None:
        """Take one step on a new batch."""
        begins = torch.randint(len(self._text) - self.shape.sequence, (self.shape.batch,), generator=self._generator)
        tokens = torch.stack([self._text[begin : begin + self.shape.sequence] for begin in begins.tolist()])
        loss = loss_of(self.model, tokens.long().to(self.device))
        loss.backward()
        for weight, copied in zip(self.weights, self.model.parameters(), strict=True):
            assert copied.grad is not None
            weight.grad = copied.grad.float()
            copied.grad = None
        nn.utils.clip_grad_norm_(self.weights, 1.0)
        self._optimizer.param_groups[0]["lr"] = rate
        self._optimizer.step()
        self._show()
        self.loss = loss.item()

    def _show(self) -> None:
        with torch.no_grad():
            for weight, copied in zip(self.weights, self.model.parameters(), strict=True):
                copied.copy_(weight)


def _text() -> Tensor:
    """Bytes of the standard library's sources, in the order of names: (n,), uint8."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (path for path in sorted(root.rglob("*.py")) if not {"site-packages", "test"} & set(path.parts))
    text = bytearray()
    for path in files:
        text += path.read_bytes()
        if len(text) > _TEXT_BYTES:
            break
    return torch.frombuffer(text, dtype=torch.uint8)


def _add(bits: Bits, held: list[Tensor], new: list[Tensor], name: str, device: torch.device) -> None:
    """Add the bits of a step: of the weights that are held, and the new ones."""
    bits.weights += sum(weight.numel() for weight in new)
    bits.plain += _VECTOR_BITS * sum(weight.numel() for weight in new if weight.dim() == 1)
    (old, _), (fresh, nbytes) = (_copies([each for each in some if each.dim() > 1], name) for some in (held, new))
    bits.plain += 8 * nbytes
    piece_numel = HOST_PIECE_NUMEL if device.type == "cpu" else DEVICE_PIECE_NUMEL
    for pair in zip(old.split(piece_numel), fresh.split(piece_numel), strict=True):
        _code(bits, *pair)


def _copies(weights: list[Tensor], name: str) -> tuple[Tensor, int]:
    """The copies of matrices in a format, flat, and the bytes of their scales."""
    if name == "bf16":
        return torch.cat([weight.reshape(-1) for weight in weights]).bfloat16(), 0
    pairs = [SCALED_FORMATS[name].quantize(weight, None) for weight in weights]
    codes = torch.cat([own.view(torch.uint8).view(-1) for own, _ in pairs]).view(torch.float8_e4m3fn)
    return codes, sum(scales.nbytes for _, scales in pairs)


def _code(bits: Bits, held: Tensor, new: Tensor) -> None:
    start_s = _now_s(held)
    payload = lossless.encode(held, new)
    bits.encode_s.append((_now_s(held) - start_s) / len(held))
    start_s = _now_s(held)
    decoded = lossless.decode(held, payload)
    bits.decode_s.append((_now_s(held) - start_s) / len(held))
    assert torch.equal(decoded.view(torch.uint8), new.view(torch.uint8)), "the new values come out"
    bits.coded += 8 * len(payload)
    bits.unchanged += float((held.view(torch.uint8) == new.view(torch.uint8)).view(len(held), -1).all(1).sum())


def _now_s(values: Tensor) -> float:
    if values.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def _table(bench: Bench) -> Table:
    columns = ("copies", "lr", "unchanged", "bits a weight", "of it vectors and scales")
    rows = [
        [name, f"{rate:g}", f"{found.unchanged / found.weights:.1%}", f"{found.total:.3f}",
         f"{found.plain / found.weights:.3f}"]
        for name in FORMATS for rate in RATES if (found := bench.bits.get((rate, name)))
    ]  # fmt: skip
    return Table(columns=columns, rows=rows)


def _save(record: Record, bench: Bench) -> None:
    record.save({"bits": _table(bench)})


BENCHMARK = Benchmark(
    measures=("laconic.codec.contexts", "laconic.codec.lossless", "laconic.codec.lossless_numba"),
    name="lossless",
    prepare=lambda options: Bench(QUICK if options.quick else FULL),
    save=_save,
    details=lambda bench: _table(bench).markdown(),
)


@BENCHMARK.row("bits")
def bits_row(bench: Bench) -> Row:
    """Bits a weight of each rate, all included."""
    found = bench.measure()
    own = [found[rate, "bf16"].total for rate in RATES]
    float8 = found[FLOAT8_RATE, FLOAT8].total
    recipe, coded = bench.recipe, [each for (_, name), each in found.items() if name == "bf16"]
    encode_s = statistics.median(seconds for each in coded for seconds in each.encode_s)
    decode_s = statistics.median(seconds for each in coded for seconds in each.decode_s)
    return Row(
        claim=(
            f"bits a weight, lossless, {bench.num_parameters / 1e6:.1f} M parameters, bf16 copies at lr "
            f"{_in_words(RATES)}; float8 copies at {FLOAT8_RATE:g}"
        ),
        measured=f"{' / '.join(f'{bits:.2f}' for bits in own)}; {float8:.2f}",
        note=(
            f"{recipe.llama}, bytes of Python's sources, AdamW on fp32 weights: {recipe.first} steps at 1e-3 (loss "
            f"{bench.loss:.2f}), then {recipe.tune} steps from there at each other rate; means of the last "
            f"{recipe.measured} steps of each; payloads decoded to the bit. On {bench.device.type}: encode "
            f"{encode_s * 1e9:.2f}, decode {decode_s * 1e9:.2f} ns a value, medians of payloads."
        ),
    )


def _in_words(rates: dict[float, float]) -> str:
    return " / ".join(f"{rate:g}" for rate in rates)


if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
