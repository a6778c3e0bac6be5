"""Records what laconic unpickles, in the tests and in every process that they start, and refuses warnings of torch.

Python imports sitecustomize.py, which imports this module, before anything else where their folder is on PYTHONPATH;
conftest.py puts it there. (A system may have a sitecustomize.py of its own, so pytest's process imports this one.)
`pickle.loads`, `pickle.load` and `pickle.Unpickler` then look at the stack. If laconic is in it, the stack is appended
to the file that LACONIC_UNPICKLED names, as a line of JSON. These are no records:

- what multiprocessing reads from its own pipes, such as the batches of a DataLoader's worker;
- code that numba has compiled, and keeps beside Python's own in `__pycache__`;
- `torch.load(weights_only=True)`, which has an unpickler of its own;
- the metadata of checkpoints, read by a class that builds DCP's own records and nothing else (checkpoint/storage.py);
- what a script unpickles that the lab's worker runs (lab/worker.py), or a function that `laconic.rehearse` runs;
- what Lightning and torch read when laconic's strategy calls Lightning's own loader (`load_checkpoint`);
- the texts that ranks of a TRL trainer gather for its log, when laconic's mixin calls the trainer;
- the shapes that torch's own pipeline stages tell each other, in the contestant `fsdp2-pipeline`. Ours tell none so.
"""

import _pickle
import json
import os
import pickle
import sys
import traceback
import warnings

VARIABLE = "LACONIC_UNPICKLED"
_PACKAGE = os.path.join("src", "laconic", "")
_REHEARSE = os.path.join("src", "laconic", "rehearse", "")
_NO_WIRE = (os.path.join("multiprocessing", ""), os.path.join("multiprocess", ""), os.path.join("numba", "core", ""))
_RUNS_SCRIPTS = os.path.join("lab", "worker.py")
_RESTRICTED = "_MetadataUnpickler"
_OF_LIGHTNING = (os.path.join("integrations", "lightning.py"), "load_checkpoint")
_OF_TRANSFORMERS = os.path.join("integrations", "transformers.py")
_OF_TRL = os.path.join("trl", "trainer", "")

_loads, _load = _pickle.loads, _pickle.load


def _note(unpickler=None):
    caller = frame = sys._getframe(2)
    if any(part in caller.f_code.co_filename for part in _NO_WIRE):
        return
    if any(cls.__name__ == _RESTRICTED for cls in type(unpickler).__mro__):
        return
    # Frame by frame, and no text of source lines: ranks unpickle a thousand times in a test, mostly without laconic.
    while frame is not None and (_PACKAGE not in frame.f_code.co_filename or _REHEARSE in frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.endswith(_RUNS_SCRIPTS):
        return
    if frame.f_code.co_filename.endswith(_OF_LIGHTNING[0]) and frame.f_code.co_name == _OF_LIGHTNING[1]:
        return
    if _is_of_trl(caller, frame) or _is_of_torchs_stages(caller, frame):
        return
    lines = [f"{each.filename}:{each.lineno} {each.name}" for each in traceback.extract_stack(caller)]
    file = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, json.dumps(lines).encode() + b"\n")
    os.close(file)


def _is_of_trl(caller, mixin):
    """Whether a frame of TRL stands between who unpickles and laconic's mixin."""
    if not mixin.f_code.co_filename.endswith(_OF_TRANSFORMERS):
        return False
    while caller is not mixin and _OF_TRL not in caller.f_code.co_filename:
        caller = caller.f_back
    return caller is not mixin


def _is_of_torchs_stages(caller, frame):
    """Whether a stage of torch's own class, and not of a subclass, reads what its neighbour tells of shapes."""
    while caller is not frame and caller.f_code.co_name != "_recv_meta":
        caller = caller.f_back
    return caller is not frame and type(caller.f_locals.get("self")).__name__ == "PipelineStage"


def loads(*args, **options):
    """See `pickle.loads`."""
    _note()
    return _loads(*args, **options)


def load(*args, **options):
    """See `pickle.load`."""
    _note()
    return _load(*args, **options)


class Unpickler(_pickle.Unpickler):
    """See `pickle.Unpickler`."""

    def load(self):
        """See `pickle.Unpickler.load`."""
        _note(self)
        return super().load()


def install():
    """Put the recording functions in the place of Python's."""
    for module in (pickle, _pickle):
        module.loads, module.load, module.Unpickler = loads, load, Unpickler


def refuse_warnings():
    """Make torch's own warnings inside laconic's calls errors; pyproject.toml says the same to pytest's process."""
    warnings.filterwarnings("error", r"(?s).*Triggered internally at", UserWarning, r"laconic\.")


if VARIABLE in os.environ:
    install()
    refuse_warnings()
