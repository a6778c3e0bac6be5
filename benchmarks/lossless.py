"""How many bits lossless differences of weights take in real training: codec/lossless.py, one process, plain PyTorch.

    python -m benchmarks.lossless            both rows, recorded in RESULTS.md: a minute on a GPU, hours on 2 cores
    python -m benchmarks.lossless --quick    a tiny model and few steps, printed only

A Llama of 10.8 million parameters learns bytes of Python's own sources, with AdamW on fp32 weights and bf16 copies of
them in forward and backward, as FSDP2 with `param_dtype=bf16` does it. It trains at 1e-3; from its last state short
runs go on at the smaller rates of fine-tuning and of reinforcement learning. At the end of each, a step's copies are
coded against those before it. Float8 and NVFP4 copies are those of laconic's scaled formats, of the same weights.

[Note: Bits a weight]
All bits of all payloads, with the vectors and the scales of float8 and FP4 formats as they are, over all weights. The
entropy is that of the differences under the very contexts of the code, without any bits for scales and tables.
"""

from __future__ import annotations

import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.llama import Llama, PlainLlama, loss_of
from laconic.codec import lossless
from laconic.codec.patterns import E2M1_PAIRS, PatternForm
from laconic.codec.payload import DEVICE_PIECE_NUMEL, HOST_PIECE_NUMEL
from laconic.codec.scaled import SCALED_FORMATS
from laconic.compare.markdown import markdown
from tests.support.measure import Benchmark
from tests.support.record import Record, Row, write_section

TARGETS = {1e-3: 3.5, 3e-4: 2.5, 1e-4: 1.7, 1e-5: 0.8, 1e-6: 0.3}
"""The bits a weight that bf16 copies may take, by learning rate."""
FLOAT8_RATE, FLOAT8_TARGET = 1e-4, 0.6
ENTROPY_MARGIN = 0.5
FLOAT8, NVFP4 = "fp8_128x128", "nvfp4"
FORMATS = ("bf16", FLOAT8, NVFP4)
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
    without_last: float = 0.0
    """The bits of payloads for receivers that do not keep the last difference."""
    plain: float = 0.0
    """The bits of vectors and of the format's scales."""
    parts: list[float] = field(default_factory=lambda: [0.0] * len(lossless.PartBytes._fields))
    entropy: float = 0.0
    unchanged: float = 0.0
    encode_s: list[float] = field(default_factory=list)
    """The seconds a value of each payload."""
    decode_s: list[float] = field(default_factory=list)

    @property
    def total(self) -> float:
        """Bits a weight, all included."""
        return (self.coded + self.plain) / self.weights

    @property
    def entropy_bits(self) -> float:
        """The entropy under the same contexts, in bits a weight."""
        return self.entropy / self.weights


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
            first, *others = TARGETS
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
        versions: list[list[Tensor]] = []
        for step in range(steps):
            if step >= steps - self.recipe.measured - 2:
                versions = [*versions[-2:], [weight.clone() for weight in run.weights]]
            run.step(rates(step))
            if step >= steps - self.recipe.measured:
                for name in FORMATS:
                    bits = self.bits.setdefault((rate, name), Bits())
                    _add(bits, [*versions[-2:], run.weights], name, self.device)
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


def _add(bits: Bits, versions: list[list[Tensor]], name: str, device: torch.device) -> None:
    """Add the bits of a step: three versions of the weights, of which the second is held and the last is new."""
    bits.weights += sum(weight.numel() for weight in versions[-1])
    matrices = [[weight for weight in version if weight.dim() > 1] for version in versions]
    bits.plain += _VECTOR_BITS * sum(weight.numel() for weight in versions[-1] if weight.dim() == 1)
    before, held, new = (_copies(version, name) for version in matrices)
    bits.plain += 8 * new[1]
    form = E2M1_PAIRS if name == NVFP4 else None
    histograms: list[Tensor] = []
    for own in zip(*(_pieces(each[0], device) for each in (before, held, new)), strict=True):
        _code(bits, *own, form=form, histograms=histograms)
    bits.entropy += _entropy(histograms)


def _copies(weights: list[Tensor], name: str) -> tuple[Tensor, int]:
    """The copies of matrices in a format, flat, and the bytes of their scales."""
    if name == "bf16":
        return torch.cat([weight.reshape(-1) for weight in weights]).bfloat16(), 0
    own, codes, nbytes = SCALED_FORMATS[name], [], 0
    for weight in weights:
        scale = own.matrix_scale(own.largest_of(weight)) if own.has_matrix_scale else None
        of_matrix, scales = own.quantize(weight, scale)
        codes.append(of_matrix.view(torch.uint8).view(-1))
        nbytes += scales.nbytes + (0 if scale is None else scale.nbytes)
    flat = torch.cat(codes)
    return (flat if name == NVFP4 else flat.view(torch.float8_e4m3fn)), nbytes


def _pieces(flat: Tensor, device: torch.device) -> Iterator[Tensor]:
    """Runs of values that are coded at once."""
    return iter(flat.split(HOST_PIECE_NUMEL if device.type == "cpu" else DEVICE_PIECE_NUMEL))


