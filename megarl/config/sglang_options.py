"""What `rollout.sglang` may hold: the arguments of the installed SGLang, read without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_FIELDS = Path("srt", "arg_groups", "field_order.py")
"""In SGLang 0.5.23: the names of all its server arguments, in one tuple."""
_TUPLE = "POSITIONAL_FIELD_ORDER"

EXPERT_OPTION = "ep_size"
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


def option_problems(options: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the names in `rollout.sglang`. Without SGLang only those that megarl sets can be told."""
    known = known_options()
    for name in options:
        if name in SET_ELSEWHERE:
            yield f"rollout.sglang.{name} is set by {SET_ELSEWHERE[name]}: leave it out."
        elif known is not None and name not in known:
            similar = get_close_matches(name, known, n=1)
            hint = f"did you mean {similar[0]}?" if similar else "see the fields of its ServerArgs."
            yield f"rollout.sglang.{name} is not an argument of the installed SGLang; {hint}"
    for name in (EXPERT_OPTION, MASK_OPTION):  # the two that megarl itself reckons with
        value = options.get(name, 1)
        if type(value) is not int or value < 1:
            yield f"rollout.sglang.{name} must be a whole number of at least 1, not {value!r}."


def known_options() -> tuple[str, ...] | None:
    """Every argument of the installed SGLang; None where it is not installed."""
    package = find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        return None
    source = Path(package.submodule_search_locations[0], _FIELDS)
    for statement in ast.parse(source.read_text(encoding="utf-8")).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == _TUPLE:
                return tuple(ast.literal_eval(value))
    raise RuntimeError(f"{source} has no {_TUPLE}: this is not the SGLang that megarl's extra `sglang` asks for")
