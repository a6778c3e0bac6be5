"""The files of examples/launch, and what their own tools or schemas find wrong with them without a run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "examples" / "launch"
FILES = {path.name: path.read_text(encoding="utf-8") for path in sorted(FOLDER.iterdir()) if path.is_file()}
SCRIPTS = [name for name in FILES if name.endswith(".sh")]
KINDS = {
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "JobSet": "JobsetV1alpha2JobSet",
}
VERSIONS = {
    "TrainingRuntime": "trainer.kubeflow.org/v1alpha1",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
}
OBJECTS = ("kubeflow.yaml", "jobset.yaml")
"""The files of objects for Kubernetes."""


def script_fault(name: str) -> str:
    """What bash and ShellCheck say about a script; "" if nothing."""
    for command in (["bash", "-n"], [str(Path(sys.executable).with_name("shellcheck"))]):
        done = subprocess.run([*command, FOLDER / name], capture_output=True, text=True, check=False)
        if done.returncode or done.stdout or done.stderr:
            return f"{command[0]}: {done.returncode} {done.stdout}{done.stderr}"
    return ""


def objects(*names: str) -> Iterator[dict[str, Any]]:
    """The objects for Kubernetes in these files; without names, in all."""
    for name in names or OBJECTS:
        yield from yaml.safe_load_all(FILES[name])


def object_fault(given: dict[str, Any]) -> str:
    """What the API would refuse or drop without a word; "" if nothing.

    The models check types and required fields, and leave out fields that they do not know.
    """
    from kubeflow_trainer_api import models  # takes a second

    if given["apiVersion"] != VERSIONS[given["kind"]]:
        return f"apiVersion {given['apiVersion']}"
    try:
        kept = getattr(models, KINDS[given["kind"]]).from_dict(given).to_dict()
    except ValueError as error:
        return str(error)
    return next(_lost(given, kept, given["kind"]), "")


def _lost(given: Any, kept: Any, place: str) -> Iterator[str]:
    """The places of `given` that differ in `kept`, which may have defaults beside."""
    if isinstance(given, dict):
        for key, value in given.items():
            yield from _lost(value, kept.get(key), f"{place}.{key}")
    elif isinstance(given, list):
        for index, value in enumerate(given):
            yield from _lost(value, kept[index], f"{place}[{index}]")
    elif given != kept:
        yield place
