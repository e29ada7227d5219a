"""When the reference's log-probs are computed, and which runs are refused, in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch.distributed as dist

from megarl import platform

platform.current()  # prepares Megatron-Core before anything imports it
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")

from megarl.config import ConfigError, RunConfig, load_config  # noqa: E402
from megarl.config.layout import Layout  # noqa: E402
from megarl.data.chat import load_chat_tokenizer  # noqa: E402
from megarl.parallel.groups import build_groups  # noqa: E402
from megarl.trainers import reference  # noqa: E402
from megarl.trainers.preference import PairTask  # noqa: E402
from megarl.trainers.preference_run import run_preference  # noqa: E402
from megarl.trainers.setup import load_model  # noqa: E402


def when_the_reference_is_asked(config_path: Path) -> dict[str, tuple[bool, list[str]]]:
    """Whether log-probs were computed, and what was said, in several situations one after another."""
    groups = build_groups(Layout(world_size=dist.get_world_size()))
    config = load_config(config_path, [])
    model = load_model(config, groups)
    computed: list[int] = []
    compute = reference.logprob_sums_everywhere

    def counted(*arguments: Any, **settings: Any) -> Any:
        computed.append(len(arguments[1]))
        return compute(*arguments, **settings)

    reference.logprob_sums_everywhere = counted  # type: ignore[assignment]

    def asked(changed: RunConfig = config) -> tuple[bool, list[str]]:
        computed.clear()
        task = PairTask(changed, load_chat_tokenizer(config.model.path))
        task.add_reference(model)
        # One rank may still write while another reads.
        dist.barrier()
        return bool(computed), [note.split("/")[-1] for note in task.notes]

    kept = Path(config.trainer.default_local_dir, "reference-logprobs-train.safetensors")
    weights = Path(config.model.path, "model.safetensors")
    found = {"at first": asked(), "again": asked()}
    if groups.rank == 0:
        kept.write_bytes(kept.read_bytes()[:-8])
    dist.barrier()
    found["after the file was damaged"] = asked()
    if groups.rank == 0:
        weights.write_bytes(weights.read_bytes())
    dist.barrier()
    found["after the weights were written anew"] = asked()
    shorter = dataclasses.replace(config.data, max_prompt_length=20, max_response_length=5, truncation="truncate_left")
    found["with other lengths"] = asked(dataclasses.replace(config, data=shorter))
    found["at last, with the first lengths"] = asked()
    return found


def refusals(config_path: Path, folder: Path) -> dict[str, str]:
    """What is said about data that cannot be learned from."""
    groups = build_groups(Layout(world_size=dist.get_world_size()))
    rows = [{"prompt": f"Say {i}", "response": f"five {i}", "label": True} for i in range(20)]
    pairs = [{"prompt": f"Say {i}", "chosen": "five", "rejected": "five"} for i in range(20)]
    messages = {}
    (folder / "round-1").mkdir()
    (folder / "round-1" / "round.json").write_text(json.dumps({"key": "another", "over": False, "note": ""}))
    rounds = ["preference.rounds=1", "preference.loss_type=spin", f"trainer.default_local_dir={folder}"]
    for name, content, overrides in (
        ("a round of another run", rows, rounds),
        (
            "more prompts than there are",
            rows,
            [*rounds, "trainer.resume_mode=disable", "preference.prompts_per_round=21"],
        ),
        ("one label", rows, ["preference.loss_type=kto"]),
        ("equal pairs", pairs, []),
        ("labels for dpo", rows, []),
        ("a loss that nobody has", pairs, ["preference.loss_type=hinge"]),
    ):
        file = folder / "bad.parquet"
        pq.write_table(pa.Table.from_pylist(content), file)
        config = load_config(config_path, [*overrides, f"data.train_files={file}"])
        try:
            run_preference(config, groups)
            messages[name] = "nothing was wrong"
        except ConfigError as error:
            messages[name] = str(error)
    return messages
