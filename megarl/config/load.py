"""From a YAML file and `key=value` overrides to a `RunConfig`."""

import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from megarl.config.errors import ConfigError
from megarl.config.fields import Key, config_keys
from megarl.config.schema import RunConfig

CONFIG_FOLDER = Path(__file__).resolve().parents[2] / "configs"
"""The example configs of a checkout; `find_config` looks here after the current folder."""

BASE_KEY = "base"
COMMAND_LINE = "command line"

_SIMILAR = 0.6  # difflib's own cutoff: below it, suggestions for a typing error are noise


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Settings of one place, by section, and the name of that place in errors."""

    name: str
    settings: Mapping[str, Any]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a config: what `base:` names first, then the file, then `key=value` overrides.

    `base:` is a path relative to the folder of the file that names it, and bases may have bases. A later value
    replaces an earlier one key by key; lists are replaced whole. Values may refer to other keys
    (`${trainer.default_local_dir}/x`) and to the environment (`${oc.env:HOME}`).

    Raises:
        ConfigError: every unknown key and every value of a wrong type, in all places, as one report; or the file (or
            its base) that cannot be read.
    """
    sources = [*_base_chain(find_config(path)), _parse_overrides(overrides)]
    keys = {key.name: key for key in config_keys(RunConfig)}
    config = OmegaConf.structured(RunConfig)
    problems = [problem for source in sources for problem in _apply(config, source, keys)]
    if not problems:
        problems = list(_unresolved(config, keys))
    if problems:
        raise ConfigError(problems)
    for key in keys.values():
        if key.rules.local_path:
            OmegaConf.update(config, key.name, _expand_home(OmegaConf.select(config, key.name)))
    return typing.cast(RunConfig, OmegaConf.to_object(config))


def find_config(path: str | Path) -> Path:
    """The config file that `path` means: relative to the current folder, or else to the checkout's `configs/`.

    Raises:
        ConfigError: there is no such file in either.
    """
    candidates = [Path(path), CONFIG_FOLDER / path]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    examples = sorted(file.name for file in CONFIG_FOLDER.glob("*.yaml"))
    known = f" ({CONFIG_FOLDER} has {', '.join(examples)})" if examples else ""
    raise ConfigError(f"config {path} was found neither in {Path.cwd()} nor in {CONFIG_FOLDER}{known}.")


def _base_chain(path: Path) -> list[_Source]:
    """The file's settings after those of its bases: the deepest base first."""
    chain: list[_Source] = []
    seen: list[Path] = []
    while True:
        seen.append(path.resolve())
        settings = _read_yaml(path)
        base = settings.pop(BASE_KEY, None)
        chain.append(_Source(name=str(path), settings=settings))
        if base is None:
            return chain[::-1]
        if not isinstance(base, str):
            raise ConfigError(f"{path}: '{BASE_KEY}' must be the path of one YAML file, not {base!r}.")
        base_path = path.parent / base
        if not base_path.is_file():
            raise ConfigError(f"{path}: '{BASE_KEY}' names {base}, but there is no file {base_path}.")
        if base_path.resolve() in seen:
            names = " → ".join(file.name for file in [*seen, base_path])
            raise ConfigError(f"{path}: '{BASE_KEY}' leads back to where it came from ({names}): remove one of them.")
        path = base_path


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        # OmegaConf's loader, not plain YAML: it reads 1e-6 as a number and refuses a key that is given twice.
        content = OmegaConf.load(path)
    except YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {_one_line(error)}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {_one_line(error)}.") from None
    if not isinstance(content, DictConfig):
        raise ConfigError(f"{path} holds a list, where a config has sections such as 'data:' and 'trainer:'.")
    return _plain(content)


def _parse_overrides(overrides: Sequence[str]) -> _Source:
    merged = OmegaConf.create()
    problems = []
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not (key and equals):
            problems.append(f"{COMMAND_LINE}: '{override}' is not of the form key=value, e.g. optim.lr=1e-5.")
            continue
        try:
            merged = typing.cast(DictConfig, OmegaConf.merge(merged, OmegaConf.from_dotlist([override])))
        except (YAMLError, OmegaConfBaseException) as error:
            problems.append(f"{COMMAND_LINE}: the value in '{override}' is not valid YAML ({_one_line(error)}).")
    if problems:
        raise ConfigError(problems)
    return _Source(name=COMMAND_LINE, settings=_plain(merged))


