"""The wire and the nodes of a lab, and its results. Plain commands replace torchrun, to be quick."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from laconic.lab import Lab, LabUnavailable, RunResult
from laconic.lab.worker import FAILURE_FILE, claim_failure
from tests.support.launch import PATIENCE_S

pytestmark = pytest.mark.machine

_TRANSFER = """
import os, socket, sys, time
num_bytes, num_senders = int(sys.argv[1]), int(sys.argv[2])
if os.environ["LACONIC_LAB_NODE"] == "0":
    server = socket.create_server(("", 5000))
    connections = [server.accept()[0] for _ in range(num_senders)]
    for connection in connections:
        connection.sendall(b"g")
    start = time.perf_counter()
    for connection in connections:
        left = num_bytes
        while left:
            left -= len(connection.recv(min(left, 1 << 20)))
    print(time.perf_counter() - start)
else:
    while True:
        try:
            connection = socket.create_connection(("10.77.0.1", 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    connection.recv(1)
    connection.sendall(bytes(num_bytes))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
"""


def python(lab: Lab, code: str, *arguments: str, timeout_s: float = PATIENCE_S, **keywords: object) -> RunResult:
    """Run `code` on every node, quietly."""
    commands = [[sys.executable, "-c", code, *arguments]] * lab.nodes
    return lab.execute(commands, timeout_s=timeout_s, show=False, **keywords)  # type: ignore[arg-type]


def transfer(lab: Lab, num_bytes: int) -> RunResult:
    """Send `num_bytes` from every other node to node 0, which prints the seconds that they take."""
    return python(lab, _TRANSFER, str(num_bytes), str(lab.nodes - 1))


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(nodes=2) as lab:
        yield lab


@pytest.mark.parametrize(("rate_bits_per_s", "num_bytes"), [(20e6, 1_000_000), (500e6, 20_000_000), (None, 20_000_000)])
def test_interfaces_count_the_bytes_that_were_sent(lab: Lab, rate_bits_per_s: float | None, num_bytes: int) -> None:
    lab.set_rate(rate_bits_per_s)
    result = transfer(lab, num_bytes)
    assert result.exit_code == 0, result
    receiver, sender = result.nodes
    assert sender.sent_bytes == pytest.approx(num_bytes, rel=0.02)
    assert receiver.received_bytes == pytest.approx(num_bytes, rel=0.02)
    assert receiver.sent_bytes is not None
    assert receiver.sent_bytes < 0.02 * num_bytes, "acknowledgements alone"


@pytest.mark.parametrize("rate_bits_per_s", [20e6, 1e9])
def test_no_more_passes_than_the_rate_allows(lab: Lab, rate_bits_per_s: float) -> None:
    """The test checks the upper limit only: the lower limit depends on other users of the cores."""
    lab.set_rate(rate_bits_per_s)
    assert lab.rate_bits_per_s == rate_bits_per_s
    num_bytes = int(rate_bits_per_s / 8)
    seconds = float(transfer(lab, num_bytes).nodes[0].output)
    assert num_bytes * 8 / seconds < 1.05 * rate_bits_per_s
    lab.set_rate(None)
    assert float(transfer(lab, num_bytes // 10).nodes[0].output) < seconds


def test_senders_share_the_link_of_their_receiver() -> None:
    with Lab(nodes=3, rate_bits_per_s=100e6) as lab:
        result = transfer(lab, 5_000_000)
    assert 2 * 5e6 * 8 / float(result.nodes[0].output) < 1.05 * 100e6
    assert result.nodes[0].received_bytes == pytest.approx(1e7, rel=0.02)


def test_an_idle_wire_is_silent(lab: Lab) -> None:
    result = python(lab, "import time; time.sleep(0.3)")
    assert [node.sent_bytes for node in result.nodes] == [0, 0]


_SEEN = """
import os, socket
print(sorted(name for _, name in socket.if_nameindex()))
print(socket.getnameinfo(("::ffff:10.77.0.2", 1), socket.NI_NAMEREQD)[0])
print(os.readlink("/proc/self") == str(os.getpid()))
print(*map(os.environ.get, ["LACONIC_LAB_NODE", "GLOO_SOCKET_IFNAME", "FROM_OUTSIDE", "GIVEN"]))
"""


def test_a_node_sees_its_own_interface_names_processes_and_variables(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without names torch asks an unreachable name server. With another's /proc psutil measures other processes."""
    monkeypatch.setenv("FROM_OUTSIDE", "a")
    result = python(lab, _SEEN, env={"GIVEN": "b"})
    for number, node in enumerate(result.nodes):
        assert node.output.splitlines() == ["['lo', 'wire0']", "node1", "True", f"{number} wire0 a b"]


def test_output_of_other_nodes_is_prefixed(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('to stdout'); print('to stderr', file=sys.stderr)"
    result = lab.execute([[sys.executable, "-c", code]] * 2, timeout_s=PATIENCE_S)
    shown = capfd.readouterr()
    assert sorted(shown.out.splitlines()) == ["[node 1] to stdout", "to stdout"]
    assert sorted(shown.err.splitlines()) == ["[node 1] to stderr", "to stderr"]
    assert result.nodes[0].output == ""
    assert sorted(result.nodes[1].output.splitlines()) == ["to stderr", "to stdout"]


def test_one_failing_node_ends_the_others(lab: Lab) -> None:
    code = "import os, sys, time; sys.exit(5) if os.environ['LACONIC_LAB_NODE'] == '1' else time.sleep(600)"
    result = python(lab, code)
    assert not result.timed_out
    assert [node.exit_code for node in result.nodes] == [None, 5]
    assert result.exit_code == 5
    absent = lab.execute([["/no/such/program"]] * 2, timeout_s=PATIENCE_S, show=False)
    assert absent.exit_code == 127
    assert "/no/such/program" in absent.nodes[0].output


def test_timeout_ends_processes_that_ignore_sigterm(lab: Lab) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    result = python(lab, code, timeout_s=0.5, grace_s=0.2)
    assert result.timed_out
    assert result.exit_code == 124
    assert python(lab, "pass").exit_code == 0, "the lab can be used again"


def test_a_keeper_that_died_between_two_runs_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a killed keeper leaves its folder
    with Lab(nodes=1, wire=False) as lab:
        assert python(lab, "pass").exit_code == 0
        assert lab._keeper is not None
        lab._keeper.kill()
        lab._keeper.wait()
        with pytest.raises(LabUnavailable, match="keeper was killed"):
            python(lab, "pass")


def test_without_a_wire_nothing_is_measured() -> None:
    with Lab(nodes=2, wire=False) as lab:
        result = python(lab, "import os; print(os.environ['GLOO_SOCKET_IFNAME'])")
        assert [node.output for node in result.nodes] == ["lo\n"] * 2
        assert {node.sent_bytes for node in result.nodes} == {None}
        assert python(lab, "import os; print([os.environ['LACONIC_LAB_INTERFACE']])").nodes[0].output == "['']\n"
        with pytest.raises(ValueError, match="wire=True"):
            lab.set_rate(1e9)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"nodes": 0}, "nodes=0"),
        ({"nodes": 101}, "nodes=101"),
        ({"rate_bits_per_s": 200}, "200bit is out of range"),
        ({"rate_bits_per_s": 1e9, "wire": False}, "needs a wire"),
    ],
)
def test_refuses_impossible_labs(keywords: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lab(**keywords)  # type: ignore[arg-type]


def test_refuses_impossible_runs(lab: Lab) -> None:
    for message, call in (
        ("local=0", lambda: lab.run(["x.py"], local=0)),
        ("names none", lambda: lab.run(["-m"])),
        ("one per node", lambda: lab.execute([["true"]])),
        ("`with` block", lambda: Lab().run(["x.py"])),
        ("out of range", lambda: lab.set_rate(1e12)),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_failure_that_is_half_written_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that writes may be killed, because another has failed: then the other's failure is the first."""
    mine, others = {"rank": 1, "error": "mine"}, {"rank": 2, "error": "the other's"}

    def killed(path: Path, text: str) -> None:
        with path.open("w") as file:
            file.write(text[:5])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", killed)
        with pytest.raises(KeyboardInterrupt):
            claim_failure(tmp_path, mine)
    assert not (tmp_path / FAILURE_FILE).exists()
    assert claim_failure(tmp_path, others)
    assert not claim_failure(tmp_path, mine)
    assert json.loads((tmp_path / FAILURE_FILE).read_text()) == others
