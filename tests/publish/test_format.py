"""The format against its twins in Python's integers: digests, gaps, places, and manifests that are refused."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.codec.kernels import kernels_for
from laconic.codec.lossless import encode_in_pieces
from laconic.publish import changes
from laconic.publish.changes import (
    EncodedPart,
    added,
    bits_of,
    decode_dense,
    decode_gaps,
    decode_lossless,
    digest_at,
    encode_gaps,
    put,
    run_digest,
    take_over,
    taken,
)
from laconic.publish.holdings import HeldRegion, Holding, shares_of
from laconic.publish.staging import StagedTensor
from laconic.publish.versions import Encoding, PublishedPart, PublishedTensor, PublishError, VersionManifest
from laconic.store.folder import DamagedError, FileRecord
from tests.reference import publish as reference


@pytest.fixture(params=["loops", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a CPU goes through changes: in loops of numba, or in torch's operations, as where numba is missing."""
    assert kernels_for(torch.ones(1), "publish.changes_numba") is not None
    if request.param == "plain":
        monkeypatch.setattr(changes, "kernels_for", lambda tensor, name: None)
    return str(request.param)


def random(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    return (values * 100).to(dtype)


def patterns(values: Tensor) -> list[int]:
    modulus = 1 << (8 * values.element_size())
    return [number % modulus for number in bits_of(values).tolist()]


@pytest.mark.parametrize("numel", [0, 1, 3, 4100])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int64])
@pytest.mark.usefixtures("way")
def test_what_is_taken_over_is_noted(dtype: torch.dtype, numel: int) -> None:
    """Also where a tensor begins between two words of memory, ends within one, or has gaps."""
    generator = torch.Generator().manual_seed(numel)
    for begin, step in ((0, 1), (1, 1), (0, 2)):
        both = torch.randint(-3, 3, (2, 2 * numel + 4), dtype=dtype, generator=generator)
        held, new = both[:, begin : begin + step * numel : step]
        expected = [(place, old) for place, (old, fresh) in enumerate(zip(held.tolist(), new.tolist(), strict=True))
                    if old != fresh]  # fmt: skip
        places, before = take_over(held, new)
        assert list(zip(places.tolist(), before.tolist(), strict=True)) == expected
        assert torch.equal(held, new)
        assert before.dtype == dtype


