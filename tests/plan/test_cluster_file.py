"""The cluster file: reading, refusing, the tables of devices and networks, and writing."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laconic.config import ConfigError
from laconic.plan.cluster_file import load_cluster, parse_cluster, to_toml
from laconic.plan.cluster_spec import DEFAULT_HEADER_FACTOR, DTYPES
from laconic.plan.known import device_named, devices, find_device, find_network, networks
from laconic.plan.units import format_number, format_quantity, parse_quantity

TABLE = """
nodes = 2
ranks_per_node = 8
device = "a100 sxm-80gb"
network = "10gbe"
host_memory_bytes = "1 TB"
"""
FIGURES = """
nodes = 3
ranks_per_node = 2
device_memory_bytes = "16 GiB"
device_memory_bytes_per_s = 2e10
host_memory_bytes = 32000000000
host_to_device_bytes_per_s = "10 GB/s"
device_to_host_bytes_per_s = "80 Gbit/s"
ranks_per_host_link = 2
local_bytes_per_s = 1500000000
local_latency_s = "150 us"
wire_bits_per_s = "200mbit"
wire_latency_s = 0.5e-3

[device_flops_per_s]
float32 = "50 GFLOP/s"
"""


def test_figures_and_their_units() -> None:
    spec = parse_cluster(FIGURES)
    assert (spec.ranks, spec.device_memory_bytes, spec.host_memory_bytes) == (6, 16 * 2**30, 32 * 10**9)
    assert spec.host_to_device_bytes_per_s == spec.device_to_host_bytes_per_s == 10e9
    assert spec.host_bytes_per_s(to_device=True) == spec.host_bytes_per_s(to_device=False) == 5e9
    assert (spec.wire_bits_per_s, spec.wire_latency_s) == (200e6, 500e-6)
    assert spec.bytes_per_s("node") == spec.bytes_per_s("island") == pytest.approx(200e6 / 8 / DEFAULT_HEADER_FACTOR)
    assert (spec.bytes_per_s("local"), spec.latency_s("local"), spec.latency_s("node")) == (1.5e9, 150e-6, 500e-6)
    assert spec.flops_per_s(torch.float32) == spec.flops_per_s("float32") == 50e9
    with pytest.raises(ConfigError, match=r"device_flops_per_s\.bfloat16 is missing; .*has float32"):
        spec.flops_per_s(torch.bfloat16)
    with pytest.raises(ConfigError, match="host_memory_bytes = 5 must lie between 1 MB and 1 PB"):
        dataclasses.replace(spec, host_memory_bytes=5)
    with pytest.raises(ConfigError, match=r"device_flops_per_s.int8 is unknown; use float32"):
        dataclasses.replace(spec, device_flops_per_s={"int8": 1e12})


def test_the_tables_fill_what_the_file_leaves_out() -> None:
    spec = parse_cluster(TABLE)
    assert (spec.device, spec.network) == ("A100 SXM 80GB", "10 GbE")
    assert spec.flops_per_s("bfloat16") == pytest.approx(0.82 * 312e12)
    assert spec.device_attention_share * spec.flops_per_s("bfloat16") == pytest.approx(0.6 * 312e12)
    assert spec.wire_bits_per_s == pytest.approx(0.97 * 10e9)
    several = parse_cluster(TABLE.replace("10gbe", "8 x InfiniBand NDR"))  # of a node: they add up
    assert several.wire_bits_per_s == pytest.approx(8 * 0.9 * 400e9)
    assert spec.local_bytes_per_s == pytest.approx(0.8 * 300e9)  # NVLink 3
    assert spec.host_to_device_bytes_per_s == pytest.approx(0.8 * 31.5e9)  # PCIe 4
    assert 79e9 < spec.device_memory_bytes < 80 * 2**30
    changed = 'local_network = "PCIe 3 x16"\nhost_link = "PCIe 5 x16"\nwire_latency_s = "1 ms"\n'
    given = parse_cluster(f'{TABLE}{changed}[device_flops_per_s]\nbfloat16 = "250 TFLOP/s"')
    assert (given.flops_per_s("bfloat16"), given.flops_per_s("float16")) == (250e12, spec.flops_per_s("float16"))
    assert (given.wire_latency_s, given.wire_bits_per_s) == (1e-3, spec.wire_bits_per_s)
    assert given.local_bytes_per_s == pytest.approx(0.8 * 15.75e9)
    assert given.host_to_device_bytes_per_s == pytest.approx(0.8 * 63e9)
    assert given.sources["wire_latency_s"] == given.sources["device_flops_per_s.bfloat16"] == "given"
    assert spec.sources["device_flops_per_s.bfloat16"].startswith("table: 82% of 312 TFLOP/s (A100 SXM 80GB; NVIDIA")


@pytest.mark.parametrize("text", [TABLE, FIGURES, TABLE.replace("nodes = 2", "nodes = 1")])
def test_a_written_file_reads_back_equal_and_names_its_sources(text: str) -> None:
    spec = parse_cluster(text)
    written = to_toml(spec)
    assert parse_cluster(written) == spec
    figures = [line for line in written.splitlines() if line.partition(" ")[0] in (*spec.sources, *DTYPES)]
    assert len(figures) == len(spec.sources)
    assert all("given" in line or "table: " in line for line in figures)


def test_one_node_needs_no_wire_and_one_rank_no_neighbour() -> None:
    alone = FIGURES.replace("nodes = 3", "nodes = 1").replace("ranks_per_node = 2", "ranks_per_node = 1")
    alone = alone.replace("ranks_per_host_link = 2", "")
    kept = [line for line in alone.splitlines() if not line.startswith(("wire_", "local_"))]
    spec = parse_cluster("\n".join(kept))
    assert (spec.ranks, parse_cluster("\n".join(['device = "a CPU of ours"', *kept])).device) == (1, "a CPU of ours")
    for level, key in (("node", "wire_bits_per_s"), ("local", "local_bytes_per_s")):
        with pytest.raises(ConfigError, match=f"{key} is missing; give the rate"):
            spec.bytes_per_s(level)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"wire_bits_per_s is missing; give the rate .* or `network`"):
        dataclasses.replace(spec, nodes=2)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("a100 sxm-80gb", "H100", "device = 'H100' is not in the table; the nearest is 'H100 SXM'.*themselves"),
        ("10gbe", "0 x 10 GbE", "network = '0 x 10 GbE' is not in the table; the nearest is"),
        ('device = "a100 sxm-80gb"', "", "device_memory_bytes is missing"),
        ('"1 TB"', '"1 TB"\nhost_link = "ISA"', "host_link = 'ISA' is not in the table"),
        ("a100 sxm-80gb", "MI250X", "local_bytes_per_s is missing; give the rate .* `local_network`"),
        ("nodes = 3", "node = 3", "unknown key `node`; the nearest valid key is `nodes`"),
        ("nodes = 3", "", "nodes is missing; give the number of machines"),
        ("nodes = 3", "nodes = 0", "nodes = 0 must be at least 1"),
        ("nodes = 3", "nodes = 2.0", "`nodes` must be an integer, got 2.0"),
        ("nodes = 3", "nodes = 99999999999999999999", "nodes is an integer of 67 bits"),
        ('"16 GiB"', "0", "device_memory_bytes = 0 must lie between 1 MB and 1 PB"),
        ('"16 GiB"', "nan", "device_memory_bytes = nan must be an integer"),
        ('"16 GiB"', "true", "device_memory_bytes = True must be a number of bytes, or a text such as '80 GB'"),
        ('"16 GiB"', '"16 GB/s"', "device_memory_bytes = '16 GB/s' must be a number of bytes"),
        ('device_memory_bytes = "16 GiB"', "", "device_memory_bytes is missing; give the memory of one device"),
        ("2e10", "2e16", r"device_memory_bytes_per_s = 2e\+16 must lie between 1 kB/s and 1 PB/s"),
        ('"200mbit"', '"200 kB"', "wire_bits_per_s = '200 kB' must be a number of bits per second, or a text such as"),
        ("0.5e-3", "0", "wire_latency_s = 0.0 must lie between 1 ns and 10 s"),
        ("wire_latency_s = 0.5e-3", "", "wire_latency_s is missing; give the latency between nodes, or `network`"),
        ("host_link = 2", "host_link = 3", "ranks_per_host_link = 3 must be at most ranks_per_node = 2"),
        ("host_link = 2", "host_link = 2\nwire_header_factor = 0.9", r"wire_header_factor = 0.9 must lie in \[1, 2\]"),
        ('float32 = "50 GFLOP/s"', "", "device_flops_per_s = {} must have a rate of float32 or"),
        ('float32 = "50 GFLOP/s"', "fp32 = 1e12", "unknown key `device_flops_per_s.fp32`; the nearest is `float32`"),
        ('float32 = "50 GFLOP/s"', "float32 = 0", "device_flops_per_s.float32 = 0.0 must lie between 1 MFLOP"),
        ('[device_flops_per_s]\nfloat32 = "50 GFLOP/s"', "device_flops_per_s = 5", "is a section .* got 5"),
        ("nodes = 3", "nodes = ", "not valid TOML"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(old: str, new: str, message: str) -> None:
    text = FIGURES if old in FIGURES else TABLE
    assert text.count(old) == 1
    with pytest.raises(ConfigError, match=message) as refused:
        parse_cluster(text.replace(old, new))
    assert "\n" not in str(refused.value)


def test_a_file_is_named_in_its_errors(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    with pytest.raises(ConfigError, match=r"cannot read the cluster file .*cluster.toml"):
        load_cluster(path)
    path.write_text("nodes = 0")
    with pytest.raises(ConfigError, match=r"cluster.toml: ranks_per_node is missing"):
        load_cluster(path)
    path.write_text(TABLE)
    assert load_cluster(path).ranks == 16


def test_the_tables_are_whole_and_their_names_lead_to_them() -> None:
    words = [word.lower() for each in devices().values() for word in (each.name, *each.also)]
    assert len(set(words)) == len(words)
    with pytest.raises(ValueError, match=r"nearest is 'RTX 3080.*laconic doctor --out"):
        find_device("RTX 3080X")
    for name, device in devices().items():
        assert find_device(name.lower().replace(" ", "-")) is device
        assert all(find_device(other) is device for other in device.also)
        assert set(device.peak_flops_per_s) <= set(DTYPES)
        assert 10e9 < device.memory_bytes < 275e9
        assert 2e11 < device.memory_bytes_per_s < 1e13
        assert 0.5 <= device.matmul_efficiency < 1
        assert device.peak_flops_per_s["float16"] > device.peak_flops_per_s["float32"]
        assert device.local is None or find_network(device.local)[0] == 1
        assert find_network(device.host_link)[1].name.startswith("PCIe")
        assert re.match(r"NVIDIA, |AMD, |[a-z-]+\.com, ", device.source)
    for name, network in networks().items():
        assert find_network(name) == (1, network)
        assert find_network(f"4 x {name}") == (4, network)
        assert 0.5 <= network.efficiency < 1


TORCH_NAMES = {
    "NVIDIA H100 80GB HBM3": "H100 SXM", "NVIDIA H100 PCIe": "H100 PCIe", "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H200": "H200", "NVIDIA A100-SXM4-80GB": "A100 SXM 80GB", "NVIDIA A100-PCIE-40GB": "A100 PCIe 40GB",
    "Tesla V100-SXM2-32GB": "V100 SXM 32GB", "Tesla T4": "T4", "NVIDIA L4": "L4", "NVIDIA L40S": "L40S",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX PRO 6000",
    "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada", "NVIDIA RTX A6000": "RTX A6000", "NVIDIA RTX A5000": "RTX A5000",
    "NVIDIA RTX A4000": "RTX A4000", "AMD Instinct MI300X": "MI300X", "AMD Instinct MI325X": "MI325X",
    **{f"NVIDIA GeForce {name}": name for name in devices() if re.match(r"RTX \d{4}( Ti)?( SUPER)?$", name)},
}  # fmt: skip
OF_ANOTHER_SPEED = [
    "NVIDIA GeForce GTX 1080", "NVIDIA GeForce RTX 5090 D", "NVIDIA GeForce RTX 4090 D",
    *(f"{name} Laptop GPU" for name in TORCH_NAMES if "RTX" in name), "NVIDIA GeForce RTX 3070 Ti",
    "NVIDIA GeForce RTX 4060 Ti", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition", "NVIDIA RTX A6000-24Q", "Quadro RTX 6000", "NVIDIA GB10",
]  # fmt: skip


def test_names_of_torch_lead_to_devices() -> None:
    for torch_name, name in TORCH_NAMES.items():
        found = device_named(torch_name)
        assert found is not None
        assert found.name == name
    for torch_name in OF_ANOTHER_SPEED:
        assert device_named(torch_name) is None, torch_name


def test_peaks_are_those_of_the_data_sheets() -> None:
    peaks = {"H100 SXM": 989e12, "H100 PCIe": 756e12, "A100 SXM 80GB": 312e12, "L40S": 362e12, "MI300X": 1307.4e12}
    assert {name: devices()[name].peak_flops_per_s["bfloat16"] for name in peaks} == peaks
    cards = [each for each in devices().values() if re.match(r"RTX \d{4}( Ti)?( SUPER)?$", each.name)]
    assert len(cards) > 10
    for each in cards:  # of GeForce: half of the rate where sums are in float32
        assert each.peak_flops_per_s["bfloat16"] == each.peak_flops_per_s["float16"]
        assert each.peak_flops_per_s["bfloat16"] == pytest.approx(2 * each.peak_flops_per_s["float32"], rel=0.01)


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("80GB", "B", 80e9), ("1.5 TiB", "B", 1.5 * 2**40), ("10 Gbps", "bit/s", 10e9), ("1.25 GB/s", "bit/s", 10e9),
        ("25 Gb/s", "B/s", 3.125e9), ("1gbit", "bit/s", 1e9), ("989 TFLOPS", "FLOP/s", 989e12), ("3e-5 s", "s", 3e-5),
        ("20 us", "s", 20e-6), ("20 µs", "s", 20e-6), ("7 ms", "s", 7e-3), ("12 B", "B", 12),
    ],
)  # fmt: skip
def test_units(text: str, unit: str, value: float) -> None:
    assert parse_quantity(text, unit) == pytest.approx(value)  # type: ignore[arg-type]


def test_numbers_are_as_people_write_them() -> None:
    assert [format_number(each) for each in (0.4718, 63.84, 3709.6, 12_431)] == ["0.472", "63.8", "3,710", "12,400"]
    assert format_quantity(9378.4, "s") == "9,378 s"


@given(st.floats(1e-9, 1e17), st.sampled_from(["B", "B/s", "bit/s", "FLOP/s", "s"]))
def test_written_quantities_read_back(value: float, unit: str) -> None:
    text = format_quantity(value, unit)  # type: ignore[arg-type]
    assert parse_quantity(text.replace(",", ""), unit) == pytest.approx(value, rel=1e-3)  # type: ignore[arg-type]
