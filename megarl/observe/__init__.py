"""What a run tells: metrics and where they go, how long its phases take, how much of the hardware it uses.

`Tracker` writes the metrics of a step to the console, to files and to trackers outside. `MetricSums` makes numbers of
all ranks into one, `Timers` and `flops` measure, `StepProfiler` traces, and `out_of_memory` says what took the memory.
Every metric is named in `docs/metrics.md`.
"""

from megarl.observe.flops import ModelFlops, measure_peak_tflops, performance
from megarl.observe.profile import StepProfiler
from megarl.observe.reduce import MetricSums
from megarl.observe.timing import Timers
from megarl.observe.tracker import Tracker

__all__ = ["MetricSums", "ModelFlops", "StepProfiler", "Timers", "Tracker", "measure_peak_tflops", "performance"]
