"""The config of a run: `RunConfig`, and its `rollout`, `reward`, `checkpoint` and `trainer` sections.

Every field has a string under it that says what it is, in which unit, and why it has its default.
`docs/configuration.md` is made of them by `tools/config_reference.py`.
"""

from dataclasses import dataclass, field
from typing import Any

from megarl.config.fields import rules, setting
from megarl.config.schema_algorithm import AlgorithmConfig
from megarl.config.schema_checkpoint import CheckpointConfig
from megarl.config.schema_guard import GuardConfig
from megarl.config.schema_inputs import DataConfig, ModelConfig, ParallelConfig
from megarl.config.schema_learning import ActorConfig, CriticConfig, OptimConfig
from megarl.config.schema_observe import ObserveConfig
from megarl.config.schema_preference import PreferenceConfig
from megarl.config.schema_reward_model import RewardModelTrainingConfig

LOGGERS = ("console", "tensorboard", "jsonl", "wandb", "mlflow", "prometheus")
DEFAULT_LOGGERS = LOGGERS[:3]
"""Those that need no server."""


@dataclass(kw_only=True, slots=True)
class ValSamplingConfig:
    """How responses are sampled in evaluation."""

    n: int = setting(1, at_least=1)
    """Samples of each prompt; above 1, pass@k is reported too."""
    temperature: float = setting(0.0, at_least=0)
    """Divisor of the logits; 0 is greedy, which makes evaluations comparable."""
    top_p: float = setting(1.0, above=0, at_most=1)
    """Sample from the most likely tokens that together have this probability; 1: from all."""
    top_k: int = setting(-1, at_least=-1)
    """Sample from this many most likely tokens; -1: from all."""


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """The engine that generates, and how it samples."""

    engine: str = setting("transformers", choices=("transformers", "sglang", "dataset"))
    """What generates: megarl's own loop over a transformers model (runs anywhere), or SGLang (GPUs; its own extra);
    with dataset nothing does in training: responses are those of `data.responses_key`, and the transformers engine
    answers `data.val_files` where there are such."""
    n: int = setting(8, at_least=1)
    """Samples of each prompt, its group. grpo needs at least 2; the GRPO paper has 64."""
    temperature: float = setting(1.0, above=0)
    """Divisor of the logits. 1 samples from the policy itself; log-probs in training use the same value."""
    top_p: float = setting(1.0, above=0, at_most=1)
    """Sample from the most likely tokens that together have this probability; 1: from all, so that the policy that is
    trained is the one that was sampled."""
    top_k: int = setting(-1, at_least=-1)
    """Sample from this many most likely tokens; -1: from all."""
    max_num_seqs: int = setting(64, at_least=1)
    """Sequences that one engine decodes at once; bounds its KV cache. The name is vLLM's and verl's."""
    tensor_model_parallel_size: int = setting(1, at_least=1)
    """Consecutive ranks that form one engine. The transformers engine has 1: each rank holds the whole model. With
    `servers`: GPUs of each."""
    servers: list[str] = field(default_factory=list)
    """sglang: engines on GPUs of their own, as `host:port` of each; `launch/engine.py` starts them, with this config.
    Their number divides the world: that many consecutive ranks share one, and start none themselves. Empty: engines
    stand on the trainer's ranks."""
    server_timeout_s: float = setting(300.0, above=0)
    """Seconds that one of `servers` may take to come and to answer, and a bucket of weights to reach it; then the run
    ends. Generating has no limit while the server lives."""
    gpu_memory_utilization: float = setting(0.5, above=0, at_most=1)
    """sglang: share of a GPU's memory that its engine's weights and KV cache take while it generates; the trainer's
    own weights and optimizer stay beside it. verl's name and default."""
    free_cache_engine: bool = True
    """sglang: whether engines give weights and KV cache back while the trainer works, and take them again with the next
    sync. `servers`, which share no GPU with it, never do. verl's name and default."""
    max_engine_restarts: int = setting(2, at_least=0)
    """sglang: how often in a run engines whose processes died are started again, with current weights; their unfinished
    responses are drawn again. 0: the run ends at the first, as it does with `servers`, which are not its own."""
    sglang: dict[str, Any] = field(default_factory=dict)
    """Any other argument of SGLang's server, by its name there, e.g. `{attention_backend: fa3}`; names that the
    installed SGLang does not have are refused. Other engines do not look at it."""
    check_weight_sync: bool = True
    """Whether a checksum of each tensor is compared between trainer and engine after each sync; a difference stops the
    run. Wrong weights in an engine are otherwise silent."""
    update_weights_bucket_megabytes: int | None = setting(None, at_least=1)
    """MiB of weights that travel to the engine at a time. A sync takes up to twice this memory on each rank: one bucket
    and the messages that fill the next. A larger tensor has a bucket of its own. null: 512 on a GPU, verl's default,
    and 128 on a CPU. verl's name."""
    replay_dir: str | None = setting(None, local_path=True)
    """Folder of rollouts written by an earlier run (`trainer.rollout_data_dir`) to train on instead of generating."""
    val_kwargs: ValSamplingConfig = field(default_factory=ValSamplingConfig)
    """How responses are sampled in evaluation."""
    val_sampled_n: int = setting(0, at_least=0)
    """Samples of each held-out prompt that evaluations draw besides those of `val_kwargs`, as training draws them: what
    the policy does, where a greedy evaluation shows its mode. 0: none."""


@dataclass(kw_only=True, slots=True)
class CustomRewardConfig:
    """A reward function of your own."""

    path: str | None = setting(None, local_path=True)
    """Python file with the function; null: the grader that `data_source` and `reward_model.style` of a row name."""
    name: str = "compute_score"
    """The function in it: `(data_source, solution_str, ground_truth, extra_info=None)` to a number or to a dict with
    `score`, plain or async. verl's signature."""


