"""The sampler loses no row, says the same everywhere, and goes on exactly where it stood."""

import json
import subprocess
import sys
from collections import Counter

import pytest

from megarl.config import ConfigError
from megarl.data.sampler import PromptSampler
from tests.launch import LIMIT_S


def draw(sampler: PromptSampler, batches: int) -> list[list[int]]:
    return [sampler.next_batch() for _ in range(batches)]


def test_every_row_comes_once_an_epoch_although_batches_do_not_divide_it():
    sampler = PromptSampler(10, 4, shuffle=True, seed=3)
    stream = [row for batch in draw(sampler, 10) for row in batch]
    for epoch in range(4):
        assert sorted(stream[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert sampler.epoch == 4.0


def test_epochs_have_different_orders_and_seeds_have_different_orders():
    orders = {tuple(batch) for seed in (-1, 0, 1) for batch in draw(PromptSampler(50, 50, shuffle=True, seed=seed), 5)}
    assert len(orders) == 15


def test_every_place_is_equally_likely_for_a_row():
    firsts = Counter(PromptSampler(5, 5, shuffle=True, seed=seed).next_batch()[0] for seed in range(2000))
    # 400 expected each, standard deviation 18.
    assert all(310 < firsts[row] < 490 for row in range(5))


def test_without_shuffle_rows_come_in_the_order_of_the_files():
    assert draw(PromptSampler(5, 3, shuffle=False, seed=0), 3) == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


def test_another_process_draws_the_same():
    program = (
        "from megarl.data.sampler import PromptSampler\n"
        "sampler = PromptSampler(1000, 300, shuffle=True, seed=17)\n"
        "print([sampler.next_batch() for _ in range(4)])"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=LIMIT_S
    )
    assert json.loads(output.stdout) == draw(PromptSampler(1000, 300, shuffle=True, seed=17), 4)


def test_the_order_is_pinned_so_that_old_checkpoints_resume():
    assert PromptSampler(8, 8, shuffle=True, seed=1).next_batch() == [1, 6, 0, 3, 7, 4, 2, 5]


def test_a_resumed_run_goes_on_in_the_middle_of_an_epoch():
    whole = PromptSampler(10, 3, shuffle=True, seed=5)
    expected = draw(whole, 9)
    first = PromptSampler(10, 3, shuffle=True, seed=5)
    assert draw(first, 5) == expected[:5]
    state = json.loads(json.dumps(first.state_dict()))
    second = PromptSampler(10, 3, shuffle=True, seed=5)
    second.load_state_dict(state)
    assert draw(second, 4) == expected[5:]


def test_a_resumed_run_may_have_another_batch_size():
    first = PromptSampler(10, 3, shuffle=True, seed=5)
    seen = [row for batch in draw(first, 2) for row in batch]
    second = PromptSampler(10, 2, shuffle=True, seed=5)
    second.load_state_dict(first.state_dict())
    seen += [row for batch in draw(second, 2) for row in batch]
    assert sorted(seen) == list(range(10))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_rows": 11}, ["data.train_files", "10", "11"]),
        ({"seed": 6}, ["data.seed", "5", "6"]),
        ({"shuffle": False}, ["data.shuffle", "True", "False"]),
        ({"fingerprint": "b"}, ["data.train_files", "rows are others"]),
    ],
    ids=["rows", "seed", "shuffle", "fingerprint"],
)
def test_a_state_of_other_data_is_told(change, words):
    settings = {"num_rows": 10, "shuffle": True, "seed": 5, "fingerprint": "a"}
    state = PromptSampler(batch_size=3, **settings).state_dict()
    assert PromptSampler(batch_size=2, **settings).difference(state) is None
    difference = PromptSampler(batch_size=3, **{**settings, **change}).difference(state)
    for word in words:
        assert word in difference


def test_a_sampler_that_begins_anew_draws_what_a_new_one_does():
    sampler, new = (PromptSampler(10, 4, shuffle=True, seed=3) for _ in range(2))
    draw(sampler, 2)
    sampler.reorder(1)
    draw(sampler, 2)
    sampler.begin_anew()
    assert draw(sampler, 6) == draw(new, 6)


def test_a_batch_above_the_dataset_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"data.train_batch_size is 9.*only 8 usable rows"):
        PromptSampler(8, 9, shuffle=True, seed=0)


def test_the_number_of_batches_counts_over_epochs():
    assert PromptSampler(10, 4, shuffle=True, seed=0).num_batches(1) == 2
    assert PromptSampler(10, 4, shuffle=True, seed=0).num_batches(2) == 5


def test_another_order_takes_the_rest_of_the_epoch_in_it_and_then_whole_epochs():
    sampler, plain = (PromptSampler(10, 4, shuffle=True, seed=3) for _ in range(2))
    first = sampler.next_batch()
    sampler.reorder(1)
    drawn = first + [row for _ in range(4) for row in sampler.next_batch()]
    unchanged = [row for _ in range(5) for row in plain.next_batch()]
    assert drawn[:4] == unchanged[:4] and drawn[4:10] != unchanged[4:10] and drawn[10:] != unchanged[10:]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))


def test_each_other_order_is_its_own_and_outlives_a_checkpoint():
    orders = []
    for number in (1, 2):
        sampler, resumed = (PromptSampler(30, 10, shuffle=True, seed=3) for _ in range(2))
        sampler.next_batch()
        sampler.reorder(number)
        sampler.next_batch()
        resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
        orders.append([sampler.next_batch() for _ in range(5)])
        assert [resumed.next_batch() for _ in range(5)] == orders[-1]
    assert orders[0] != orders[1]
