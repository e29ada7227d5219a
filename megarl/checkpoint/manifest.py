"""`megarl.json`: what a checkpoint is, readable without torch."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.layout import Layout

MANIFEST_NAME = "megarl.json"
FORMAT_VERSION = 1
"""Raised when a checkpoint can no longer be read by the versions before."""

HF_FOLDER = "hf"
"""config.json, tokenizer, chat template and generation settings of the Hugging Face model."""
WEIGHTS_FOLDER = "weights"
"""The Megatron dist_checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a checkpoint's `megarl.json` says."""

    format_version: int = FORMAT_VERSION
    megarl_version: str
    role: str
    """`causal_lm`, `critic` or `reward`."""
    dtype: str
    """Of the parameters: `float32` or `bfloat16`."""
    model_type: str
    """Hugging Face's."""
    num_parameters: int
    """Of the whole model; tied embeddings count once, padding does not."""
    layout: dict[str, Any]
    """The parallel sizes it was saved from. For people: any layout can load it."""

    def write(self, folder: str | Path) -> None:
        """Writes `megarl.json` into the checkpoint's folder."""
        text = json.dumps(dataclasses.asdict(self), indent=2) + "\n"
        (Path(folder) / MANIFEST_NAME).write_text(text, encoding="utf-8")


def layout_record(layout: Layout) -> dict[str, Any]:
    """The layout as JSON."""
    return dataclasses.asdict(layout)


def read_manifest(folder: str | Path) -> Manifest:
    """Reads `megarl.json` of a checkpoint.

    Raises:
        ConfigError: not a checkpoint, an unreadable manifest, or one that a newer megarl wrote.
    """
    file = Path(folder) / MANIFEST_NAME
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} is not a megarl checkpoint, since it has no {MANIFEST_NAME}; give the folder that "
            "hf_to_megatron.py wrote."
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid JSON ({error}); copy the checkpoint again.") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from None
    version = content.get("format_version") if isinstance(content, dict) else None
    if not isinstance(version, int):
        raise ConfigError(f"{file} has no format_version, so it is not a megarl checkpoint's; copy it again.")
    if version > FORMAT_VERSION:
        raise ConfigError(
            f"{file} has format_version {version}, but this megarl reads up to {FORMAT_VERSION}; update megarl."
        )
    known = {field.name for field in dataclasses.fields(Manifest)}
    if missing := sorted(known - content.keys()):
        raise ConfigError(f"{file} lacks {', '.join(missing)}; copy the checkpoint again.")
    return Manifest(**{name: content[name] for name in known})