@dataclass(kw_only=True, slots=True)
class RewardModelConfig:
    """A reward model that scores responses (`AutoModelForSequenceClassification` with one label)."""

    path: str | None = setting(None, local_path=True)
    """Folder of the model, with its tokenizer; it is sharded as the actor is. null: none."""
    weight: float = 1.0
    """What its score is multiplied by before it is added to that of the graders (`reward.rule_weight`)."""
    max_tokens_per_micro_batch: int | None = setting(None, at_least=1)
    """Tokens of one forward pass on one data-parallel rank; null: the actor's."""


@dataclass(kw_only=True, slots=True)
class OverlongConfig:
    """Overlong shaping (DAPO, arXiv:2503.14476): responses near the limit lose reward."""

    enable: bool = False
    """Whether responses near the limit are penalised."""
    len: int = setting(64, at_least=1)
    """Tokens before `data.max_response_length` in which the penalty rises. verl's name; DAPO has 4,096 of 20,480."""
    penalty_factor: float = setting(1.0, at_least=0)
    """The penalty at the limit. verl's name and default."""


@dataclass(kw_only=True, slots=True)
class RewardConfig:
    """How responses are scored."""

    custom: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    """A reward function of your own."""
    num_workers: int = setting(2, at_least=1)
    """Processes on each rank that score while others generate."""
    timeout_s: float = setting(30.0, above=0)
    """Seconds that one response may take to score."""
    failure_score: float = 0.0
    """Reward where scoring raised an error or took too long. Such responses are counted in the metrics."""
    rule_weight: float | None = 1.0
    """What the score of graders or of the reward function is multiplied by. 0: they only show in the metrics. null:
    they are not run, which leaves the reward model."""
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """A reward model."""
    overlong_buffer: OverlongConfig = field(default_factory=OverlongConfig)
    """A penalty on responses near the limit."""


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """The loop: how long, where to, how often."""

    kind: str = setting("rl", choices=("rl", "sft", "reward_model", "preference"))
    """Which loop runs: reinforcement learning, supervised fine-tuning, training a reward model on preferences, or
    preference optimisation (DPO and its relatives)."""
    total_epochs: int = setting(1, at_least=1)
    """Passes over the training files."""
    total_training_steps: int | None = setting(None, at_least=1)
    """Steps after which the run ends, whatever `total_epochs` says; null: the epochs decide."""
    val_before_train: bool = True
    """Whether the model is evaluated before the first step. verl's default."""
    test_freq: int = setting(-1, at_least=-1)
    """Steps between evaluations, with one after the last step too; -1: none of these. verl's name and default."""
    save_freq: int = setting(-1, at_least=-1)
    """Steps between checkpoints, with one after the last step too; -1: none. verl's name and default."""
    default_local_dir: str = setting("runs/default", local_path=True)
    """Folder of the run: checkpoints, metrics, generations. verl's name."""
    resume_mode: str = setting("auto", choices=("auto", "disable", "path"))
    """Where to start: at the newest checkpoint in `default_local_dir` if there is one, always at the beginning, or at
    `resume_from_path`."""
    resume_from_path: str | None = setting(None, local_path=True)
    """Checkpoint to start from, with `resume_mode: path`."""
    resume_with_other_data: bool = False
    """Whether a run may go on with other rows than its checkpoint was made with, or with the same in another order, as
    the next stage of a curriculum does: it then takes them from their beginning, and all else stays. A run that is
    interrupted later goes on within them. If not, such rows are refused."""
    stop_grace_s: float = setting(25.0, above=0)
    """Seconds after SIGTERM within which a rank has to end its step and save; then it leaves without. 25: torchrun
    kills its ranks 30 seconds after it has passed SIGTERM on (`--shutdown-timeout`). SIGUSR1 asks for the same without
    a limit."""
    logger: list[str] = field(default_factory=lambda: list(DEFAULT_LOGGERS), metadata=rules(choices=LOGGERS))
    """Where metrics go; the files lie in `default_local_dir`. wandb, mlflow and prometheus are of the extra trackers,
    and `observe` has their settings. verl's name."""
    project_name: str = "megarl"
    """What the run belongs to: wandb's project, mlflow's experiment. verl's name."""
    experiment_name: str | None = None
    """Name of the run in wandb, mlflow and Prometheus; null: the last part of `default_local_dir`. verl's name."""
    group_name: str | None = None
    """Runs that are looked at together, such as the seeds of one experiment: wandb's group, and a tag in mlflow."""
    rollout_data_dir: str | None = setting(None, local_path=True)
    """Folder that every rollout is written to, for `rollout.replay_dir`; null: not written. verl's name."""
    validation_data_dir: str | None = setting(None, local_path=True)
    """Folder for the generations of evaluations, as JSONL; null: `validation` in `default_local_dir`. verl's name."""
    critic_warmup: int = setting(0, at_least=0)
    """Steps at the beginning in which only the critic learns. verl's name and default."""
    early_stopping_patience: int | None = setting(None, at_least=1)
    """Evaluations (`test_freq`) without a lower validation loss after which a run that is not RL ends; null: it goes on
    to its last step."""
    early_stopping_min_delta: float = setting(0.0, at_least=0)
    """How much lower than the lowest so far a validation loss has to be to count."""
    seed: int = 1
    """Seed of everything random: sampling, the order of data, new weights."""


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """Everything that a run is."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    reward_model: RewardModelTrainingConfig = field(default_factory=RewardModelTrainingConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
