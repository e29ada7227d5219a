"""Where metrics go besides the console and the files of the run: wandb, MLflow, Prometheus, and what guards them all.

Each sink has the two methods of `Sink`. `GuardedSink` and `BackgroundSink` stand before the real one, so that a sink
that fails costs its own metrics and not the run, and one that is slow holds up nobody.
"""

from megarl.observe.sinks.background import BackgroundSink
from megarl.observe.sinks.guarded import GuardedSink, Sink
from megarl.observe.sinks.identity import RunIdentity, run_name

__all__ = ["BackgroundSink", "GuardedSink", "RunIdentity", "Sink", "run_name"]
