"""laconic inside trainers and engines that people already use. Each module needs its library, and nothing imports it.

| module | for | needs |
|---|---|---|
| `transformers` | `Trainer` and any subclass of it | the extra `trl`, or transformers and accelerate |
| `trl` | `SFTTrainer`, `DPOTrainer`, `RewardTrainer` | the extra `trl` |
| `accelerate` | an `Accelerator` loop | the extra `accelerate` |
| `lightning` | a strategy | the extra `lightning` |
| `vllm` | published versions in vLLM | vLLM |
| `slime` | published versions for SGLang's `/pull_weights`, as in slime | the extra `train` |
| `verl` | published versions for verl's loader in SGLang | |
"""

from laconic.integrations.options import LaconicArguments
from laconic.integrations.sharding import shard_model

__all__ = ["LaconicArguments", "shard_model"]
