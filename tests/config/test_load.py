"""A config is its base chain, then its file, then the command line; every mistake is named with its place."""

from pathlib import Path

import pytest

from megarl.config import ConfigError, RunConfig, load_config
from megarl.config.load import CONFIG_FOLDER
from megarl.config.show import to_yaml


@pytest.fixture
def write(tmp_path):
    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def problems_of(path, *overrides) -> list[str]:
    with pytest.raises(ConfigError) as refusal:
        load_config(path, overrides)
    return refusal.value.problems


def test_an_empty_file_is_all_defaults(write):
    assert load_config(write("a.yaml", "")) == RunConfig()


def test_later_places_win_key_by_key(write):
    write(
        "deep.yaml",
        "optim: {lr: 1e-3, weight_decay: 0.3}\nrollout: {n: 2}\n",
    )
    write("sub/middle.yaml", "base: ../deep.yaml\noptim: {lr: 1e-4, clip_grad: 0.5}\n")
    config = load_config(write("top.yaml", "base: sub/middle.yaml\noptim: {clip_grad: 0.25}\n"), ["rollout.n=16"])
    assert (config.optim.lr, config.optim.weight_decay, config.optim.clip_grad, config.rollout.n) == (
        1e-4,
        0.3,
        0.25,
        16,
    )


def test_lists_are_replaced_whole(write):
    write("base.yaml", "data: {train_files: [a, b, c]}\n")
    assert load_config(write("top.yaml", "base: base.yaml\ndata: {train_files: [d]}\n")).data.train_files == ["d"]


def test_one_file_may_stand_without_brackets(write):
    path = write("a.yaml", "data: {train_files: x.parquet}\n")
    assert load_config(path).data.train_files == ["x.parquet"]
    assert load_config(path, ["data.train_files=[y,z]"]).data.train_files == ["y", "z"]


def test_values_on_the_command_line_are_yaml(write):
    overrides = ["optim.lr=3e-6", "optim.betas=[0.8, 0.9]", "model.path=a=b", "parallel.sequence_parallel=null"]
    config = load_config(write("a.yaml", "parallel: {sequence_parallel: true}\n"), [*overrides, "data.shuffle=false"])
    assert (config.optim.lr, config.optim.betas, config.model.path) == (3e-6, [0.8, 0.9], "a=b")
    assert (config.parallel.sequence_parallel, config.data.shuffle) == (None, False)


