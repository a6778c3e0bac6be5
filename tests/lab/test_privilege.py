"""The lab as root, as a user, in a container, and where nothing is allowed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.machine

_REPORT = """
import json, os, sys, types
package = types.ModuleType("laconic")  # without torch, whose import takes seconds
package.__path__ = [sys.argv[1]]
sys.modules["laconic"] = package
from laconic.lab import Lab, LabUnavailable
node = "import os; print(os.stat('/proc/self/ns/net').st_ino)"
try:
    with Lab(nodes=2, rate_bits_per_s=1e9 if sys.argv[2] == "wire" else None, wire=sys.argv[2] == "wire") as lab:
        result = lab.execute([[sys.executable, "-c", node]] * 2, show=False)
        print(json.dumps({"exit_code": result.exit_code, "output": [node.output.split() for node in result.nodes],
                          "sent_bytes": result.nodes[0].sent_bytes}))
except LabUnavailable as error:
    print(json.dumps({"unavailable": str(error)}))
"""


_HOW = {
    "root": [],
    # no right to make a network, but the right to make user namespaces, as for most users on most kernels; the kernel
    # asks for setfcap when user 0 makes one
    "user": ["setpriv", "--bounding-set", "-all,+setfcap"],
    "nothing": [
        "unshare", "--user", "--map-root-user", "sh", "-c",
        'echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set -all "$@"', "sh",
    ],
}  # fmt: skip
"""What lets root run a command with so much privilege. The user keeps its number, so as to read the interpreter."""


def report(how: str, wire: str, folder: Path) -> dict[str, object]:
    """Make a lab with the privileges `how`, and return its report."""
    package = str(Path(__file__).parents[2] / "src/laconic")
    command = [*_HOW[how], sys.executable, "-c", _REPORT, package, wire]
    done = subprocess.run(
        command, env=os.environ | {"TMPDIR": str(folder)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []
    return json.loads(done.stdout)


@pytest.mark.parametrize("how", ["root", "user"])
def test_makes_a_wire(how: str, tmp_path: Path) -> None:
    found = report(how, "wire", tmp_path)
    assert found["exit_code"] == 0
    assert found["sent_bytes"] == 0
    output = found["output"]
    assert isinstance(output, list)
    here = str(os.stat("/proc/self/ns/net").st_ino)
    assert len({here, *output[0], *output[1]}) == 3, "three network namespaces"


def test_refusal_names_remedies(tmp_path: Path) -> None:
    message = str(report("nothing", "wire", tmp_path)["unavailable"])
    assert "run as root" in message
    assert "user.max_user_namespaces" in message
    assert "--no-wire" in message


def test_needs_no_privilege_without_a_wire(tmp_path: Path) -> None:
    found = report("nothing", "no-wire", tmp_path)
    assert found["exit_code"] == 0
    assert found["sent_bytes"] is None


def test_command_line_refuses_with_one_message(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('not reached')")
    command = [*_HOW["nothing"], sys.executable, "-m", "laconic.cli", "lab", "--", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("laconic lab: this machine does not let you make an emulated wire (unshare")
    assert "Traceback" not in done.stderr