def _plain(content: DictConfig) -> dict[str, Any]:
    return typing.cast(dict[str, Any], OmegaConf.to_container(content, resolve=False))


def _apply(config: DictConfig, source: _Source, keys: Mapping[str, Key]) -> Iterator[str]:
    """Set every value of `source` in `config`; yields what is wrong."""
    sections = {name.rpartition(".")[0] for name in keys}
    for name, value in _leaves(source.settings, sections, keys):
        if name in sections:
            yield f"{source.name}: '{name}' is a section with keys of its own, and cannot be {value!r}."
        elif name not in keys:
            yield f"{source.name}: unknown key '{name}'; {_suggestion(name, list(keys))}"
        elif problems := list(_entry_problems(source.name, keys[name], value)):
            yield from problems
        elif not _assign(config, keys[name], value):
            yield f"{source.name}: '{name}' must be {keys[name].expected}, not {value!r}."


def _entry_problems(source: str, key: Key, value: Any) -> Iterator[str]:
    """Unknown keys in the entries of a list of settings; whatever else is wrong with them shows as a wrong type."""
    if key.entry_class is None:
        return
    for number, entry in enumerate(value if isinstance(value, list) else [value]):
        known = [item.name for item in key.entry_keys(number)]
        for name in entry if isinstance(entry, Mapping) else ():
            full = f"{key.name}[{number}].{name}"
            if full not in known:
                yield f"{source}: unknown key '{full}'; {_suggestion(full, known)}"


def _leaves(
    settings: Mapping[Any, Any], sections: set[str], keys: Mapping[str, Key], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Dotted names and values, following mappings as far as there is no key that they would be the value of."""
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if name in sections and value in (None, {}):
            continue  # a section whose keys are all commented out
        if isinstance(value, Mapping) and value and name not in keys:
            yield from _leaves(value, sections, keys, f"{name}.")
        else:
            yield name, value


def _assign(config: DictConfig, key: Key, value: Any) -> bool:
    """Set one value, converted as OmegaConf does; False if its type is wrong."""
    is_reference = isinstance(value, str) and ("${" in value or value == "???")
    if typing.get_origin(key.annotation) is list and not is_reference and not isinstance(value, list | None):
        value = [value]  # one file stands for a list of one
    if key.annotation is bool and not isinstance(value, bool | str):
        return False  # OmegaConf would take any number
    try:
        OmegaConf.update(config, key.name, value)
    except OmegaConfBaseException:
        return False
    return True


def _unresolved(config: DictConfig, keys: Mapping[str, Key]) -> Iterator[str]:
    """Values that are still open, and problems with `${…}`: they show only once all sources are in place."""
    for name, key in keys.items():
        try:
            OmegaConf.select(config, name, throw_on_missing=True)
        except MissingMandatoryValue:
            yield f"'{name}' is left open (???): give it a value, e.g. {name}=… on the command line."
        except OmegaConfBaseException as error:
            yield f"'{name}' must be {key.expected}, but its reference cannot be followed: {_one_line(error)}."


def _suggestion(unknown: str, known: Sequence[str]) -> str:
    """What the person may have meant: the same key in another section, a key of another spelling, or the section."""
    section, _, leaf = unknown.rpartition(".")
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section}
    # verl's own names are longer at the front: actor_rollout_ref.actor.ppo_epochs.
    same_ending = [name for name in known if unknown.endswith(f".{name}")]
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    if siblings:  # comparing whole names would find any key of a section with a long name similar
        similar = [siblings[match] for match in get_close_matches(leaf, siblings, n=1, cutoff=_SIMILAR)]
    else:
        similar = get_close_matches(unknown, known, n=1, cutoff=_SIMILAR)
    for matches in (same_ending, get_close_matches(unknown, same_leaf, n=1, cutoff=0.0), similar):
        if matches:
            return f"did you mean '{matches[0]}'?"
    if siblings:
        return f"'{section}' has {', '.join(siblings)}."
    return f"the sections are {', '.join(dict.fromkeys(name.partition('.')[0] for name in known))}."


def _expand_home(value: str | list[str] | None) -> str | list[str] | None:
    if isinstance(value, str):
        return str(Path(value).expanduser()) if value.startswith("~") else value
    return value if value is None else [typing.cast(str, _expand_home(item)) for item in value]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split("full_key:")[0].split()).rstrip(".")
