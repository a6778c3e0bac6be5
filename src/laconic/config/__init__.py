"""The description of a training job: typed sections that are read from TOML, strictly, and written back to TOML."""

from laconic.config.job import Config, all_keys, from_dict, load, parse_toml, to_dict, to_toml, type_in_words, values_of
from laconic.config.section import ConfigError
from laconic.config.sections import (
    DataConfig,
    LogConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    ScheduleConfig,
    ShardConfig,
    SyncConfig,
    TrainConfig,
)
from laconic.errors import JobError

__all__ = [
    "Config",
    "ConfigError",
    "DataConfig",
    "JobError",
    "LogConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "ScheduleConfig",
    "ShardConfig",
    "SyncConfig",
    "TrainConfig",
    "all_keys",
    "from_dict",
    "load",
    "parse_toml",
    "to_dict",
    "to_toml",
    "type_in_words",
    "values_of",
]
