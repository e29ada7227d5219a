"""Hugging Face folders written by several ranks: the same bytes whoever writes, and nobody more than a share."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch

from megarl.weights.exchange import Part, Wanted, plan_rounds
from megarl.weights.safetensors_io import TensorInfo
from megarl.weights.save_hf import share_files
from tests.spawn import run_ranks
from tests.tiny_models import make_hf_model
from tests.tools.converters import same_tensors
from tests.weights import save_hf_ranks

FILE_BYTES, ROUND_BYTES = 60_000, 30_000
ONE, TWO, FOUR = [{}], [{"tp": 2}, {"pp": 2}, {"ep": 2}], [{"tp": 2, "pp": 2}, {"pp": 2, "ep": 2}, {"tp": 2}]


def test_a_file_is_written_by_the_rank_that_holds_most_of_it():
    assert share_files([[9, 1], [2, 8], [7, 3], [4, 6]]) == [0, 1, 0, 1]


def test_no_rank_writes_more_than_its_share_even_if_it_holds_everything():
    writers = share_files([[5, 0, 0]] * 7)
    assert max(writers.count(rank) for rank in range(3)) == math.ceil(7 / 3)


def test_ranks_that_hold_as_much_take_turns():
    assert share_files([[5, 5, 5]] * 3) == [0, 1, 2]


def random_wanted(ranks: int, seed: int) -> Wanted:
    """Tensors of one dimension in parts of several ranks."""
    rng = random.Random(seed)
    by_rank: list[list[str]] = [[] for _ in range(ranks)]
    tensors, parts = {}, {}
    for number in range(200):
        name, length = f"t{number}", rng.choice([1, 10, 100, 1000])
        by_rank[rng.randrange(ranks)].append(name)
        cut = rng.randrange(length)
        tensors[name] = TensorInfo((length,), torch.uint8)
        edges = [(0, cut), (cut, length)]
        parts[name] = [Part(((start, stop),), rng.randrange(ranks)) for start, stop in edges if start < stop]
    return Wanted(by_rank, tensors, parts)


def given_by(rank: int, parts: Sequence[Part]) -> int:
    return sum(part.box[0][1] - part.box[0][0] for part in parts if part.rank == rank)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("limit", [1, 300, 5000])
def test_rounds_bring_each_rank_what_it_wants_in_order_and_stay_within_the_limit(seed, limit):
    wanted = random_wanted(4, seed)
    rounds = plan_rounds(wanted, limit)
    for rank, names in enumerate(wanted.by_rank):
        assert [name for found in rounds for taker, name in found if taker == rank] == names
    for found in rounds:
        for rank in range(4):
            taken = [wanted.tensors[name].num_bytes for taker, name in found if taker == rank]
            given = [given_by(rank, wanted.parts[name]) for taker, name in found if taker != rank]
            for sizes in (taken, [size for size in given if size]):
                assert sum(sizes) <= limit or len(sizes) == 1  # a tensor that is larger than the limit


def test_rounds_keep_all_ranks_busy():
    """Four ranks that each want what they hold themselves need no more rounds than one of them alone."""
    tensors = {f"{rank}.{number}": TensorInfo((100,), torch.uint8) for rank in range(4) for number in range(10)}
    by_rank = [[f"{rank}.{number}" for number in range(10)] for rank in range(4)]
    parts = {name: [Part(((0, 100),), int(name[0]))] for name in tensors}
    assert len(plan_rounds(Wanted(by_rank, tensors, parts), 200)) == 5


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder for each layout, and what its ranks reported."""
    folder = tmp_path_factory.mktemp("written")
    hf = make_hf_model("qwen3_moe", folder / "hf", dtype=torch.bfloat16)
    reports = []
    for layouts, ranks in ((ONE, 1), (TWO, 2), (FOUR, 4)):
        (folder / f"{ranks}").mkdir()
        arguments = (layouts, hf, folder / f"{ranks}", FILE_BYTES, ROUND_BYTES)
        results = run_ranks(save_hf_ranks.write_in, ranks, *arguments, timeout=170)
        reports += [[rank[number] for rank in results] for number in range(len(layouts))]
    return folder, reports


def test_every_layout_writes_the_same_bytes_into_the_same_files(written):
    folder, _ = written
    one = folder / "1" / "0"
    assert len(list(one.glob("*.safetensors"))) > 8
    assert same_tensors(folder / "hf", one)
    for other in [*(folder / "2").iterdir(), *(folder / "4").iterdir()]:
        assert {path.name: path.read_bytes() for path in other.iterdir()} == {
            path.name: path.read_bytes() for path in one.iterdir()
        }


def test_the_ranks_share_the_writing_and_hear_of_all_of_it(written):
    folder, reports = written
    total = sum(path.stat().st_size for path in (folder / "1" / "0").glob("*.safetensors"))
    assert len(reports) == len(ONE) + len(TWO) + len(FOUR)
    for ranks in reports:
        sizes = [rank["written"] for rank in ranks]
        assert 0.9 * total < sum(sizes) < total  # the rest are headers
        assert max(sizes) - min(sizes) <= 2 * FILE_BYTES
        assert {rank["told"] for rank in ranks} == {sum(sizes)}