def _code(
    bits: Bits, before: Tensor, held: Tensor, new: Tensor, *, form: PatternForm | None, histograms: list[Tensor]
) -> None:
    last = lossless.last_difference(before, held, form=form)
    start_s = _now_s(held)
    payload = lossless.encode(held, new, last, form=form)
    bits.encode_s.append((_now_s(held) - start_s) / len(last))
    start_s = _now_s(held)
    decoded = lossless.decode(held, payload, last, form=form)
    bits.decode_s.append((_now_s(held) - start_s) / len(last))
    assert torch.equal(decoded.view(torch.uint8), new.view(torch.uint8)), "the new values come out"
    bits.coded += 8 * len(payload)
    bits.without_last += 8 * len(lossless.encode(held, new, form=form))
    if len(payload) < new.nbytes:
        parts = lossless.part_bytes(payload, len(last))
        bits.parts = [sum_ + 8 * part for sum_, part in zip(bits.parts, parts, strict=True)]
    contexts, differences = lossless.differences_by_context(held, new, last, form=form)
    bits.unchanged += float((differences == 0).sum())
    pairs = contexts.long() * 2**20 + differences + 2**19
    histograms.append(torch.stack(pairs.unique(return_counts=True)).cpu())


def _now_s(values: Tensor) -> float:
    if values.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def _entropy(histograms: list[Tensor]) -> float:
    """The entropy of all differences, each given its context, in bits: of (2, k), pairs and how often they occur."""
    pairs, counts = torch.cat(histograms, dim=1)
    pairs, index = pairs.unique(return_inverse=True)
    sums = torch.zeros(len(pairs), dtype=torch.float64).index_add_(0, index, counts.double())
    contexts = pairs >> 20
    of_context = torch.zeros(int(contexts.max()) + 1, dtype=torch.float64).index_add_(0, contexts, sums)
    return float((sums * (of_context[contexts] / sums).log2()).sum())


def _table(bench: Bench) -> str:
    columns = (
        "copies", "lr", "unchanged", "entropy, same contexts", "bits a weight", "without the last difference",
        *(f"of it {name}" for name in lossless.PartBytes._fields), "vectors, formats' scales",
    )  # fmt: skip
    rows = []
    for name in FORMATS:
        for rate in TARGETS:
            if found := bench.bits.get((rate, name)):
                weights = found.weights
                without = (found.without_last + found.plain) / weights
                figures = found.entropy_bits, found.total, without, *(part / weights for part in found.parts)
                shown = [f"{figure:.3f}" for figure in (*figures, found.plain / weights)]
                rows.append([name, f"{rate:g}", f"{found.unchanged / weights:.1%}", *shown])
    return markdown(columns, rows, num_text_columns=1)


def _save(record: Record, bench: Bench) -> None:
    write_section(_SECTION, _table(bench))
    record.save()


BENCHMARK = Benchmark(
    measures=("laconic.codec.lossless", "laconic.codec.patterns"),
    name="lossless",
    prepare=lambda options: Bench(QUICK if options.quick else FULL),
    save=_save,
    details=_table,
)


@BENCHMARK.row("bits")
def bits_row(bench: Bench) -> Row:
    """Bits a weight of each rate, all included."""
    found = bench.measure()
    own = [found[rate, "bf16"].total for rate in TARGETS]
    float8 = found[FLOAT8_RATE, FLOAT8].total
    is_met = all(bits <= limit for bits, limit in zip(own, TARGETS.values(), strict=True)) and float8 <= FLOAT8_TARGET
    recipe, coded = bench.recipe, [each for (_, name), each in found.items() if name == "bf16"]
    encode_s = statistics.median(seconds for each in coded for seconds in each.encode_s)
    decode_s = statistics.median(seconds for each in coded for seconds in each.decode_s)
    return Row(
        claim=(
            f"bits a weight, lossless, {bench.num_parameters / 1e6:.1f} M parameters, bf16 copies at lr "
            f"{_in_words(TARGETS)}; float8 copies at {FLOAT8_RATE:g}"
        ),
        required=f"<= {' / '.join(map(str, TARGETS.values()))}; <= {FLOAT8_TARGET}",
        measured=f"{' / '.join(f'{bits:.2f}' for bits in own)}; {float8:.2f}",
        is_met=is_met,
        note=(
            f"{recipe.llama}, bytes of Python's sources, AdamW on fp32 weights: {recipe.first} steps at 1e-3 (loss "
            f"{bench.loss:.2f}), then {recipe.tune} steps from there at each other rate; means of the last "
            f"{recipe.measured} steps of each; payloads decoded to the bit. Plain torch on {bench.device.type}: encode "
            f"{encode_s * 1e9:.2f}, decode {decode_s * 1e9:.2f} ns a value, medians of payloads."
        ),
    )


@BENCHMARK.row("entropy")
def entropy(bench: Bench) -> Row:
    """Bits a weight above the entropy under the same contexts."""
    found = bench.measure()
    keys = [*((rate, "bf16") for rate in TARGETS), (FLOAT8_RATE, FLOAT8)]
    above = [found[key].total - found[key].entropy_bits for key in keys]
    return Row(
        claim=f"bits a weight above the entropy with the same context, at lr {_in_words(TARGETS)}; float8 copies",
        required=f"<= +{ENTROPY_MARGIN} each",
        measured=f"{' / '.join(f'{bits:+.2f}' for bits in above[:-1])}; {above[-1]:+.2f}",
        is_met=max(above) <= ENTROPY_MARGIN,
        note="entropies " + " / ".join(f"{found[key].entropy_bits:.3f}" for key in keys) + ", by counted differences.",
    )


def _in_words(rates: dict[float, float]) -> str:
    return " / ".join(f"{rate:g}" for rate in rates)


if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
