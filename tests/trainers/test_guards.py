"""Guards act on runs that were made to misbehave, on every rank alike, and a resumed run acts as the unbroken one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.config import load_config
from megarl.config.metric_names import known_metrics
from tests.spawn import run_ranks
from tests.trainers.outcomes import DONE, is_one_sentence, outcomes
from tests.trainers.tiny_pairs import make_tiny_pairs
from tests.trainers.tiny_run import make_tiny_run, read_metrics

PPO = ["algorithm.adv_estimator=gae", "critic.optim.lr=0.5", "optim.lr=0.1"]  # far too high, both
COLLAPSE = "{metric: actor/entropy, below: 3.5, action: rollback}"
ROLLBACK = [*PPO, f"guard.rules=[{COLLAPSE}]", "guard.rollback_lr_factor=0.01", "trainer.save_freq=1"]
WATCHED = {
    # Of guard.<name>: its metric, and whether a step that has this value after that breaks the bound set below.
    "kl": ("actor/ppo_kl", lambda value, before: value > 0.1),
    "reference_kl": ("actor/kl_loss", lambda value, before: value > 0.05),
    "reward": ("critic/score/mean", lambda value, before: value < before - 0.05),
    "entropy": ("actor/entropy", lambda value, before: value < 3.5),
    "grad_norm": ("critic/grad_norm", lambda value, before: value > 10 * before),
    "cut_off": ("response_length/clip_ratio", lambda value, before: value > 0.5),
    "value_loss": ("critic/vf_loss", lambda value, before: value > 10 * before),
}
WILD = [
    *PPO,
    "actor.ppo_epochs=2",
    "actor.use_kl_loss=true",
    "guard.reference_kl.above=0.05",
    "guard.reward.drop_below_average=0.05",
    "guard.reward.patience=1",
    "guard.entropy.below=3.5",
    *(f"guard.{name}.window=1" for name in WATCHED),
]


def fired(folder: Path) -> list[dict[str, Any]]:
    """The lines of guards.jsonl."""
    return [json.loads(line) for line in (folder / "guards.jsonl").read_text().splitlines()]


def column(folder: Path, name: str) -> list[float]:
    return [line[name] for line in read_metrics(folder)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same_weights(one: Path, other: Path) -> bool:
    expected, found = weights(one), weights(other)
    return all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def steps(count: int) -> str:
    return f"trainer.total_training_steps={count}"


def make_gap(dump: Path) -> None:
    """Takes half a nat off each log-prob of the engine in dumped rollouts."""
    for file in dump.glob("step-*/rank-*.jsonl"):
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        for sample in samples:
            sample["rollout_logprobs"] = [None if lp is None else lp - 0.5 for lp in sample["rollout_logprobs"]]
        file.write_text("".join(json.dumps(sample) + "\n" for sample in samples))


def run_twice(config: Path, folder: Path, first: dict, dump: Path, second: dict) -> dict[str, str]:
    """`outcomes` of runs, and then of those that go on with what they left."""
    found = outcomes(config, folder, first)
    make_gap(dump)
    return {**found, **outcomes(config, folder, second)}


@pytest.fixture(scope="module")
def rl(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """RL runs of one rank."""
    folder = tmp_path_factory.mktemp("guards-rl")
    config = make_tiny_run(folder, actor={"ppo_mini_batch_size": 4, "max_tokens_per_micro_batch": 256})
    dump = folder / "dump"
    first = {
        "calm": [f"trainer.rollout_data_dir={dump}", "actor.ppo_mini_batch_size=2"],
        "wild": [*WILD, steps(4)],
        "once": ["optim.lr=0.1", steps(2)],
        "second epoch left out": ["optim.lr=0.1", "actor.ppo_epochs=2", "guard.kl.action=skip_step", steps(2)],
        "cut off": ["guard.cut_off.action=skip_step", "guard.cut_off.window=1", steps(2)],
        "lower": [
            *PPO[:2],
            "guard.entropy.below=100",
            "guard.entropy.action=lower_lr",
            "guard.entropy.window=2",
            steps(5),
        ],
        "rollback": [*ROLLBACK, steps(5)],
        "interrupted": [*ROLLBACK, steps(4)],
        "no way back": [
            *ROLLBACK,
            "guard.entropy.below=100",
            "guard.entropy.window=1",
            "guard.entropy.action=rollback",
        ],
        "too often": [*PPO, f"guard.rules=[{COLLAPSE}]", "guard.max_rollbacks=1", "trainer.save_freq=1", steps(9)],
    }
    replay = [f"rollout.replay_dir={dump}", "guard.rollout_gap.window=1", "actor.ppo_mini_batch_size=2"]
    second = {
        "gap": [*replay, "guard.rollout_gap.action=skip_step"],
        "gap at the end": [*replay, "guard.rollout_gap.action=stop"],
        "interrupted": [*ROLLBACK, steps(5)],
    }
    (found,) = run_ranks(run_twice, 1, config, folder, first, dump, second, timeout=250.0)
    return folder, found


@pytest.mark.parametrize("name", WATCHED)
def test_a_named_guard_warns_at_the_first_step_that_breaks_its_bound(rl: tuple[Path, dict], name: str) -> None:
    folder, _ = rl
    metric, breaks = WATCHED[name]
    values = column(folder / "wild", metric)
    # Nothing is above or below NaN, so no step breaks a bound that is about the step before it.
    before = [math.nan, *values[:-1]]
    broken = [step for step, pair in enumerate(zip(values, before, strict=True), 1) if breaks(*pair)]
    first = next(
        line for line in fired(folder / "wild") if (line["guard"], line["metric"]) == (f"guard.{name}", metric)
    )
    assert first["step"] == broken[0] and first["action"] == "warn"
    assert first["value"] == pytest.approx(values[broken[0] - 1])


def test_an_update_that_moves_too_far_is_left_out_before_it_takes_effect(rl: tuple[Path, dict]) -> None:
    """The first epoch's ratio is 1, so its update is made; what is left out is the second's. Then it is as if there
    were one epoch."""
    folder, ends = rl
    run = folder / "second epoch left out"
    assert ends["once"] == ends[run.name] == DONE
    assert column(run, "guard/skipped_updates") == [1.0, 1.0]
    assert [line["done"] for line in fired(run)] == ["1 of 2 updates left out"] * 2
    assert same_weights(folder / "once" / "hf", run / "hf")
    assert column(run, "actor/skipped_updates") == [0.0, 0.0]  # they were finite


def test_what_is_known_before_the_updates_leaves_out_all_of_the_step(rl: tuple[Path, dict]) -> None:
    folder, ends = rl
    assert ends["cut off"] == DONE and same_weights(folder / "model", folder / "cut off" / "hf")
    assert column(folder / "cut off", "guard/skipped_updates") == [1.0, 1.0]
    assert all(norm > 0 for norm in column(folder / "cut off", "actor/grad_norm"))  # they were computed


def test_the_gap_between_engine_and_trainer_is_seen_before_the_update(rl: tuple[Path, dict]) -> None:
    folder, ends = rl
    assert ends["gap"] == DONE and same_weights(folder / "model", folder / "gap" / "hf")
    (line,) = fired(folder / "gap")
    assert line["value"] == pytest.approx(0.5, rel=1e-5) and line["done"] == "all 2 updates of the step left out"
    assert column(folder / "gap", "rollout_corr/logprob_diff_mean") == [pytest.approx(0.5, rel=1e-5)]
    assert not same_weights(folder / "model", folder / "calm" / "hf")


def test_a_guard_that_stops_ends_the_run_with_a_sentence_and_the_steps_metrics(rl: tuple[Path, dict]) -> None:
    folder, ends = rl
    end = ends["gap at the end"]
    assert is_one_sentence(end) and "guard.rollout_gap ends the run at step 1" in end
    assert "rollout_corr/logprob_diff_mean is 0.5, above 0.1" in end and "algorithm.rollout_correction" in end
    assert column(folder / "gap at the end", "guard/fired") == [1.0]


def test_the_rates_of_all_models_are_lowered_for_the_rest_of_the_run(rl: tuple[Path, dict]) -> None:
    folder, ends = rl
    assert ends["lower"] == DONE
    factors = [1.0, 1.0, 0.5, 0.5, 0.25]
    assert column(folder / "lower", "actor/lr") == pytest.approx([1e-3 * factor for factor in factors])
    assert column(folder / "lower", "critic/lr") == pytest.approx([0.5 * factor for factor in factors])
    assert column(folder / "lower", "guard/lr_factor") == [1.0, 0.5, 0.5, 0.25, 0.25]  # after the step


def test_a_rollback_takes_weights_engine_and_data_back_and_goes_on_with_another_order(rl: tuple[Path, dict]) -> None:
    folder, ends = rl
    run = folder / "rollback"
    assert ends["rollback"] == DONE
    (line,) = [each for each in fired(run) if each["action"] == "rollback"]
    step = line["step"]
    assert line["done"].startswith(f"back to the checkpoint of step {step - 2}, rollback 1 of 2")
    assert column(run, "step") == [*range(1, step + 1), *range(step - 1, 6)]
    # What the step before was generated with, and then other prompts of the same policy, learned from more slowly.
    before, after = (read_metrics(run)[place] for place in (step - 2, step))
    assert before["step"] == after["step"] == step - 1
    assert after["critic/score/mean"] != before["critic/score/mean"]
    assert after["actor/entropy"] == pytest.approx(before["actor/entropy"], abs=0.5)
    assert after["training/rollout_probs_diff_max"] < 1e-5  # the engine has the trainer's weights
    assert after["actor/lr"] == pytest.approx(0.01 * before["actor/lr"])
    assert column(run, "guard/rollbacks") == [0.0] * (step - 1) + [1.0] * (6 - step + 2)
    aside = sorted(path.name for path in (run / "checkpoints" / "set-aside").iterdir())
    assert aside == [f"step-{step - 1:06d}"]  # that of the step itself was not worth saving
    assert (run / "checkpoints" / "step-000005").is_dir()


def test_a_run_that_went_back_and_was_interrupted_goes_on_as_the_unbroken_one(rl: tuple[Path, dict]) -> None:
    folder, ends = rl
    assert ends["interrupted"] == DONE
    assert same_weights(folder / "rollback" / "hf", folder / "interrupted" / "hf")
    whole, resumed = (read_metrics(folder / name)[-1] for name in ("rollback", "interrupted"))
    of_time = ("timing_s/", "perf/")
    assert {n: v for n, v in whole.items() if not n.startswith(of_time)} == {
        n: v for n, v in resumed.items() if not n.startswith(of_time)
    }
    assert fired(folder / "rollback") == fired(folder / "interrupted")


@pytest.mark.parametrize("name", ["wild", "calm"])
def test_every_metric_of_a_run_may_be_named_in_a_rule(rl: tuple[Path, dict], name: str) -> None:
    folder, _ = rl
    known = known_metrics(load_config(folder / "run.yaml", WILD if name == "wild" else []))
    assert [metric for line in read_metrics(folder / name) for metric in line if known.rules_out(metric)] == []


def test_a_rollback_without_a_good_checkpoint_ends_the_run(rl: tuple[Path, dict]) -> None:
    _, ends = rl
    end = ends["no way back"]
    assert is_one_sentence(end) and "there is no good checkpoint of before step 1" in end


def test_a_run_that_would_go_back_too_often_ends(rl: tuple[Path, dict]) -> None:
    folder, ends = rl
    end = ends["too often"]
    assert is_one_sentence(end) and "guard.max_rollbacks 1 have been made" in end
    assert column(folder / "too often", "guard/rollbacks")[-1] == 1.0


@pytest.fixture(scope="module")
def supervised(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Reward models and a DPO run on two data-parallel ranks, which have to say the same."""
    folder = tmp_path_factory.mktemp("guards-supervised")
    config = make_tiny_pairs(folder, trainer={"logger": ["jsonl"], "val_before_train": False, "kind": "reward_model"})
    leave_out = "action: skip_step}]"
    # Broken by any loss: nothing is learned.
    leaves_out_all = [
        "trainer.kind=preference",
        f"guard.rules=[{{metric: train/loss, above: 0, {leave_out}",
        steps(2),
    ]
    runs = {
        "loss": leaves_out_all,
        "norm": ["trainer.kind=preference", f"guard.rules=[{{metric: train/grad_norm, above: 0, {leave_out}", steps(2)],
        **{
            # Only the last stage knows the loss, and each rank of a tensor-parallel pair knows all of it.
            name: [*leaves_out_all, f"parallel.{key}=2"]
            for name, key in (("PP2", "pipeline_model_parallel_size"), ("TP2", "tensor_model_parallel_size"))
        },
        "held out": [f"guard.rules=[{{metric: val/loss, above: 0, {leave_out}", "trainer.test_freq=1", steps(3)],
        "idle": [f"guard.rules=[{{metric: train/loss, above: 0, {leave_out}", "guard.max_skipped_steps=2", steps(5)],
        "unknown": ["guard.rules=[{metric: perf/max_memory_gib, above: 1}]"],
        "time": ["guard.rules=[{metric: timing_s/step, above: 0, action: stop}]"],
    }
    first, second = run_ranks(outcomes, 2, config, folder, runs, timeout=200.0)
    assert first == second
    return folder, first


