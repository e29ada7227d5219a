"""Models and settings that RL cannot work with are refused in a sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from tests.launch import LIMIT_S, ROOT
from tests.spawn import run_ranks
from tests.tiny_models import make_hf_model, make_scalar_model
from tests.trainers.outcomes import DONE, is_one_sentence, outcomes
from tests.trainers.tiny_pairs import make_tiny_chat_model
from tests.trainers.tiny_run import make_tiny_run

GAE, REWARD_MODEL = "algorithm.adv_estimator=gae", "reward.model.path"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    make_tiny_run(folder, checkpoint={"export_hf": False})
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, str]:
    """How runs end whose critic or reward model is not what it has to be."""
    classifier = transformers.AutoModelForSequenceClassification
    make_tiny_chat_model(folder / "two labels", "llama", auto_class=classifier, num_labels=2)
    vocab_size = json.loads((folder / "model" / "config.json").read_text())["vocab_size"]
    make_hf_model("llama", folder / "small vocabulary", vocab_size=vocab_size - 1)
    make_hf_model("llama", folder / "of another size", vocab_size=vocab_size, hidden_size=32, intermediate_size=48)
    damaged = make_scalar_model(folder / "model", folder / "damaged")
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps(config | {"hidden_size": 128}))
    transformers.AutoModelForTokenClassification.from_config(
        transformers.AutoConfig.from_pretrained(folder / "model", num_labels=3)
    ).save_pretrained(folder / "three labels")
    other_tokens = make_tiny_chat_model(folder / "other tokens", "llama", auto_class=classifier, num_labels=1)
    permute_vocabulary(Path(other_tokens))
    occupied = folder / "a file"
    occupied.write_text("")
    runs = {
        "reward model without a head": [f"{REWARD_MODEL}={folder / 'model'}"],
        "critic with other tokens": [GAE, f"critic.path={folder / 'other tokens'}"],
        "rollouts that cannot be written": [f"trainer.rollout_data_dir={occupied}"],
        "reward model of two labels": [f"{REWARD_MODEL}={folder / 'two labels'}"],
        "critic of three labels": [GAE, f"critic.path={folder / 'three labels'}"],
        "critic of another vocabulary": [GAE, f"critic.path={folder / 'small vocabulary'}"],
        "critic of other sizes than its weights": [GAE, f"critic.path={damaged}"],
        "critic of another size than the actor": [GAE, f"critic.path={folder / 'of another size'}"],
        "reward model without a tokenizer": [f"{REWARD_MODEL}={folder / 'small vocabulary'}"],
    }
    (found,) = run_ranks(outcomes, 1, folder / "run.yaml", folder, runs)
    return found


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "reward model without a head": ["model", "no score.weight", "random"],
        "critic with other tokens": ["critic.path", "other tokens", "another vocabulary"],
        "rollouts that cannot be written": ["trainer.rollout_data_dir", "a file", "cannot be written"],
        "reward model of two labels": ["two labels", "2 labels", "num_labels 1"],
        "critic of three labels": ["three labels", "3 labels", "num_labels 1"],
        "critic of another vocabulary": ["small vocabulary", "model.path", "vocabulary of"],
        "critic of other sizes than its weights": ["damaged", "config.json", "not of one model"],
        "reward model without a tokenizer": ["reward.model.path", "small vocabulary", "tokenizer"],
    }.items(),
)
def test_a_model_that_does_not_fit_is_named_with_what_is_wrong(
    found: dict[str, str], name: str, words: list[str]
) -> None:
    for word in words:
        assert word in found[name]
    assert "\n" not in found[name]


def test_a_critic_need_not_be_of_the_actors_size(found: dict[str, str]) -> None:
    assert found["critic of another size than the actor"] == DONE


def permute_vocabulary(folder: Path) -> None:
    """Gives every token of a byte-level tokenizer another number."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    special = {token["content"] for token in content["added_tokens"]}
    names = [name for name in vocabulary if name not in special]
    turned = dict(zip(names, [vocabulary[name] for name in names[::-1]], strict=True))
    content["model"]["vocab"] = vocabulary | turned
    file.write_text(json.dumps(content))


SETTINGS = {
    "algorithm.kl_ctrl.horizon=0": ["algorithm.kl_ctrl.horizon is 0", "above 0"],
    "algorithm.kl_ctrl.horizon=-5": ["algorithm.kl_ctrl.horizon is -5", "above 0"],
    "algorithm.kl_ctrl.target_kl=0": ["algorithm.kl_ctrl.target_kl is 0.0", "above 0"],
    "algorithm.kl_ctrl.target_kl=-0.1": ["algorithm.kl_ctrl.target_kl is -0.1", "above 0"],
    "rollout.n=1": ["algorithm.adv_estimator grpo compares the samples of a prompt", "rollout.n is 1"],
    "critic.path=nowhere": ["critic.path", "nowhere"],
    "algorithm.plugins=[nowhere.py]": ["algorithm.plugins", "nowhere.py does not exist"],
    "algorithm.adv_estimator=ppo": ["algorithm.adv_estimator is 'ppo'", "gae, grpo"],
}


@pytest.mark.parametrize(("setting", "words"), SETTINGS.items())
def test_a_setting_that_cannot_be_is_refused_before_torch_is_loaded(
    folder: Path, setting: str, words: list[str]
) -> None:
    (line,) = problems(folder, setting)
    for word in words:
        assert word in line
    assert is_one_sentence(line)


def problems(folder: Path, *settings: str) -> list[str]:
    """What `launch/train.py` says, without `--check` and on an interpreter that has no torch."""
    program = (
        "import runpy, sys\n"
        "sys.modules['torch'] = None  # an import of it fails\n"
        f"sys.argv = ['train.py', '--config', {str(folder / 'run.yaml')!r}, *{list(settings)!r}]\n"
        f"runpy.run_path({str(ROOT / 'launch' / 'train.py')!r}, run_name='__main__')\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT)
    assert (result.returncode, result.stdout) == (2, "")
    count, *lines = result.stderr.splitlines()
    assert count == "1 problem:" and all(line.startswith("- ") for line in lines)
    return lines
