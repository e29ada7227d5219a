"""Checkpoints: the `checkpoint` section. How often they are taken is `trainer.save_freq`."""

from dataclasses import dataclass

from megarl.config.fields import setting


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """How the checkpoints of `trainer.save_freq` are written, which are kept, and what is written beside them."""

    export_hf: bool = True
    """Whether the final model is also written as a Hugging Face folder, in `trainer.default_local_dir`."""
    export_hf_on_save: bool = False
    """Whether each checkpoint also holds its model as a Hugging Face folder, `hf-export`. Training waits for it."""
    async_save: bool = False
    """Whether training goes on while a checkpoint is written. Each rank then holds a copy of what it writes in host
    memory, and there is one checkpoint on its way at a time."""
    verify: bool = True
    """Whether a checkpoint's checksums are compared when a run resumes, which reads each file once more; sizes always
    are."""
    keep_last: int | None = setting(None, at_least=1)
    """Newest checkpoints that are kept; null: all. Older ones are deleted after the next one is published, unless
    `keep_every` or `keep_best` keep them."""
    keep_every: int | None = setting(None, at_least=1)
    """With `keep_last`: checkpoints of steps that are multiples of this are kept too; null: none for that reason."""
    keep_best: int = setting(0, at_least=0)
    """With `keep_last`: so many checkpoints with the best `best_metric` are kept too."""
    best_metric: str | None = None
    """The metric of `keep_best`, by its name in metrics.jsonl, such as critic/score/mean or val/loss."""
    best_mode: str = setting("max", choices=("max", "min"))
    """Whether a large or a small `best_metric` is best."""
    on_failure: str = setting("stop", choices=("stop", "warn"))
    """What happens when a checkpoint cannot be written, e.g. to a full disk: the run ends with the reason, or says it
    and goes on until the next one is due. The checkpoints before are untouched either way."""
