"""What `rollout.sglang` may hold: the arguments of the installed SGLang, read without importing it."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_FIELDS = Path("srt", "arg_groups", "field_order.py")
"""In SGLang 0.5.23: the names of all its server arguments, in one tuple."""
_ANNOTATIONS = Path("srt", "arg_groups", "fields")
"""And what each of them may be: `name: A[type, …]`."""
_TUPLE = "POSITIONAL_FIELD_ORDER"

EXPERT_OPTION = "ep_size"
CACHE_OPTION = "max_total_tokens"
MASK_OPTION = "sampling_mask_max_tokens"
DEFAULT_MASK = 4096
"""SGLang's default of that option: tokens that cuts may leave, where log-probs are to be of what is left."""
MASK_HEADROOM = 96
"""Tokens that SGLang may keep beyond top-k, where the last ones are equally likely."""

_WORLD = "the ranks that torchrun starts"
SET_ELSEWHERE: dict[str, str] = {
    "base_gpu_id": _WORLD,
    "context_length": "data.max_prompt_length and data.max_response_length",
    "device": "the machine",
    "dist_init_addr": _WORLD,
    "dtype": "model.dtype",
    "enable_memory_saver": "the machine",
    "enable_return_routed_experts": "actor.router_replay.mode",
    "load_format": "the weight sync",
    "max_running_requests": "rollout.max_num_seqs",
    "mem_fraction_static": "rollout.gpu_memory_utilization",
    "model_path": "model.path",
    "nnodes": _WORLD,
    "node_rank": _WORLD,
    "random_seed": "trainer.seed",
    "skip_tokenizer_init": "megarl, which sends token ids",
    "tokenizer_path": "model.path",
    "tp_size": "rollout.tensor_model_parallel_size",
}
"""Arguments that megarl gives SGLang itself, and what decides them."""

_ANOTHER_DISTRIBUTION = "tokens would be drawn from another distribution than the one that log-probs are of"
_OTHER_RANKS = "weights reach an engine by its tensor-parallel ranks alone"
_NO_ADAPTERS = "weights come whole, and SGLang's adapters give them other names"
UNUSABLE: dict[str, str] = {
    "allow_auto_truncate": "prompts would be cut without a word",
    "disaggregation_mode": "an engine does both, prefill and decode",
    "dp_size": _OTHER_RANKS,
    "enable_lora": _NO_ADAPTERS,
    "enable_watermark": _ANOTHER_DISTRIBUTION,
    "is_embedding": "such an engine generates nothing",
    "json_model_override_args": "the engine's model would not be the trainer's: change the model's config.json",
    "lora_paths": _NO_ADAPTERS,
    "max_queued_requests": "SGLang refuses what is beyond it, and gets a whole batch at once",
    "pp_size": _OTHER_RANKS,
    "preferred_sampling_params": f"{_ANOTHER_DISTRIBUTION}; rollout.temperature, top_p and top_k say how to sample",
}
"""Arguments with which a run would end or, worse, learn from something else than it was told to; and why."""
_LOOKED_AT_HERE = {*SET_ELSEWHERE, *UNUSABLE, EXPERT_OPTION, MASK_OPTION}

_TYPES: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (float, int)}
"""What YAML gives for an annotation. Other kinds of values SGLang looks at itself; these it would take as true."""
_WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number"}


def option_problems(options: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with `rollout.sglang`; without SGLang only what megarl itself knows of its arguments."""
    known = known_options()
    for name in options:
        if name in SET_ELSEWHERE:
            yield f"rollout.sglang.{name} is set by {SET_ELSEWHERE[name]}: leave it out."
        elif known is not None and name not in known:
            similar = get_close_matches(name, known, n=1)
            hint = f"did you mean {similar[0]}?" if similar else "see the fields of its ServerArgs."
            yield f"rollout.sglang.{name} is not an argument of the installed SGLang; {hint}"
        elif name in UNUSABLE:
            yield f"rollout.sglang.{name} cannot be used, since {UNUSABLE[name]}; leave it out."
    yield from _value_problems({name: value for name, value in options.items() if name not in _LOOKED_AT_HERE})
    for name in (EXPERT_OPTION, MASK_OPTION):  # the two that megarl itself reckons with
        value = options.get(name, 1)
        if type(value) is not int or value < 1:
            yield f"rollout.sglang.{name} must be a whole number of at least 1, not {value!r}."


def _value_problems(options: Mapping[str, Any]) -> Iterator[str]:
    annotations = annotations_of(options)
    for name, value in options.items():
        annotation = annotations.get(name, "")
        kind = (
            annotation.removeprefix("Optional[").removesuffix("]") if annotation.startswith("Optional") else annotation
        )
        if value is None and annotation.startswith("Optional"):
            continue
        if kind.startswith("Literal["):
            allowed = ast.literal_eval(kind.removeprefix("Literal"))
            if value not in allowed:
                yield f"rollout.sglang.{name} is {value!r}, but must be one of {', '.join(map(str, allowed))}."
        elif kind in _TYPES and type(value) not in _TYPES[kind]:
            yield f"rollout.sglang.{name} is {value!r}, but must be {_WORDS[kind]}."


def annotations_of(names: Collection[str]) -> dict[str, str]:
    """How the installed SGLang annotates those of its arguments; empty where it is not installed."""
    folder = _installed() if names else None
    if folder is None:
        return {}
    return {
        name: annotation
        for file in sorted((folder / _ANNOTATIONS).glob("*.py"))
        for name, annotation in _annotations(file)
        if name in names
    }


def _annotations(file: Path) -> Iterator[tuple[str, str]]:
    for statement in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match statement:
            case ast.AnnAssign(
                target=ast.Name(id=name),
                annotation=ast.Subscript(value=ast.Name(id="A"), slice=ast.Tuple(elts=[annotation, *_])),
            ):
                yield name, ast.unparse(annotation)


def _installed() -> Path | None:
    package = find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        return None
    return Path(package.submodule_search_locations[0])


def known_options() -> tuple[str, ...] | None:
    """Every argument of the installed SGLang; None where it is not installed."""
    folder = _installed()
    if folder is None:
        return None
    source = folder / _FIELDS
    for statement in ast.parse(source.read_text(encoding="utf-8")).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == _TUPLE:
                return tuple(ast.literal_eval(value))
    raise RuntimeError(f"{source} has no {_TUPLE}: this is not the SGLang that megarl's extra `sglang` asks for")
