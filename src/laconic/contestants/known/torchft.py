"""torchft's DiLoCo."""

from laconic.registry import Limit, Strategy
from laconic.strategies.known.engine import CUTS_ANYWHERE, NOT_ON_ENGINE

_NOTHING = "has nothing like it"
_EARLIER = "sends a fragment earlier, not applies it later, so the steps would differ"


def _without(key: str, default: object, reason: str = _NOTHING) -> Limit:
    """Take only the default of a key of `[sync]`."""
    return Limit.only(
        f"sync.{key}",
        default,
        message=f"sync.{key} = {{value!r}} and shard.strategy = {{strategy!r}}, which {reason}; leave it out",
    )


STRATEGIES = (
    Strategy(
        name="torchft-diloco",
        label="torchft DiLoCo",
        note="torchft's DiLoCo over FSDP2 inside each island: the same steps, fragments and outer optimizer, in "
        "float32.",
        source="DiLoCo, arXiv 2311.08105; Streaming DiLoCo, arXiv 2501.18512; torchft 0.2's local_sgd.py",
        maker="torchft",
        colour="#4d9221",
        shard={"strategy": "torchft-diloco"},
        sync={"codec": "fp32", "error_feedback": False},
        package="torchft",
        limits=(
            *NOT_ON_ENGINE,
            CUTS_ANYWHERE,
            Limit.only(
                "sync.mode",
                "local",
                message="shard.strategy = {strategy!r} needs sync.mode = 'local': its islands sync now and then",
            ),
            Limit.only(
                "sync.codec",
                "fp32",
                message="sync.codec = {value!r} and shard.strategy = {strategy!r}, which sends float32 (its fp8 needs "
                "a GPU and Triton); set sync.codec = 'fp32'",
            ),
            _without("overlap", 0, _EARLIER),
            _without("mixing", 0),
            _without("slices", 1),
            _without("recovery", None),
            _without("rendezvous", None),
        ),
        saves=False,
        stepper="laconic.contestants.torchft:TorchftStepper",
        parallelize="laconic.contestants.torchft:shard_inside_islands",
        in_plan=False,
    ),
)
