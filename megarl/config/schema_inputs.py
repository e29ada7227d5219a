"""What goes in and where it stands: the `data`, `model` and `parallel` sections."""

from dataclasses import dataclass, field

from megarl.config.fields import rules, setting
from megarl.config.layout import Layout


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Datasets and how prompts are drawn from them."""

    train_files: list[str] = field(default_factory=list, metadata=rules(local_path=True))
    """Parquet files to train on, in verl's columns: local paths or fsspec URLs; one may stand without brackets."""
    val_files: list[str] = field(default_factory=list, metadata=rules(local_path=True))
    """Parquet files to evaluate on, in the same format; empty: no evaluation."""
    prompt_key: str = "prompt"
    """Column with the prompt: chat messages, or for SFT rows a text. verl's name."""
    response_key: str = "response"
    """Column with the response to the prompt, where rows are prompt and response (SFT, kto, spin). verl's name."""
    messages_key: str = "messages"
    """SFT: column with a whole conversation; used where the files have it. verl's name."""
    chosen_key: str = "chosen"
    """Pairs: column with the preferred response, text or chat messages. TRL's name."""
    rejected_key: str = "rejected"
    """Pairs: column with the other response, in the same form. TRL's name."""
    margin_key: str = "margin"
    """Pairs: column with how much better the preferred one is, a number; used where the files have it. TRL's name."""
    label_key: str = "label"
    """Single responses (kto): column that says whether the response of `response_key` is a good one, true or false;
    used where the files have it, else rows are pairs. TRL's name."""
    responses_key: str = "responses"
    """Column with the responses of `rollout.engine: dataset`: a list of texts, or of lists of token ids."""
    rewards_key: str = "response_rewards"
    """Column with a reward for each of these responses; used where the files have it, else they are scored."""
    logprobs_key: str = "response_logprobs"
    """Column with a log-prob for each token of these responses, of the policy that wrote them; used where the files
    have it, and needed by `algorithm.rollout_correction`."""
    train_batch_size: int = setting(256, at_least=1)
    """Prompts of one step over all ranks; where nothing is generated rows of one optimizer step: of SFT, pairs, or for
    kto responses. verl's default is 1,024, made for runs on many GPUs."""
    max_prompt_length: int = setting(512, at_least=1)
    """Longest prompt in tokens, with the chat template. verl's default."""
    max_response_length: int = setting(512, at_least=1)
    """Longest response in tokens: generation stops here. SFT rows may have the sum of both lengths. verl's default."""
    truncation: str = setting("filter", choices=("filter", "truncate_left", "error"))
    """What happens to longer prompts: left out and counted, cut at their beginning, or refused. Filtering is the
    default because a cut prompt asks another question than its reward checks. Longer responses of a dataset are cut at
    their end instead, where generation would have stopped."""
    shuffle: bool = True
    """Whether each epoch draws the rows in a new random order."""
    seed: int | None = None
    """Seed of that order; null: `trainer.seed`."""


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The model that is trained, and how Megatron computes it."""

    path: str = setting("", local_path=True)
    """Folder of a Hugging Face model: config.json, safetensors weights, tokenizer."""
    backend: str = setting("auto", choices=("auto", "torch", "te"))
    """Which layers Megatron builds: plain torch, Transformer Engine (te), or, with auto, Transformer Engine where it is
    installed and there is a GPU, and plain torch elsewhere."""
    dtype: str = setting("bfloat16", choices=("bfloat16", "float32"))
    """Type of weights and activations. The optimizer keeps float32 masters, and log-probs are computed in float32."""
    recompute_granularity: str = setting("none", choices=("none", "selective", "full"))
    """Which activations are computed again in the backward pass instead of kept: none, those of core attention
    (selective), or those of whole layers (full). Megatron's name, arXiv:2205.05198."""
    recompute_method: str = setting("uniform", choices=("uniform", "block"))
    """With full recomputation: keep the input of every `recompute_num_layers` layers (uniform), or recompute only that
    many layers of each stage (block). Megatron's name."""
    recompute_num_layers: int = setting(1, at_least=1)
    """With full recomputation: layers, as `recompute_method` counts them. Megatron's name."""
    moe_router_bias_update_rate: float = setting(0.0, at_least=0)
    """How far each optimizer step moves the routers' expert biases towards balance (arXiv:2408.15664; glm4_moe,
    deepseek_v3). 0 leaves them as the checkpoint has them: engine and trainer then route alike. Megatron's name."""
    moe_aux_loss_coeff: float = setting(0.0, at_least=0)
    """Weight of the loss that keeps the load of experts even within each sequence (arXiv:2412.19437, equations 17 to
    20; Megatron's `seq_aux_loss`), mean over the sequences of a mini-batch; 0: none. Megatron's name. Its other losses
    of this kind are of a micro-batch, and would change with how sequences are packed."""
    moe_z_loss_coeff: float = setting(0.0, at_least=0)
    """Weight of the loss that keeps the logits of routers small (ST-MoE, arXiv:2202.08906), mean over the tokens of a
    mini-batch; 0: none. Megatron's name."""


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    """How ranks share the work. Data parallelism is what is left of the world size, which torchrun sets."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each matrix (TP); keep them within one node. arXiv:1909.08053."""
    pipeline_model_parallel_size: int = 1
    """Stages that share the layers (PP). arXiv:2104.04473."""
    virtual_pipeline_model_parallel_size: int = 1
    """Model chunks on each stage (VPP): shorter pipeline bubbles for more traffic; 1 is the plain schedule.
    arXiv:2104.04473."""
    context_parallel_size: int = 1
    """Ranks that share each sequence (CP), for long responses. arXiv:2310.01889."""
    expert_model_parallel_size: int = 1
    """Ranks that share the experts of a layer (EP); MoE models only."""
    expert_tensor_parallel_size: int | None = None
    """Ranks that share each expert's matrices (ETP); null: the tensor-parallel size. arXiv:2504.14960."""
    sequence_parallel: bool | None = None
    """Whether tensor-parallel ranks share the tokens outside attention and feed-forward too; null: wherever
    tensor-parallel size is above 1, since it saves memory at no cost. arXiv:2205.05198."""
    num_layers_in_first_pipeline_stage: int | None = None
    """Layers on the first stage, where layers do not divide by stages; null: an equal share. Megatron's name."""
    num_layers_in_last_pipeline_stage: int | None = None
    """Layers on the last stage, where layers do not divide by stages; null: an equal share. Megatron's name."""
    use_distributed_optimizer: bool = True
    """Whether data-parallel ranks share the optimizer state instead of each holding all of it (ZeRO-1,
    arXiv:1910.02054). The result is the same."""
    overlap_grad_reduce: bool = False
    """Whether gradients are reduced while the backward pass still runs. Pays on many nodes."""
    overlap_param_gather: bool = False
    """Whether updated weights are gathered while the next forward pass runs; needs the distributed optimizer and
    `overlap_grad_reduce`."""

    def layout(self, world_size: int) -> Layout:
        """The layout that these sizes give `world_size` ranks; it may have problems (`Layout.problems`)."""
        return Layout(
            world_size=world_size,
            tp=self.tensor_model_parallel_size,
            pp=self.pipeline_model_parallel_size,
            vpp=self.virtual_pipeline_model_parallel_size,
            cp=self.context_parallel_size,
            ep=self.expert_model_parallel_size,
            first_stage_layers=self.num_layers_in_first_pipeline_stage,
            last_stage_layers=self.num_layers_in_last_pipeline_stage,
            # Layout declares these two by their resolved types; None on the way in is what it resolves.
            etp=self.expert_tensor_parallel_size,  # type: ignore[arg-type]
            sequence_parallel=self.sequence_parallel,  # type: ignore[arg-type]
        )
