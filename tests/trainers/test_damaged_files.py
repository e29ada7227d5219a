"""Whatever is in a file of a checkpoint, with its size unchanged and no checksums compared, a resume never crashes."""

from __future__ import annotations

import shutil
import traceback
from pathlib import Path

import pytest

from megarl.checkpoint.retention import checkpoint_folder
from tests.spawn import run_ranks
from tests.trainers.outcomes import outcomes
from tests.trainers.test_exact_resume import make_sft

KEYS = ["trainer.total_training_steps=1", "checkpoint.export_hf=false"]
FILES = ("state.json", "megarl.json", "optimizer/optimizer.json", "weights/metadata.json", "weights/.metadata")
CONTENTS = {
    "zeros": lambda size: bytes(size),
    "text": lambda size: (b"no json " * size)[:size],
    "a list": lambda size: b"[" + b" " * (size - 2) + b"]",
    "an object": lambda size: b"{" + b" " * (size - 2) + b"}",
}
CASES = [f"{content} in {file}" for file in FILES for content in CONTENTS]


def resume_all(config: str, folder: Path) -> dict[str, str]:
    """How a run ends that goes on at a checkpoint in which one file has other contents."""
    outcomes(Path(config), folder, {"whole": [*KEYS, "trainer.save_freq=1"]})
    found = {}
    for case in CASES:
        content, _, file = case.partition(" in ")
        checkpoint = checkpoint_folder(folder / case.replace("/", "-"), 1)
        shutil.copytree(checkpoint_folder(folder / "whole", 1), checkpoint)
        size = (checkpoint / file).stat().st_size
        (checkpoint / file).write_bytes(CONTENTS[content](size))
        try:
            run = {checkpoint.parents[1].name: [*KEYS, "checkpoint.verify=false"]}
            found[case] = outcomes(Path(config), folder, run)[checkpoint.parents[1].name]
        except Exception:
            found[case] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("damaged")
    (ends,) = run_ranks(resume_all, 1, make_sft(folder / "sft"), folder)
    return ends


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_file_ends_the_run_with_a_sentence_that_names_it(found: dict[str, str], case: str) -> None:
    sentence = found[case]
    assert "\n" not in sentence, sentence
    place = "weights is" if "weights/" in case else case.rpartition("/")[2].rpartition(" ")[2]
    assert f"{case.replace('/', '-')}/checkpoints/step-000001" in sentence and place in sentence
