"""What a run tells: metrics and where they go, how long its phases take, how much of the hardware it uses.

`Tracker` writes the metrics of a step to the console, TensorBoard and JSON lines. `MetricSums` makes numbers of all
ranks into one, `Timers` and `flops` measure. Every metric is named in `docs/metrics.md`.
"""

from megarl.observe.flops import ModelFlops, measure_peak_tflops, performance
from megarl.observe.reduce import MetricSums
from megarl.observe.timing import Timers
from megarl.observe.tracker import Tracker

__all__ = ["MetricSums", "ModelFlops", "Timers", "Tracker", "measure_peak_tflops", "performance"]
