"""The latest metrics for Prometheus to fetch (https://prometheus.io/docs/instrumenting/exposition_formats)."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily

from megarl.observe.sinks.identity import RunIdentity

PREFIX = "megarl_"
_LABELS = ("project", "run", "metric")


class PrometheusSink:
    """An HTTP endpoint, `/metrics`, with a gauge for the latest value of each metric.

    Each has the labels `project`, `run` and `metric`, the name as `docs/metrics.md` has it. Two names that Prometheus
    writes alike are told apart by the last. `megarl_step` and `megarl_last_step_timestamp_seconds` are there too, the
    second for an alert on a run that no longer moves.
    """

    def __init__(self, identity: RunIdentity, host: str, port: int) -> None:
        """Opens the port.

        Raises:
            OSError: it is taken, or the host is none of this machine's.
        """
        self._labels = (identity.project, identity.name)
        # Replaced as a whole and never changed: the server's threads read it at any time.
        self._latest: dict[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(port, addr=host, registry=registry)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        own = {"step": float(step), "last_step_timestamp_seconds": time.time()}
        self._latest = {**self._latest, **metrics, **own}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """What prometheus-client asks for when somebody fetches."""
        families: dict[str, GaugeMetricFamily] = {}
        for name, value in self._latest.items():
            gauge_name = prometheus_name(name)
            family = families.setdefault(
                gauge_name, GaugeMetricFamily(gauge_name, "see docs/metrics.md", labels=_LABELS)
            )
            family.add_metric((*self._labels, name), value)
        yield from families.values()

    def close(self, *, failed: bool) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def prometheus_name(name: str) -> str:
    """A metric's name as Prometheus allows it, e.g. `megarl_actor_pg_loss` for `actor/pg_loss`."""
    return PREFIX + re.sub(r"\W", "_", name, flags=re.ASCII)
