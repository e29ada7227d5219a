"""How many micro-batches a stage holds, beside the formulas of the papers."""

from __future__ import annotations

import pytest

from megarl.config.layout import Layout
from megarl.planning.schedule import PassBytes, bubble, peak_in_flight


@pytest.mark.parametrize("stage", range(4))
def test_the_plain_schedule_holds_as_many_micro_batches_as_stages_are_left(stage: int) -> None:
    """1F1B (arXiv:2104.04473, 2.2.1)."""
    layout = Layout(world_size=4, pp=4)
    assert peak_in_flight(layout, stage, 100, [PassBytes(layers=1)]) == 4 - stage


@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (4, 2), (4, 5), (8, 3)])
def test_the_interleaved_schedule_holds_more_on_the_first_stage(pp: int, vpp: int) -> None:
    """1 + (p - 1) / (p · v) times the plain schedule (arXiv:2205.05198, section 4.2.3)."""
    layout = Layout(world_size=pp, pp=pp, vpp=vpp)
    held = peak_in_flight(layout, 0, 10 * pp, [PassBytes(layers=1 / vpp)] * vpp)
    assert held == pytest.approx(pp * (1 + (pp - 1) / (pp * vpp)))


def test_few_micro_batches_are_all_that_is_held() -> None:
    assert peak_in_flight(Layout(world_size=8, pp=8), 0, 3, [PassBytes(layers=1)]) == 3


def test_logits_are_gone_when_layers_are_computed_again() -> None:
    layout = Layout()
    assert peak_in_flight(layout, 0, 4, [PassBytes(layers=1, head=5, recomputed=3)]) == 6
    assert peak_in_flight(layout, 0, 4, [PassBytes(layers=1, head=5, recomputed=7)]) == 8


def test_virtual_stages_shorten_the_bubble() -> None:
    assert bubble(Layout(world_size=4, pp=4), 8) == 3 / 8
    assert bubble(Layout(world_size=4, pp=4, vpp=2), 8) == 3 / 16