@pytest.mark.parametrize("name", ["loss", "norm", "PP2", "TP2"])
def test_an_update_that_is_left_out_changes_no_weight(supervised: tuple[Path, dict], name: str) -> None:
    folder, ends = supervised
    assert ends[name] == DONE and same_weights(folder / "model", folder / name / "hf")
    assert column(folder / name, "guard/skipped_updates") == [1.0, 1.0]
    metric = "train/grad_norm" if name == "norm" else "train/loss"
    assert [line["value"] for line in fired(folder / name)] == pytest.approx(column(folder / name, metric), rel=1e-9)


def test_what_is_known_only_after_an_update_leaves_out_the_next(supervised: tuple[Path, dict]) -> None:
    folder, ends = supervised
    assert ends["held out"] == DONE
    first, second, third = column(folder / "held out", "val/loss")
    assert first == second == third  # the first update was made, those after it were not
    assert column(folder / "held out", "guard/skipped_updates") == [0.0, 1.0, 1.0]
    assert {line["done"] for line in fired(folder / "held out")} == {"the updates of the next step will be left out"}


def test_a_run_that_guards_let_learn_nothing_ends(supervised: tuple[Path, dict]) -> None:
    _, ends = supervised
    assert is_one_sentence(ends["idle"]) and "every update of 2 steps in a row, the last is step 2" in ends["idle"]


def test_a_metric_that_only_the_run_knows_is_refused_at_its_first_step(supervised: tuple[Path, dict]) -> None:
    _, ends = supervised
    assert is_one_sentence(ends["unknown"]) and "similar ones are perf/max_memory_gb" in ends["unknown"]


def test_ranks_whose_numbers_differ_end_alike(supervised: tuple[Path, dict]) -> None:
    """Each has its own time; that both have the same sentence was looked at when they ran."""
    _, ends = supervised
    assert "guard.rules[0] ends the run at step 1: timing_s/step is" in ends["time"]
