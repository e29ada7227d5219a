"""The keys of a config are a promise to its users: adding, renaming or removing one has to be meant."""

from pathlib import Path

from megarl.config import RunConfig
from megarl.config.fields import config_keys
from megarl.config.show import reference_markdown

KEYS = Path(__file__).with_name("keys.txt")
REFERENCE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_keys_are_those_in_keys_txt():
    assert [key.name for key in config_keys(RunConfig)] == KEYS.read_text(encoding="utf-8").split(), (
        f"the keys of the config changed: if that is meant, change {KEYS.name} with it"
    )


def test_every_key_is_documented_in_a_sentence():
    for key in config_keys(RunConfig):
        assert key.doc.endswith("."), key.name
        assert len(key.doc) > 20, key.name


def test_every_default_keeps_its_own_rules():
    for key in config_keys(RunConfig):
        for value in key.default if isinstance(key.default, list) else [key.default]:
            if value is None:
                continue
            assert not key.rules.choices or value in key.rules.choices, key.name
            assert key.rules.at_least is None or value >= key.rules.at_least, key.name
            assert key.rules.above is None or value > key.rules.above, key.name
            assert key.rules.at_most is None or value <= key.rules.at_most, key.name


def test_the_reference_in_docs_is_up_to_date():
    assert REFERENCE.read_text(encoding="utf-8") == reference_markdown(), "run: python tools/config_reference.py"
