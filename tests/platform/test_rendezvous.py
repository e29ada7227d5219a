"""Where the ranks of a start meet, with threads that play ranks and a real store."""

from __future__ import annotations

import datetime
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from megarl.platform import RanksMissingError
from megarl.platform.rendezvous import store_of_this_start

LONG, SHORT = datetime.timedelta(seconds=60), datetime.timedelta(seconds=1)


@pytest.fixture(autouse=True)
def agent(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """The store that torchrun has."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    return store


def test_a_second_start_does_not_see_what_the_first_has_left() -> None:
    with ThreadPoolExecutor(2) as ranks:
        for start in ("first", "second"):
            stores = list(ranks.map(lambda rank: store_of_this_start(rank, 2, LONG), range(2)))
            assert not stores[1].check(["mark"])
            stores[0].set("mark", start)
            assert stores[1].get("mark").decode() == start


def test_ranks_that_do_not_come_are_named() -> None:
    with ThreadPoolExecutor(2) as ranks:
        rank_2 = ranks.submit(store_of_this_start, 2, 5, LONG)
        with pytest.raises(RanksMissingError, match=r"^ranks 1, 3, 4 of 5 did not come within 1 s: "):
            store_of_this_start(0, 5, SHORT)
        rank_2.result()
