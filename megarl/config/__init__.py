"""What a run is: typed settings, how they are loaded, and every rule between them. Imports no torch.

`load_config` turns a YAML file and `key=value` overrides into a `RunConfig`; `validate` lists everything that is wrong
with it for a given world size; `Layout` and `ModelShape` are the sizes that the rest of megarl asks for.
"""

from megarl.config.errors import ConfigError
from megarl.config.layout import Coordinates, Layout
from megarl.config.load import load_config
from megarl.config.model_shape import SUPPORTED_MODEL_TYPES, ModelShape
from megarl.config.schema import RunConfig
from megarl.config.validate import missing_packages, validate

__all__ = [
    "SUPPORTED_MODEL_TYPES",
    "ConfigError",
    "Coordinates",
    "Layout",
    "ModelShape",
    "RunConfig",
    "load_config",
    "missing_packages",
    "validate",
]
