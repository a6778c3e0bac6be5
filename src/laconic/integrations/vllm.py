"""Published versions in vLLM: its workers read them, or its trainer engines send them.

The workers read, each for itself, through vLLM's own loaders. In the program that has the engine:

    llm = LLM(path, worker_extension_cls="laconic.integrations.vllm.LaconicWorker")
    ...
    llm.collective_rpc("read_weights", args=("/shared/weights", version))  # between two requests
    llm.reset_prefix_cache()

The same with `vllm serve --worker-extension-cls`. Publish with `names="hub"`: vLLM loads the names of folders of the
hub. An engine of your own calls `load_version` with vLLM's model, or takes `checkpoint_patches`. To send versions over
NCCL or IPC from one process that reads them, give vLLM's trainer engines a `weight_source`, or `sparse_patches`.

[Note: What vLLM takes]
vLLM loads either all values, or masked patches ([Note: Masked patches] in masked.py), and no mix of both. All values go
through its layerwise reload, which converts and quantizes layer by layer as at the start. Patches change the model's
own tensors in place, which must be those of the checkpoint. So a quantized model takes all values each time. So does a
mixture of experts, unless vLLM has `moe_backend="triton"`, as other kernels keep experts in an order of their own; and
so does an update in which an integer has changed, or a value has become NaN. If a loader fails, weights are of two
versions. Then the next update takes all values.

Tests run these functions against a stand-in with the conditions of vLLM's loader, or against vLLM itself where it is
installed. By hand, they ran on a CPU against the loader, the reload and the base classes of vLLM 0.33.0. Its own Qwen3,
and its Llama on two ranks of tensor parallelism, had the weights of each of three versions. No engine ran on a GPU.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laconic.integrations.masked import INT32_NUMEL, masked, unmasked
from laconic.publish import Reader, WeightPatch

_LOADER = "model_executor.model_loader.checkpoint_weight_patch"
_RELOAD = "model_executor.model_loader.reload"
_TRANSFER = "distributed.weight_transfer"


# -- in the workers ----------------------------------------------------------------------------------------------------


class LaconicWorker:
    """What vLLM's workers learn by `worker_extension_cls="laconic.integrations.vllm.LaconicWorker"`."""

    def read_weights(self, source: str, version: int, name: str | None = None) -> int:
        """Bring this worker's model to a version, and return its number. For `collective_rpc`, between two requests.

        `source` is the publisher's folder or its server's address, whose token is in LACONIC_PUBLISH_TOKEN. `version`
        makes all workers read the same, also if a newer one comes meanwhile. `name` registers the workers as readers,
        each with its rank after it, so that the publisher keeps the versions that they still need.

        Raises: see `load_version`.
        """
        worker: Any = self
        readers: dict[str, Reader] = self.__dict__.setdefault("laconic_readers", {})
        if source not in readers:
            readers[source] = Reader(source, name=name and f"{name}-{worker.rank}")
        return load_version(worker.get_model(), readers[source], worker.vllm_config, to=version)


@torch.no_grad()
def load_version(model: nn.Module, reader: Reader, vllm_config: Any, *, to: int | None = None) -> int:
    """Bring vLLM's model to the version `to`, or the newest that a reader finds, and return its number.

    `model` is what `get_model()` of a worker returns, whole or this worker's part, in any parallelism of vLLM. The
    reader serves this model alone. The first call loads all values, later ones what has changed:
    [Note: What vLLM takes]. No request may run meanwhile.

    Cost: host memory for what is read, and 512 MB for patches that are spread.

    Raises:
        PublishError: see `Reader.patches`. Nothing was loaded.
        ImportError: vLLM is too old for patches.
        Exception: vLLM could not load it. The next call loads all values.
    """
    if not _takes_patches(vllm_config):
        reader.version = None
    held = reader.version
    patches = list(reader.patches(to=to))
    target, reader.version = reader.version, None  # until all of it is loaded
    is_whole = held is None or _has_all(patches, reader, target)
    if not is_whole and any(unmasked(patch) for patch in patches):
        patches = list(reader.patches(to=to))
        target, reader.version, is_whole = reader.version, None, True
    if patches:
        _load(model, checkpoint_patches(patches if is_whole else masked(patches)), vllm_config, is_whole=is_whole)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()  # requests may run on another stream
    assert target is not None
    reader.version = target
    return target


