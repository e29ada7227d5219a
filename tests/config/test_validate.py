"""One pass reports every contradiction in a config, in numbers and with what would do."""

import importlib
import json
import re

import pytest

from megarl.config import RunConfig, load_config, missing_packages, validate
from megarl.config.batches import BatchPlan

LLAMA = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}


@pytest.fixture
def run(tmp_path):
    """Problems of a good config with overrides, for a number of ranks."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    data = tmp_path / "data.parquet"
    data.touch()
    yaml = tmp_path / "run.yaml"
    yaml.write_text(
        f"model: {{path: {tmp_path}}}\n"
        f"data: {{train_files: {data}, val_files: {data}, train_batch_size: 24}}\n"
        "actor: {ppo_mini_batch_size: 12}\n",
        encoding="utf-8",
    )

    def problems(*overrides: str, world_size: int = 1) -> list[str]:
        return validate(load_config(yaml, overrides), world_size)

    return problems


def test_a_good_config_has_no_problems(run):
    assert run() == []
    assert run("parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2", world_size=8) == []
    assert run("trainer.kind=sft", world_size=8) == []


ONE_MISTAKE = {
    "samples do not divide": (
        ["rollout.n=3", "actor.ppo_mini_batch_size=24"],
        5,
        ["data.train_batch_size: 24 prompts × rollout.n 3 = 72 samples", "5 data-parallel ranks", "20 and 25"],
    ),
    "mini-batches do not divide": (["actor.ppo_mini_batch_size=10"], 1, ["10", "24", "8 and 12"]),
    "a mini-batch above the batch": (["actor.ppo_mini_batch_size=48"], 1, ["48", "only 24"]),
    "samples of a mini-batch do not divide": (
        ["actor.ppo_mini_batch_size=3", "rollout.n=2"],
        4,
        ["actor.ppo_mini_batch_size: 3 prompts × rollout.n 2 = 6 samples", "2 and 4"],
    ),
    "expert biases of a dense model": (
        ["model.moe_router_bias_update_rate=0.001"],
        1,
        ["model.moe_router_bias_update_rate is 0.001", "a llama model has no expert bias", "glm4_moe, deepseek_v3"],
    ),
    "an auxiliary loss of a dense model": (
        ["model.moe_aux_loss_coeff=0.001"],
        1,
        ["model.moe_aux_loss_coeff is 0.001", "a llama model has no routers"],
    ),
    "a z-loss of a dense model": (["model.moe_z_loss_coeff=0.1"], 1, ["model.moe_z_loss_coeff is 0.1", "no routers"]),
    "router replay of a dense model": (
        ["actor.router_replay.mode=R2"],
        1,
        ["actor.router_replay.mode is R2", "a llama model has no experts", "disabled"],
    ),
    "router replay of a mode that there is not": (
        ["actor.router_replay.mode=R4"],
        1,
        ["actor.router_replay.mode is 'R4'", "disabled, R2, R3"],
    ),
    "rows do not divide": (["trainer.kind=sft"], 7, ["data.train_batch_size: 24 rows", "21 and 28"]),
    "a sample above the token budget": (
        ["actor.max_tokens_per_micro_batch=1000"],
        1,
        ["actor.max_tokens_per_micro_batch is 1000", "= 1024 tokens", "at least 1024"],
    ),
    "a padded sample above the token budget": (
        ["actor.max_tokens_per_micro_batch=1025", "data.max_prompt_length=513", "parallel.context_parallel_size=2"],
        2,
        ["padded to 1028", "at least 1028"],
    ),
    "sequences beyond the positions": (["data.max_prompt_length=1600"], 1, ["= 2112 tokens", "2048 positions"]),
    "layout against world": (["parallel.tensor_model_parallel_size=2"], 3, ["a multiple of 2"]),
    "layout against model": (["parallel.tensor_model_parallel_size=8"], 8, ["12 attention heads"]),
    "a group of one": (["rollout.n=1"], 1, ["algorithm.adv_estimator grpo", "at least 2"]),
    "a word that is none of the choices": (["actor.loss_agg_mode=mean"], 1, ["'mean'", "token-mean, token-sum"]),
    "a list item that is none": (["trainer.logger=[console,tensorbord]"], 1, ["trainer.logger is 'tensorbord'"]),
    "a trace of a rank that is not there": (
        ["observe.profile.steps=[3]", "observe.profile.ranks=[0,2]"],
        2,
        ["observe.profile.ranks has 2", "the run has 2 rank(s)"],
    ),
    "a trace of a step that is not there": (
        ["observe.profile.steps=[3,9]", "trainer.total_training_steps=5"],
        1,
        ["observe.profile.steps has 9", "trainer.total_training_steps is 5"],
    ),
    "a trace of step 0": (["observe.profile.steps=[0]"], 1, ["observe.profile.steps is 0", "at least 1"]),
    "traces of no rank": (["observe.profile.steps=[3]", "observe.profile.ranks=[]"], 1, ["profile.ranks is empty"]),
    "a port beyond the last": (["observe.prometheus_port=70000"], 1, ["prometheus_port is 70000", "at most 65535"]),
    "a mode that wandb lacks": (
        ["observe.wandb_mode=disabled"],
        1,
        ["observe.wandb_mode is 'disabled'", "online, offline"],
    ),
    "a project without a name": (["trainer.project_name=''"], 1, ["trainer.project_name is empty"]),
    "a number below": (["rollout.n=0"], 1, ["rollout.n is 0", "at least 1"]),
    "a number that is no number": (["optim.lr=.nan"], 1, ["optim.lr is nan", "a finite number"]),
    "a number without end": (["optim.lr=.inf"], 1, ["optim.lr is inf", "a finite number"]),
    "AdamW that stands still": (["optim.betas=[1.0,0.9]"], 1, ["optim.betas", "below 1"]),
    "a seed of too many bits": (["trainer.seed=1267650600228229401496703205376"], 1, ["trainer.seed", "64 bits"]),
    "groups that PF-PPO would break up": (["algorithm.pf_ppo.enable=true"], 1, ["algorithm.pf_ppo", "grpo"]),
    "a warm-up without end": (
        ["algorithm.adv_estimator=gae", "trainer.critic_warmup=5", "trainer.total_training_steps=5"],
        1,
        ["trainer.critic_warmup is 5", "never learn"],
    ),
    "dynamic sampling of single samples": (
        ["algorithm.adv_estimator=gae", "rollout.n=1", "algorithm.filter_groups.enable=true"],
        1,
        ["algorithm.filter_groups", "rollout.n is 1"],
    ),
    "an adaptive penalty that is off": (["algorithm.kl_ctrl.type=adaptive"], 1, ["use_kl_in_reward is false"]),
    "rewards that nobody reads": (["algorithm.gdpo_reward_keys=[a]"], 1, ["gdpo_reward_keys", "grpo"]),
    "a number above": (["rollout.top_p=1.5"], 1, ["rollout.top_p is 1.5", "at most 1"]),
    "a KL term of no weight": (["actor.use_kl_loss=true", "actor.kl_loss_coef=0"], 1, ["actor.kl_loss_coef is 0"]),
    "a scale that is not used": (["actor.loss_scale_factor=100"], 1, ["seq-mean-token-sum-norm"]),
    "greedy samples that differ in nothing": (["rollout.val_kwargs.n=4"], 1, ["all samples of a prompt are the same"]),
    "top_k of nothing": (["rollout.top_k=0"], 1, ["-1"]),
    "an engine of several ranks that cannot be": (["rollout.tensor_model_parallel_size=2"], 2, ["transformers engine"]),
    "evaluation of a dataset run by an engine of several ranks": (
        ["rollout.engine=dataset", "rollout.tensor_model_parallel_size=2"],
        2,
        ["rollout.tensor_model_parallel_size is 2", "transformers engine"],
    ),
    "responses of two sources": (
        ["rollout.engine=dataset", "rollout.replay_dir=."],
        1,
        ["rollout.engine dataset and rollout.replay_dir ."],
    ),
    "greedy answers of a dataset": (
        ["rollout.engine=dataset", "algorithm.adv_estimator=remax"],
        1,
        ["algorithm.adv_estimator remax needs to generate", "rollout.engine dataset"],
    ),
    "further prompts from a replay": (
        ["rollout.replay_dir=.", "algorithm.filter_groups.enable=true"],
        1,
        ["algorithm.filter_groups.enable needs to generate", "rollout.replay_dir"],
    ),
    "engines that do not divide the world": (
        ["rollout.engine=sglang", "rollout.tensor_model_parallel_size=4"],
        6,
        ["rollout.tensor_model_parallel_size is 4", "world size 6"],
    ),
    "servers of an engine that has none": (["rollout.servers=[a:1]"], 1, ["rollout.servers", "is transformers"]),
    "servers that do not divide the world": (
        ["rollout.engine=sglang", "rollout.servers=[a:1,b:1]"],
        3,
        ["rollout.servers names 2", "world size 3"],
    ),
    "a server without a port": (
        ["rollout.engine=sglang", "rollout.servers=[node7]"],
        1,
        ["rollout.servers has 'node7'", "host:port"],
    ),
    "a server that is a URL": (
        ["rollout.engine=sglang", "rollout.servers=['http://node7:30000']"],
        1,
        ["rollout.servers has 'http://node7:30000'", "host:port"],
    ),
    "a server that is named twice": (
        ["rollout.engine=sglang", "rollout.servers=[a:1,a:1]"],
        2,
        ["rollout.servers names a server twice"],
    ),
    "a KV cache that is too small for one response": (
        ["rollout.engine=sglang", "rollout.sglang.max_total_tokens=20"],
        1,
        ["rollout.sglang.max_total_tokens is 20", "data.max_prompt_length + data.max_response_length"],
    ),
    "an engine of several pipeline stages": (
        ["rollout.engine=sglang", "rollout.sglang.pp_size=2"],
        1,
        ["rollout.sglang.pp_size cannot be used", "tensor-parallel ranks alone"],
    ),
    "a server that is waited for longer than ranks wait": (
        ["rollout.engine=sglang", "rollout.servers=[a:1]", "rollout.server_timeout_s=590"],
        1,
        ["rollout.server_timeout_s is 590", "observe.hang_timeout_s", "at least 650"],
    ),
    "a gather without a distributed optimizer": (
        [
            "parallel.overlap_param_gather=true",
            "parallel.overlap_grad_reduce=true",
            "parallel.use_distributed_optimizer=false",
        ],
        1,
        ["parallel.use_distributed_optimizer"],
    ),
    "three betas": (["optim.betas=[0.9,0.9,0.9]"], 1, ["optim.betas has 3 numbers"]),
    "a decay upwards": (["optim.min_lr=1", "optim.lr_decay_style=linear"], 1, ["optim.min_lr 1.0 is above optim.lr"]),
    "a decay that does not come": (["optim.min_lr=1e-7"], 1, ["optim.lr_decay_style constant"]),
    "a frequency of nothing": (["trainer.save_freq=0"], 1, ["trainer.save_freq cannot be 0"]),
    "evaluation of nothing": (["data.val_files=[]"], 1, ["trainer.val_before_train", "data.val_files is empty"]),
    "a checkpoint that is not asked for": (["trainer.resume_from_path=/"], 1, ["resume_mode is auto"]),
    "a checkpoint that is not named": (["trainer.resume_mode=path"], 1, ["resume_from_path is null"]),
    "other data with epochs": (["trainer.resume_with_other_data=true"], 1, ["total_training_steps is null"]),
    "checkpoints to keep where none is deleted": (["checkpoint.keep_every=100"], 1, ["keep_last null deletes none"]),
    "the best by no metric": (["checkpoint.keep_last=1", "checkpoint.keep_best=1"], 1, ["best_metric is null"]),
    "the best by what is never measured": (
        ["checkpoint.best_metric=val/loss", "trainer.test_freq=-1", "trainer.save_freq=4"],
        1,
        ["val/loss", "test_freq is -1"],
    ),
    "the best by what is measured at other steps": (
        ["checkpoint.best_metric=val/loss", "trainer.test_freq=3", "trainer.save_freq=4"],
        1,
        ["every 3 steps", "every 4"],
    ),
    "a model that is not there": (["model.path=nowhere"], 1, ["model.path nowhere", "not a folder"]),
    "no data": (["data.train_files=[]"], 1, ["data.train_files is empty"]),
    "data that is not there": (["data.train_files=nowhere.parquet"], 1, ["nowhere.parquet does not exist"]),
    "a reward function that is not there": (["reward.custom.path=nowhere.py"], 1, ["reward.custom.path"]),
}


@pytest.mark.parametrize(("overrides", "world_size", "words"), ONE_MISTAKE.values(), ids=ONE_MISTAKE.keys())
def test_one_mistake_is_one_problem(overrides, world_size, words, run):
    (problem,) = run(*overrides, world_size=world_size)
    for word in words:
        assert word in problem
    assert problem.endswith(".") and "\n" not in problem


def test_the_defaults_lack_a_model_and_data():
    problems = validate(RunConfig(), 1)
    for words in ("model.path is not set", "data.train_files is empty", "data.val_files is empty"):
        assert sum(words in problem for problem in problems) == 1
    assert len(problems) == 3


def test_all_mistakes_are_reported_at_once(run):
    problems = run(
        "model.path=nowhere",
        "trainer.kind=nothing",
        "rollout.n=1",
        "optim.betas=[0.5]",
        "actor.use_kl_loss=true",
        "actor.kl_loss_coef=0",
        "parallel.tensor_model_parallel_size=3",
        "data.val_files=nowhere.parquet",
        world_size=4,
    )
    expected = [
        "model.path",
        "trainer.kind",
        "rollout.n",
        "optim.betas",
        "kl_loss_coef",
        "world size 4",
        "data.val_files",
    ]
    for word in expected:
        assert sum(word in problem for problem in problems) == 1, word
    assert len(problems) == len(expected)


@pytest.mark.parametrize(
    ("n", "world_size", "batch", "mini"),
    [(3, 4, 22, 11), (2, 8, 30, 10), (5, 6, 100, 30), (8, 16, 24, 5), (3, 4, 24, 6)],
)
def test_the_sizes_that_are_suggested_work(n, world_size, batch, mini, run):
    sizes = [f"rollout.n={n}", f"data.train_batch_size={batch}", f"actor.ppo_mini_batch_size={mini}"]
    problems = run(*sizes, world_size=world_size)
    assert problems
    for problem in problems:
        key = re.match(r"[\w.]+", problem).group()
        suggestions = re.findall(r"\d+", problem.partition("the nearest that work")[2])
        assert suggestions
        for suggestion in suggestions:
            again = run(*sizes, f"{key}={suggestion}", world_size=world_size)
            assert not any(text.startswith(key) for text in again), (problem, suggestion)


def test_what_is_behind_a_url_is_not_looked_for(run):
    assert run("data.train_files=s3://bucket/train.parquet") == []


def test_a_replay_needs_no_training_files(run, tmp_path):
    assert run("data.train_files=[]", f"rollout.replay_dir={tmp_path}") == []


def test_responses_of_a_dataset_come_without_the_experts_of_an_engine(run):
    found = run("actor.router_replay.mode=R3", "rollout.engine=dataset")
    assert any(
        "R3" in problem and "rollout.engine dataset" in problem and "R2 or disabled" in problem for problem in found
    )


def test_rules_of_generation_do_not_bind_sft(run):
    assert run("trainer.kind=sft", "rollout.n=1", "actor.ppo_mini_batch_size=7") == []


def test_a_broken_model_config_is_named_with_its_key(run, tmp_path):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (problem,) = run()
    assert problem.startswith("model.path: ") and "model_type=None" in problem


def test_the_batch_arithmetic_is_said_in_words():
    config = RunConfig()
    config.data.train_batch_size, config.actor.ppo_mini_batch_size, config.actor.ppo_epochs = 64, 16, 2
    plan = BatchPlan.of(config, config.parallel.layout(4))
    assert plan.describe().splitlines() == [
        "step: 64 prompts × 8 samples = 512 samples, 128 on each of 4 data-parallel ranks",
        "updates: 4 mini-batches × 2 epochs = 8 optimizer steps of 128 samples",
        "micro-batch: 16384 tokens on one data-parallel rank, at least 16 samples of at most 1024 tokens",
    ]


def test_packages_are_asked_for_only_where_they_are_used(monkeypatch):
    # The package's attribute `validate` is the function, so the module is asked for by its name.
    monkeypatch.setattr(importlib.import_module("megarl.config.validate"), "find_spec", lambda package: None)
    config = RunConfig()
    assert missing_packages(config) == []
    config.rollout.engine, config.model.backend = "sglang", "te"
    sglang, transformer_engine = missing_packages(config)
    assert "rollout.engine is sglang" in sglang and "megarl[sglang]" in sglang
    assert "model.backend is te" in transformer_engine and "megarl[gpu]" in transformer_engine
    config.trainer.kind = "sft"
    assert missing_packages(config) == [transformer_engine]


def test_a_tracker_asks_for_its_package_and_mlflow_for_its_server(monkeypatch):
    monkeypatch.setattr(importlib.import_module("megarl.config.validate"), "find_spec", lambda package: None)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = RunConfig()
    config.trainer.logger = ["jsonl", "wandb", "mlflow", "prometheus"]
    *packages, server = missing_packages(config)
    for problem, package in zip(packages, ["wandb", "mlflow", "prometheus_client"], strict=True):
        assert f"the package {package} is not installed" in problem
        assert "megarl[trackers]" in problem
    assert "trainer.logger names mlflow" in server and "observe.mlflow_tracking_uri" in server
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert missing_packages(config) == packages
    config.observe.mlflow_tracking_uri = "http://127.0.0.1:5000"
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert missing_packages(config) == packages
