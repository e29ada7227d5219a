"""Write docs/configuration.md from the documentation under the config's fields: `python tools/config_reference.py`."""

from pathlib import Path

from megarl.config.show import reference_markdown

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"

if __name__ == "__main__":
    REFERENCE.write_text(reference_markdown(), encoding="utf-8")
    print(f"wrote {REFERENCE}")
