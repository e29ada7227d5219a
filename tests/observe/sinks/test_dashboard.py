"""The Grafana dashboard asks for metrics that runs have, in panels that Grafana can place."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from megarl.observe.sinks.prometheus_sink import prometheus_name

ROOT = Path(__file__).parents[3]
DASHBOARD = json.loads((ROOT / "tools" / "grafana" / "megarl.json").read_text(encoding="utf-8"))
ENDPOINTS_OWN = {"megarl_step", "megarl_last_step_timestamp_seconds"}


def _queries(panel: dict[str, Any]) -> list[str]:
    return [target["expr"] for target in panel["targets"]]


def _documented() -> set[str]:
    """The metrics of docs/metrics.md as Prometheus has them; `<source>` and the like stand for one word."""
    found = set()
    for line in (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            for name in re.findall(r"`([^`]+)`", line.split("|")[1]):
                parts = [part.split(",") for part in re.split(r"[{}]", name)]
                expanded = ["".join(choice) for choice in itertools.product(*parts)]
                found |= {prometheus_name(re.sub(r"<\w+>", "x", one)) for one in expanded}
    return found


def test_every_metric_of_the_dashboard_is_one_of_docs_metrics_md() -> None:
    documented = _documented() | ENDPOINTS_OWN
    asked = [query for panel in DASHBOARD["panels"] for query in _queries(panel)]
    asked += [variable["query"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]
    assert len(asked) > 20
    for query in asked:
        (first, *others) = re.findall(r"megarl_\w*(?:\.\+)?", query)
        for name in (first, *others):
            assert any(re.fullmatch(name, one) for one in documented), f"{name} of {query!r} is no metric"


def test_every_panel_has_its_place_its_source_and_its_run() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = set(
            itertools.product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"]))
        )
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
        assert panel["datasource"]["uid"] == "${source}"
        assert all('project=~"$project", run=~"$run"' in query for query in _queries(panel)), panel["title"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