@pytest.mark.parametrize("places_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_are_taken_and_put_bit_by_bit(dtype: torch.dtype, places_dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, float("nan"), -0.0], dtype=dtype)
    bits_of(values)[1] ^= 1  # a NaN like no other
    places = torch.tensor([0, 7, 11], dtype=places_dtype)
    for tensor in (torch.zeros(3, 4, dtype=dtype), torch.zeros(4, 3, dtype=dtype).t()):
        version = tensor._version
        put(tensor, places, values)
        assert tensor._version > version, "readers that trust a model look at it"
        assert torch.equal(bits_of(taken(tensor, places)), bits_of(values))
        assert int((tensor == 0).sum()) == 10
    with pytest.raises(IndexError):
        put(torch.zeros(3, dtype=dtype), places, values)
    with pytest.raises(IndexError):
        taken(torch.zeros(3, dtype=dtype), places)
    for wrong in (values[:2], values.double()):  # too few, and of another dtype
        with pytest.raises((IndexError, RuntimeError)):
            put(torch.zeros(12, dtype=dtype), places, wrong)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("numel", [0, 1, 101])
@pytest.mark.usefixtures("way")
def test_digests_equal_their_twin_and_follow_changes(dtype: torch.dtype, numel: int) -> None:
    values, start = random(numel, dtype), 10**10
    assert run_digest(values, start) == reference.digest(patterns(values), start)
    cut = numel // 3
    assert added(run_digest(values[:cut], start), run_digest(values[cut:], start + cut)) == run_digest(values, start)
    places = torch.arange(0, numel, 3)
    changed = values.clone()
    changed[places] = random(len(places), dtype, seed=1)
    followed = added(run_digest(values), -digest_at(places, values[places]), digest_at(places, changed[places]))
    assert followed == run_digest(changed)


def test_a_digest_sees_single_bits_exchanges_and_small_steps() -> None:
    values = random(1 << 16, torch.bfloat16)
    digest = run_digest(values)
    for place, bit in ((0, 0), (65535, 15), (4097, 7)):
        flipped = values.clone()
        bits_of(flipped)[place] ^= 1 << bit if bit < 15 else -(1 << 15)
        assert run_digest(flipped) != digest
    exchanged = values.clone()
    exchanged[[3, 4]] = values[[4, 3]]
    assert run_digest(exchanged) != digest
    stepped = values.clone()
    bits_of(stepped)[10:13] += torch.tensor([1, -2, 1], dtype=torch.int16)  # no weighted sum of places sees this
    assert run_digest(stepped) != digest


@pytest.mark.parametrize(
    ("places", "dtype"),
    [
        ([], torch.uint8),
        ([0], torch.uint8),
        ([9_000_000_000], torch.uint8),
        ([5, 6, 5 + 255, 260 + 255, 515 + 256, 771 + 510], torch.uint8),
        ([0, 65_535, 65_535 * 3, 65_535 * 5 + 7], torch.uint16),
    ],
)
@pytest.mark.usefixtures("way")
def test_gaps_equal_their_twin(places: list[int], dtype: torch.dtype) -> None:
    positions, values = torch.tensor(places, dtype=torch.int64), random(len(places), torch.bfloat16)
    encoded = encode_gaps(positions, values)
    gaps, jump = encoded.tensors[".gaps"], torch.iinfo(dtype).max
    assert gaps.dtype == dtype
    assert gaps.tolist() == reference.gaps_of(places, jump)
    assert reference.positions_of(encoded.start[0], gaps.tolist(), jump) == places
    found, new = decode_gaps(*stored(encoded), 10**10, torch.bfloat16)
    assert found.tolist() == places
    assert torch.equal(new, values)


def stored(encoded: EncodedPart) -> tuple[PublishedPart, dict[str, Tensor]]:
    return encoded.stored_as("f", "k"), {"k" + ending: tensor for ending, tensor in encoded.tensors.items()}


@pytest.mark.usefixtures("way")
def test_parts_with_other_tensors_than_their_manifest_says_are_damage() -> None:
    places, values = torch.tensor([2, 9]), random(2, torch.bfloat16)
    part, data = stored(encode_gaps(places, values))
    wrong: list[dict[str, Tensor]] = [
        {},
        {**data, "k.values": values[:1]},
        {**data, "k.values": values.float()},
        {**data, "k.gaps": torch.tensor([0, 0], dtype=torch.uint8)},
        {**data, "k.gaps": torch.tensor([0, 8], dtype=torch.uint8)},  # beyond the end
        {**data, "k.gaps": torch.tensor([0, 255], dtype=torch.uint8)},
        {**data, "k.gaps": torch.tensor([0, 7], dtype=torch.int64)},
        {**data, "k.gaps": torch.tensor([[0, 7]], dtype=torch.uint8)},
    ]
    for each in wrong:
        with pytest.raises(DamagedError):
            decode_gaps(part, each, 10, torch.bfloat16)
    dense, data = stored(EncodedPart(Encoding.DENSE, (3,), (4,), {"": random(4, torch.bfloat16)}))
    for size, dtype in ((3, torch.bfloat16), (4, torch.float16)):
        with pytest.raises(DamagedError):
            decode_dense(dense, {"k": random(size, dtype)}, torch.bfloat16)
    held = random(1000, torch.bfloat16)
    new = (held.float() * 1.01).bfloat16()
    payload = encode_in_pieces(held, new).read()
    lossless, data = stored(EncodedPart(Encoding.LOSSLESS, (0,), (1000,), {"": payload}))
    assert torch.equal(decode_lossless(lossless, data, held), new)
    for other in (payload[:-1], payload[:2], random(1000, torch.bfloat16)):
        with pytest.raises(DamagedError):
            decode_lossless(lossless, {"k": other}, held)


def holding(*shape: int, is_buffer: bool = False) -> Holding:
    """A tensor of which this rank holds nothing."""
    return Holding(shape=shape, dtype=torch.float32, regions=(), is_buffer=is_buffer)


def test_a_run_of_what_a_rank_holds() -> None:
    """Boxes of other mesh axes have no runs."""
    whole = torch.arange(60.0).view(6, 10)
    held = HeldRegion(((15,), (40,)), whole.view(-1)[15:55], lambda: iter([]))
    holding = Holding(shape=(6, 10), dtype=whole.dtype, regions=(held,), is_buffer=True)
    for start, shape in ((0, (10,)), (10, (2, 5)), (50, (5, 2))):
        run = holding.run(start, shape)
        end = start + torch.Size(shape).numel()
        assert (run.shape, run.is_buffer) == (shape, True)
        found = [value for region in run.regions for value in region.values(0, region.place[1][0]).tolist()]
        assert found == [float(place) for place in range(max(15, start), min(55, end))]
    box = HeldRegion(((1, 2), (3, 4)), whole[1:4, 2:6])
    with pytest.raises(PublishError, match="is cut by another mesh axis"):
        Holding(shape=(6, 10), dtype=whole.dtype, regions=(box,)).run(0, (10,))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("numel", [1, 4096, 8192, 30_001])
def test_holders_of_one_run_divide_it(num_ranks: int, numel: int) -> None:
    told = [{"w": [[[7], [numel]], [[0], [7]]], "b": [[[0], [numel]]]}] * num_ranks
    tensors = {"w": holding(numel + 7), "b": holding(numel, is_buffer=True)}
    by_rank = [shares_of(told, tensors, rank) for rank in range(num_ranks)]
    runs = sorted((s.begin, s.end) for shares in by_rank for s in shares.get("w", ()) if s.region == 0)
    assert runs[0][0] == 0
    assert runs[-1][1] == numel
    assert all(before[1] == after[0] and after[1] - after[0] >= 4096 for before, after in itertools.pairwise(runs))
    assert [sum(share.region == 1 for share in shares.get("w", ())) for shares in by_rank].count(1) == 1
    assert [len(shares.get("b", ())) for shares in by_rank] == [1] + [0] * (num_ranks - 1), "a buffer is not cut"
    for held, message in (([[[0], [6]]], "hold 6 of the 12 elements of w"), ([[[0], [12]], [[8], [4]]], "hold 16 of")):
        with pytest.raises(PublishError, match=message):
            shares_of([{"w": [run]} for run in held], {"w": holding(3, 4)}, 0)


# -- manifests ---------------------------------------------------------------------------------------------------------


def manifest() -> VersionManifest:
    part = PublishedPart(file="patch-00000.safetensors", key="w@3", encoding=Encoding.GAPS, start=(3,), sizes=(2,))
    whole = PublishedPart(file="whole-00000.safetensors", key="w", encoding=Encoding.DENSE, start=(0, 0), sizes=(3, 4))
    tensor = PublishedTensor(
        name="w", shape=(3, 4), dtype="bfloat16", before="0" * 16, after="f" * 16, patch=(part,), whole=(whole,)
    )
    files = tuple(FileRecord(name=each.file, size_bytes=10, sha256="0" * 64) for each in (part, whole))
    return VersionManifest(
        files=files, run="run", version=3, base=2, is_whole=True, step=None, names="huggingface", tensors=(tensor,)
    )


def forged(**changes: Any) -> dict[str, Any]:
    """The JSON of `manifest` with other values at places such as `tensors.0.shape`."""
    body = copy.deepcopy(json.loads(json.dumps(manifest().to_json())))
    for place, value in changes.items():
        *path, last = [int(step) if step.isdigit() else step for step in place.split("__")]
        inner: Any = body
        for step in path:
            inner = inner[step]
        if value is ...:
            del inner[last]
        else:
            inner[last] = value
    return body


TRICKS = ("../w", "/etc/passwd", "a/b", "..", ".", "", "manifest.json", "a\\b", "a\x00b", ".hidden", "x" * 300)
FORGERIES: list[dict[str, Any]] = [
    *({"files__0__name": name, "tensors__0__patch__0__file": name} for name in TRICKS),
    {"files__0__sha256": None},
    {"files__1__name": "patch-00000.safetensors"},
    {"tensors__0__patch__0__file": "other.safetensors"},
    {"version": 0},
    {"version": True},
    {"version": 2**70},
    {"base": 3},
    {"base": None},
    {"base": None, "is_whole": False},
    {"names": "others"},
    {"more": 1},
    {"tensors": ...},
    {"tensors__0__shape": [3, -4]},
    {"tensors__0__shape": [3, 2]},
    {"tensors__0__shape": [2**70, 4]},
    {"tensors__0__dtype": "object"},
    {"tensors__0__after": "xyz"},
    {"tensors__0__before": None},
    {"tensors__0__patch__0__start": [-1]},
    {"tensors__0__patch__0__start": [11]},
    {"tensors__0__patch__0__start": []},
    {"tensors__0__patch__0__start": [0, 3], "tensors__0__patch__0__sizes": [1, 1]},
    {"tensors__0__patch__0__encoding": "pickle"},
    {"tensors__0__whole__0__sizes": [3, 3]},
    {"tensors__0__whole__0__sizes": [12]},
    {"tensors__0__whole__0__encoding": "lossless-1"},
]


def test_forged_manifests_are_refused(tmp_path: Path) -> None:
    """Their checksum is right, as a forger would make it. One that is not forged comes back."""
    manifest().write(tmp_path / "manifest.json")
    assert VersionManifest.read(tmp_path / "manifest.json") == VersionManifest.from_json(forged()) == manifest()
    for forgery in FORGERIES:
        with pytest.raises((ValueError, TypeError, KeyError)):
            pytest.fail(f"{forgery}: {VersionManifest.from_json(forged(**forgery))}")


def test_of_changes_in_one_place_the_newest_counts() -> None:
    """Four patches of a hundred places each, at fifty places that they share."""
    published = PublishedTensor(
        name="w", shape=(200,), dtype="bfloat16", before="0" * 16, after="0" * 16, patch=(), whole=()
    )
    staged, wanted = StagedTensor(published, torch.zeros(200, dtype=torch.bfloat16), "0" * 16), {}
    for patch in range(4):
        places = torch.arange(50 * (patch % 2), 50 * (patch % 2) + 100)
        values = torch.full((100,), float(patch + 1), dtype=torch.bfloat16)
        staged._change(places, values)
        wanted |= dict(zip(places.tolist(), values.tolist(), strict=True))
    found = dict(zip(*(each.tolist() for each in staged.changes), strict=True))
    assert found == wanted
    assert list(found) == sorted(found)
