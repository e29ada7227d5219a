"""What differs between a checkpoint's config and that of the run that goes on with it. Imports no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from megarl.config.fields import config_keys
from megarl.config.schema import RunConfig
from megarl.config.show import show_value

_PLACES = (
    "rollout.servers",
    "trainer.default_local_dir",
    "trainer.resume_mode",
    "trainer.resume_from_path",
    "trainer.resume_with_other_data",
)
"""Keys that say where a run and its servers lie and how it was started; they change whenever one is resumed from
elsewhere."""

FIXED = {
    "trainer.kind": "another loop has another state",
    "model.dtype": "the optimizer keeps another state",
}
"""Keys that a resumed run has to keep, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A key whose value differs."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {show_value(self.before)} → {show_value(self.now)}"


def as_record(config: RunConfig) -> dict[str, Any]:
    """The whole config as JSON, for a checkpoint."""
    record = OmegaConf.to_container(OmegaConf.structured(config))
    assert isinstance(record, dict)
    return {str(section): values for section, values in record.items()}


def changes(record: Mapping[str, Any], config: RunConfig) -> list[Change]:
    """The keys that differ, in the order of the config's reference.

    Args:
        record: of `as_record`, maybe of an earlier version: keys that it lacks had their default.
    """
    now = as_record(config)
    return [
        Change(key=name, before=before, now=value)
        for name, default in _keys()
        if name not in _PLACES and (before := _value(record, name, default)) != (value := _value(now, name, default))
    ]


def _keys() -> Iterator[tuple[str, Any]]:
    for key in config_keys(RunConfig):
        yield key.name, key.default


def _value(record: Mapping[str, Any], name: str, default: Any) -> Any:
    value: Any = record
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value