def test_references_and_the_home_folder_are_followed(write, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    text = "trainer: {default_local_dir: ~/run, seed: 5}\ndata: {seed: '${trainer.seed}', val_files: [~/a, s3://b]}\n"
    config = load_config(write("a.yaml", text))
    assert config.trainer.default_local_dir == "/home/someone/run"
    assert (config.data.seed, config.data.val_files) == (5, ["/home/someone/a", "s3://b"])


def test_the_printed_config_loads_as_the_same_config(write):
    config = load_config(write("a.yaml", "optim: {lr: 1e-05}\nrollout: {val_kwargs: {n: 3}}\n"), ["data.train_files=x"])
    assert load_config(write("b.yaml", to_yaml(config))) == config


def test_a_section_whose_keys_are_commented_out_is_empty(write):
    assert load_config(write("a.yaml", "optim:\n#  lr: 1\nrollout: {}\n")) == RunConfig()


def test_the_examples_of_the_checkout_are_found_from_anywhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert load_config("70b_grpo.yaml").parallel.pipeline_model_parallel_size == 4


@pytest.mark.parametrize("path", sorted(CONFIG_FOLDER.glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_has_only_known_keys(path):
    load_config(path, ["model.path=x", "data.train_files=y"])


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("actor.clip_ration_low", "did you mean 'actor.clip_ratio_low'?"),
        ("acter.clip_ratio_low", "did you mean 'actor.clip_ratio_low'?"),
        ("data.n", "did you mean 'rollout.n'?"),
        ("actor_rollout_ref.rollout.temperature", "did you mean 'rollout.temperature'?"),
        ("algorithm.norm_adv_by_std_in_grpo", "did you mean 'algorithm.norm_adv_by_std'?"),
        ("rollout.val_kwargs.tempreature", "did you mean 'rollout.val_kwargs.temperature'?"),
        ("checkpoint.zzz", "'checkpoint' has export_hf, export_hf_on_save, async_save, verify, "),
        ("zzz", "the sections are data, model, parallel"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(key, answer, write):
    (problem,) = problems_of(write("a.yaml", ""), f"{key}=1")
    assert problem.startswith(f"command line: unknown key '{key}'; ")
    assert answer in problem


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.n=many", "'rollout.n' must be a whole number, not 'many'."),
        ("rollout.n=1.5", "'rollout.n' must be a whole number, not 1.5."),
        ("rollout.n=null", "'rollout.n' must be a whole number, not None."),
        ("optim.lr=[1]", "'optim.lr' must be a number, not [1]."),
        ("optim.lr={a: 1}", "'optim.lr' must be a number, not {'a': 1}."),
        ("data.shuffle=2", "'data.shuffle' must be true or false, not 2."),
        ("data.seed=x", "'data.seed' must be a whole number or null, not 'x'."),
        ("optim.betas=[a]", "'optim.betas' must be a list of numbers, not ['a']."),
        ("rollout.val_kwargs=1", "'rollout.val_kwargs' is a section with keys of its own, and cannot be 1."),
    ],
)
def test_a_wrong_type_is_answered_with_what_was_expected(override, expected, write):
    assert problems_of(write("a.yaml", ""), override) == [f"command line: {expected}"]


def test_the_mistakes_of_all_places_come_in_one_report(write):
    base = write("base.yaml", "optim: {lr: fast, bogus: 1}\n")
    top = write("top.yaml", "base: base.yaml\nrollout: {n: few}\n")
    problems = problems_of(top, "data.zzz=1")
    assert [problem.split(":")[0] for problem in problems] == [str(base), str(base), str(top), "command line"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("base: nowhere.yaml", ["'base' names nowhere.yaml", "no file"]),
        ("base: a.yaml", ["'base' leads back", "a.yaml → a.yaml"]),
        ("base: [a, b]", ["'base' must be the path of one YAML file"]),
        ("optim: {lr: 1", ["is not valid YAML"]),
        ("optim: {lr: 1}\noptim: {lr: 2}", ["is not valid YAML", "duplicate"]),
        ("- a", ["holds a list"]),
        ("model:\n  path: ???", ["'model.path' is left open (???)"]),
        ("data:\n  train_files: ???", ["'data.train_files' is left open (???)"]),
        ("optim: {lr: '${zzz.lr}'}", ["'optim.lr' must be a number", "zzz"]),
    ],
)
def test_a_file_that_cannot_be_followed_is_one_sentence(text, words, write):
    (problem,) = problems_of(write("a.yaml", text))
    for word in words:
        assert word in problem
    assert "\n" not in problem


def test_a_base_that_leads_back_names_the_circle(write):
    write("b.yaml", "base: c.yaml")
    write("c.yaml", "base: b.yaml")
    (problem,) = problems_of(write("a.yaml", "base: b.yaml"))
    assert "a.yaml → b.yaml → c.yaml → b.yaml" in problem


def test_a_config_that_is_nowhere_is_answered_with_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (problem,) = problems_of("nowhere.yaml")
    for word in ("nowhere.yaml", str(tmp_path), str(CONFIG_FOLDER), "gsm8k_smollm2_grpo.yaml"):
        assert word in problem


def test_an_override_without_value_shows_the_form(write):
    path = write("a.yaml", "")
    assert "key=value" in problems_of(path, "optim.lr")[0]
    assert "not valid YAML" in problems_of(path, "optim.betas=[1")[0]