def _takes_patches(vllm_config: Any) -> bool:
    """Whether vLLM holds weights as the checkpoint has them."""
    has_triton = vllm_config.kernel_config.moe_backend == "triton"
    return vllm_config.quant_config is None and (has_triton or not vllm_config.model_config.is_moe)


def _has_all(patches: Sequence[WeightPatch], reader: Reader, version: int | None) -> bool:
    """Whether an update has all values of all tensors, as for a reader that was far behind."""
    if not patches or any(patch.indices is not None for patch in patches) or version is None:
        return False
    return {patch.name for patch in patches} == {each.name for each in reader.source.manifest(version).tensors}


def _load(model: nn.Module, patches: list[Any], vllm_config: Any, *, is_whole: bool) -> None:
    load = _vllm(_LOADER).load_checkpoint_weight_patches
    if not is_whole:
        load(model, patches)
        return
    reload = _vllm(_RELOAD)
    with _vllm("config").set_current_vllm_config(vllm_config):
        reload.initialize_layerwise_reload(model)
        try:
            load(model, patches)
        finally:
            reload.finalize_layerwise_reload(model, vllm_config.model_config)


def checkpoint_patches(patches: Iterable[WeightPatch]) -> list[Any]:
    """Turn what `Reader.patches` yields into vLLM's `CheckpointWeightPatch`: all with indices, or none.

    They are whole tensors if none has indices; else all get them.

    Shapes: values (c,), or all of a tensor, flat; indices (c,), int64, or None.

    Raises:
        PublishError: see `masked`.
        ImportError: vLLM is too old for patches.
    """
    cls = _vllm(_LOADER).CheckpointWeightPatch
    patches = list(patches)
    if any(patch.indices is not None for patch in patches):
        patches = list(masked(patches))
    return [
        cls(name=p.name, shape=p.shape, dtype=p.dtype, values=p.values.reshape(-1), indices=p.indices) for p in patches
    ]


# -- by the trainer's engines ------------------------------------------------------------------------------------------


def sparse_patches(patches: Iterable[WeightPatch], device: torch.device | str = "cuda") -> list[Any]:
    """Turn what `Reader.patches` yields into `SparseWeightPatch`, for `send_weights` of vLLM's engine `sparse_nccl`.

    Their workers must hold the version before: send all values by `weight_source` first.

    Shapes: indices (c,), int32, and values (c,), on `device`.

    Raises:
        PublishError: see `masked`; int32 reaches no tensor of more than 2^31 elements.
        ImportError: vLLM is too old for patches.
    """
    cls = _vllm(f"{_TRANSFER}.sparse_nccl_engine").SparseWeightPatch
    found = []
    for name, shape, _, indices, values in masked(patches, most_numel=INT32_NUMEL):
        assert indices is not None
        found.append(cls(name, indices.to(device, torch.int32), values.to(device), shape))
    return found


def weight_source(reader: Reader, device: torch.device | str = "cuda") -> Any:
    """Make a `WeightSource` for vLLM's trainer engines, such as `nccl` and `ipc`, that has the newest version.

    Each pass, by `iter_full`, brings a copy in host memory to the newest version, and yields (name, whole tensor on
    `device`) of all tensors. `metadata` has their names, dtypes and shapes, which are those of all versions of a run.
    The reader serves this source alone. The number of the version that was sent is `reader.version`.

    Cost: host memory for one copy of the model.

    Raises:
        PublishError: see `Reader.update`; when it is used.
        ImportError: vLLM has no trainer engines yet.
    """
    base = _vllm(f"{_TRANSFER}.base")

    class PublishedWeights(base.WeightSource):  # type: ignore[name-defined]
        """The newest version, whole."""

        def __init__(self) -> None:
            self._tensors: dict[str, Tensor] = {}

        @functools.cached_property
        def metadata(self) -> list[Any]:
            self._update()
            return [base.ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in self._tensors.items()]

        def iter_full(self) -> Iterator[tuple[str, Tensor]]:
            self._update()
            for name, each in self._tensors.items():
                yield name, each.to(device)

        def _update(self) -> None:
            if self._tensors:
                reader.update(self._tensors)
            else:
                reader.version = None
                self._tensors = {patch.name: patch.values for patch in reader.patches()}

    return PublishedWeights()


def _vllm(module: str) -> Any:
    """Import a module of vLLM. Raises: ImportError."""
    try:
        return importlib.import_module(f"vllm.{module}")
    except ImportError as error:
        raise ImportError(f"{error}; laconic.integrations.vllm needs vLLM 0.33: pip install -U vllm") from error
