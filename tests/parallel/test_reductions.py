"""Statistics over ranks, compared with numpy on the concatenated data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.parallel.reductions import global_mean_std, global_min_max, global_sum
from tests.spawn import run_ranks


def _uneven_shards(offset: float = 0.0, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    """Two ranks' values [rows, time] of different sizes, with NaN and infinity wherever the mask is 0."""
    generator = torch.Generator().manual_seed(3)
    shards = []
    for rows in (5, 2):
        values = (torch.randn(rows, 11, generator=generator, dtype=torch.float64) + offset).to(dtype)
        mask = torch.rand(rows, 11, generator=generator) < 0.6
        values[~mask] = (
            torch.tensor([float("nan"), float("inf"), -float("inf")]).repeat(20)[: int((~mask).sum())].to(dtype)
        )
        shards.append({"values": values, "mask": mask})
    return shards


def _valid(shards: list[dict[str, Tensor]]) -> np.ndarray:
    return np.concatenate([shard["values"][shard["mask"]].double().numpy() for shard in shards])


def _statistics(shards: list[dict[str, Tensor]]) -> dict[str, Any]:
    mine = shards[dist.get_rank()]
    mean, std, count = global_mean_std(mine["values"], mine["mask"], dist.group.WORLD)
    smallest, largest = global_min_max(mine["values"], mine["mask"], dist.group.WORLD)
    return {"mean": mean, "std": std, "count": count, "min": smallest, "max": largest}


def _all_cases(cases: dict[str, list[dict[str, Tensor]]]) -> dict[str, dict[str, Any]]:
    return {name: _statistics(shards) for name, shards in cases.items()}


def _sums() -> dict[str, Tensor]:
    rank = dist.get_rank()
    mine = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (rank + 1)
    return {
        "float": global_sum(mine, dist.group.WORLD),
        "integer": global_sum(torch.tensor(2**60 + rank), dist.group.WORLD),
        "bfloat16": global_sum(torch.tensor([1.0, 2.0], dtype=torch.bfloat16), dist.group.WORLD),
        "input afterwards": mine / (rank + 1),
    }


def test_two_ranks_agree_with_numpy_on_the_concatenated_values() -> None:
    nothing = {"values": torch.full((2, 3), float("nan")), "mask": torch.zeros(2, 3, dtype=torch.bool)}
    no_rows = {"values": torch.zeros(0, 3), "mask": torch.zeros(0, 3, dtype=torch.bool)}
    poisoned = _uneven_shards()
    poisoned[0]["values"][:] = poisoned[0]["values"].masked_fill(poisoned[0]["mask"], float("nan"))
    cases = {
        "float32": _uneven_shards(),
        "bfloat16": _uneven_shards(dtype=torch.bfloat16),
        "large offset": _uneven_shards(offset=1e8, dtype=torch.float64),
        "one rank empty": [_uneven_shards()[0], nothing],
        "one rank without rows": [no_rows, _uneven_shards()[1]],
        "0/1 mask": [{"values": s["values"], "mask": s["mask"].to(torch.int64)} for s in _uneven_shards()],
        "nothing at all": [nothing, no_rows],
        "NaN inside the mask": poisoned,
    }
    by_rank = run_ranks(_all_cases, 2, cases)
    assert repr(by_rank[0]) == repr(by_rank[1]), "every rank has the same numbers"
    for name, shards in cases.items():
        ours = by_rank[0][name]
        valid = _valid([{**shard, "mask": shard["mask"].bool()} for shard in shards])
        if name == "nothing at all":
            assert [ours[key].item() for key in ("mean", "std", "count", "min", "max")] == [0, 0, 0, np.inf, -np.inf]
            continue
        expected = {
            "mean": valid.mean(),
            "std": valid.std(ddof=1),
            "count": len(valid),
            "min": valid.min(),
            "max": valid.max(),
        }
        for key, value in expected.items():
            np.testing.assert_allclose(ours[key].item(), value, rtol=1e-12, err_msg=f"{key} of {name}")


def test_a_mean_of_1e8_does_not_swallow_a_spread_of_1e_3() -> None:
    deviations = torch.tensor([-1.0, 0.0, 1.0, 2.0], dtype=torch.float64) * 1e-3
    values = deviations + 1e8
    _, std, _ = global_mean_std(values, None, None)
    # E[x²] − mean² has an absolute error of about 1 here: 1e16 · 2⁻⁵³.
    one_pass = (values.square().mean() - values.mean().square()).abs().sqrt()
    expected = deviations.std()
    assert abs(std - expected) < 1e-4 * expected
    assert abs(one_pass - expected) > 0.1 * expected


def test_one_process_needs_no_group() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, float("nan")])
    mask = torch.tensor([True, True, True, False])
    mean, std, count = global_mean_std(values, mask, None)
    np.testing.assert_allclose([mean, std, count], [7 / 3, np.std([1, 2, 4], ddof=1), 3])
    assert [bound.item() for bound in global_min_max(values, mask, None)] == [1.0, 4.0]
    assert global_sum(values[:3], None).tolist() == [1.0, 2.0, 4.0]


def test_a_single_value_has_no_spread() -> None:
    mean, std, count = global_mean_std(torch.tensor([3.0, float("nan")]), torch.tensor([1, 0]), None)
    assert [mean.item(), std.item(), count.item()] == [3.0, 0.0, 1.0]


def test_statistics_carry_no_gradient() -> None:
    values = torch.tensor([1.0, 2.0], requires_grad=True)
    assert not any(value.requires_grad for value in global_mean_std(values, None, None))


def test_a_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mask has shape \[3\], values \[2, 3\]"):
        global_mean_std(torch.zeros(2, 3), torch.ones(3), None)


def test_sums_are_elementwise_exact_and_leave_their_input_alone() -> None:
    for total in run_ranks(_sums, 2):
        assert total["float"].tolist() == [[3.0, 6.0], [9.0, 12.0]]
        assert total["integer"].item() == 2**61 + 1  # float64 would round it
        assert total["bfloat16"].dtype == torch.bfloat16 and total["bfloat16"].tolist() == [2.0, 4.0]
        assert total["input afterwards"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
