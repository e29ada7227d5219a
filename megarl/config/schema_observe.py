"""The `observe` section: where a run can be watched from outside, and what it records when it is slow or fails."""

from dataclasses import dataclass, field

from megarl.config.fields import rules, setting


@dataclass(kw_only=True, slots=True)
class ProfileConfig:
    """Traces of torch's profiler, for chrome://tracing and ui.perfetto.dev."""

    steps: list[int] = field(default_factory=list, metadata=rules(at_least=1))
    """Steps that are traced, one file for each step and rank; empty: none. A trace slows its step down and is large, so
    take a few steps after the first, in which memory is still being allocated."""
    ranks: list[int] = field(default_factory=lambda: [0], metadata=rules(at_least=0))
    """Ranks that write traces; one of each pipeline stage shows the bubbles."""
    dir: str | None = setting(None, local_path=True)
    """Folder of the traces; null: `profile` in `trainer.default_local_dir`."""


@dataclass(kw_only=True, slots=True)
class ObserveConfig:
    """What is measured, and where it can be watched."""

    peak_tflops: float | None = setting(None, above=0)
    """Peak of one device in 10^12 floating-point operations a second, which MFU is a share of; null: measured once
    with a large matrix product."""
    wandb_mode: str | None = setting(None, choices=("online", "offline"))
    """With `wandb` in `trainer.logger`: whether metrics go to the server as they come, or to files in
    `trainer.default_local_dir` that `wandb sync` sends later; null: what WANDB_MODE says, or online."""
    mlflow_tracking_uri: str | None = None
    """With `mlflow` in `trainer.logger`: the server, e.g. http://mlflow:5000; null: what MLFLOW_TRACKING_URI says."""
    prometheus_host: str = "0.0.0.0"
    """With `prometheus` in `trainer.logger`: address that rank 0 answers Prometheus at. The default is every address of
    its node; 127.0.0.1 is that node alone."""
    prometheus_port: int = setting(9400, at_least=1, at_most=65535)
    """With `prometheus` in `trainer.logger`: port that rank 0 answers Prometheus at, path /metrics. Where it is taken,
    a warning says so and the run goes on without."""
    hang_timeout_s: float = setting(600.0, at_least=1, at_most=604_800)
    """Seconds that a rank waits in a collective before the run says which ranks are missing, and ends. It has to be
    more than ranks may lie apart, such as the longest response of one and the shortest of another. 600: torch's own
    limit on NCCL; at most a week."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Traces of torch's profiler."""
    memory_stacks: bool = False
    """Whether the snapshot that a GPU out of memory leaves says where each block was allocated. It costs a few
    microseconds for each allocation, so it is for the run that has failed once."""
