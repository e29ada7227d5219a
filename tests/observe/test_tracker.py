"""Where metrics go, read back as a person or another program would."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megarl.config import ConfigError, RunConfig
from megarl.observe import Tracker
from megarl.observe.console import ProgressConsole

FILES = ["tensorboard", "jsonl"]


def _config(logger: list[str], folder: Path) -> RunConfig:
    config = RunConfig()
    config.trainer.logger, config.trainer.default_local_dir = logger, str(folder)
    return config


def _log_steps(folder: Path, steps: range, *, loss: float, resume_step: int | None = None) -> None:
    with Tracker(_config(FILES, folder), True, 10, "a run", resume_step=resume_step) as tracker:
        for step in steps:
            tracker.log(step, {"actor/pg_loss": loss, "critic/score/mean": step / 10})


def _json_lines(file: Path) -> list[dict[str, float]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in file.read_text().splitlines()]


def _tensorboard_curve(folder: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def _words(text: str) -> str:
    """Without the spaces that align lines."""
    return " ".join(text.split())


def test_tensorboard_reads_every_metric_at_its_step(tmp_path: Path) -> None:
    _log_steps(tmp_path, range(1, 4), loss=0.5)
    assert _tensorboard_curve(tmp_path, "actor/pg_loss") == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert [value for _, value in _tensorboard_curve(tmp_path, "critic/score/mean")] == pytest.approx([0.1, 0.2, 0.3])


def test_a_json_line_is_there_as_soon_as_its_step_is_logged(tmp_path: Path) -> None:
    tracker = Tracker(_config(["jsonl"], tmp_path / "new" / "folder"), True, None, "a run")
    tracker.log(1, {"actor/pg_loss": 0.25})
    assert _json_lines(tmp_path / "new" / "folder" / "metrics.jsonl") == [{"step": 1, "actor/pg_loss": 0.25}]
    tracker.close()


def test_what_is_not_finite_stays_valid_json_and_reaches_tensorboard(tmp_path: Path) -> None:
    with Tracker(_config(FILES, tmp_path), True, None, "a run") as tracker:
        tracker.log(1, {"actor/pg_loss": math.nan, "actor/grad_norm": math.inf, "actor/lr": 1e-6})
    assert _json_lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "actor/pg_loss": None, "actor/grad_norm": None, "actor/lr": 1e-6}
    ]
    assert math.isnan(_tensorboard_curve(tmp_path, "actor/pg_loss")[0][1])


def test_a_resumed_run_has_each_step_once_on_its_curve(tmp_path: Path) -> None:
    _log_steps(tmp_path, range(6), loss=1.0)
    _log_steps(tmp_path, range(4, 7), loss=2.0, resume_step=3)
    expected = [(step, 1.0 if step <= 3 else 2.0) for step in range(7)]
    lines = _json_lines(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["actor/pg_loss"]) for line in lines] == expected
    assert _tensorboard_curve(tmp_path, "actor/pg_loss") == expected


def test_a_run_resumed_before_its_first_step_keeps_the_evaluation_of_step_0(tmp_path: Path) -> None:
    _log_steps(tmp_path, range(3), loss=1.0)
    _log_steps(tmp_path, range(1, 2), loss=2.0, resume_step=0)
    assert [line["step"] for line in _json_lines(tmp_path / "metrics.jsonl")] == [0, 1]
    assert _tensorboard_curve(tmp_path, "actor/pg_loss") == [(0, 1.0), (1, 2.0)]


def test_half_a_line_of_a_killed_run_is_left_out_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "actor/lr": 0.1}\n{"step": 2, "actor/l')
    with Tracker(_config(["jsonl"], tmp_path), True, None, "a run", resume_step=2) as tracker:
        tracker.log(3, {"actor/lr": 0.3})
    assert [line["step"] for line in _json_lines(file)] == [1, 3]
    assert "left out 1 line(s) that are not metrics" in capsys.readouterr().out


def test_a_new_run_in_a_used_folder_keeps_the_earlier_metrics_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for loss in (1.0, 2.0, 3.0):
        _log_steps(tmp_path, range(1, 3), loss=loss)
    losses = {file.name: _json_lines(file)[0]["actor/pg_loss"] for file in tmp_path.glob("*.jsonl")}
    assert losses == {"metrics-1.jsonl": 1.0, "metrics-2.jsonl": 2.0, "metrics.jsonl": 3.0}
    assert _tensorboard_curve(tmp_path, "actor/pg_loss") == [(1, 3.0), (2, 3.0)]
    assert "metrics-1.jsonl" in capsys.readouterr().out


def test_other_ranks_write_and_print_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Tracker(_config(["console", *FILES], tmp_path / "run"), False, 10, "a run") as tracker:
        tracker.log(1, {"actor/pg_loss": 0.5})
        tracker.text("a message")
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("logger", [["jsonl"], ["tensorboard"]])
def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path, logger: list[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"metrics cannot be written to trainer\.default_local_dir .*file") as error:
        Tracker(_config(logger, tmp_path / "file" / "run"), True, None, "a run")
    assert len(error.value.problems) == 1


def test_without_a_terminal_each_step_is_an_aligned_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Tracker(_config(["console"], tmp_path), True, 100, "a run") as tracker:
        tracker.log(
            9,
            {
                "perf/time_per_step": 12.34,
                "perf/tokens_per_s": 12345.6,
                "response_length/mean": 85.25,
                "actor/entropy": 1.5,
                "actor/grad_norm": 0.25,
                "actor/pg_loss": -0.0125,
                "critic/score/mean": 0.5,
                "critic/score/max": 1.0,
            },
        )
        tracker.log(
            10,
            {
                "critic/score/mean": math.nan,
                "actor/pg_loss": 0.5,
                "actor/grad_norm": math.inf,
                "actor/entropy": 0.75,
                "response_length/mean": 9.0,
                "perf/tokens_per_s": 99.0,
                "timing_s/step": 1.0,
            },
        )
    first, second = capsys.readouterr().out.splitlines()
    assert _words(first) == (
        "step 9/100 score 0.500 pg_loss -0.0125 grad_norm 0.25 entropy 1.500 response 85.2 tokens/s 12,346 seconds 12.3"
    )
    assert _words(second).startswith("step 10/100 score nan pg_loss 0.5000 grad_norm inf entropy")
    labels = ("score", "pg_loss", "grad_norm", "entropy", "response", "tokens/s", "seconds")
    assert [first.index(label) for label in labels] == [second.index(label) for label in labels]


def test_an_evaluation_is_marked_and_has_a_line_for_each_data_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Tracker(_config(["console"], tmp_path), True, 100, "a run") as tracker:
        tracker.log(
            20,
            {
                "critic/score/mean": 0.5,
                "val-core/openai/gsm8k/reward/mean@4": 0.3125,
                "val-core/math/reward/mean@4": 0.125,
                "val-core/openai/gsm8k/reward/pass@4": 0.75,
                "val-aux/openai/gsm8k/reward/std@4": 0.1,
            },
        )
        tracker.log(20, {"val/loss": 1.25})
    assert [_words(line) for line in capsys.readouterr().out.splitlines()] == [
        "step 20/100 score 0.500",
        "step 20/100 EVALUATION openai/gsm8k/reward mean@4 0.3125 pass@4 0.75",
        "step 20/100 EVALUATION math/reward mean@4 0.125",
        "step 20/100 EVALUATION loss 1.25",
    ]


def test_metrics_without_any_main_figure_are_printed_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Tracker(_config(["console"], tmp_path), True, None, "a run") as tracker:
        tracker.log(1, {"my/metric": 0.125})
    assert capsys.readouterr().out.split() == ["step", "1", "my/metric", "0.125"]


def test_messages_are_printed_without_the_console_sink_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Tracker(_config([], tmp_path), True, None, "a run") as tracker:
        tracker.text("every response was cut off")
        tracker.log(1, {"actor/pg_loss": 0.5})
    assert capsys.readouterr().out == "every response was cut off\n"


def test_on_a_terminal_a_bar_shows_the_main_figures_and_the_rest_scrolls_above_it() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=200, color_system=None)
    bar = ProgressConsole(100, "GRPO of a model", 40, console=console)
    bar.log(41, {"critic/score/mean": 0.5, "actor/pg_loss": math.nan, "perf/tokens_per_s": 1234.0, "actor/lr": 1e-6})
    bar.log(41, {"val-core/gsm8k/reward/mean@1": 0.25})
    bar.text("saved [/runs/" + "x" * 200 + "]")
    bar.close(failed=False)
    shown = screen.getvalue()
    last_bar = _words(shown.split("GRPO of a model")[-1])
    assert "41/100" in last_bar
    assert "score 0.500 pg_loss nan tokens/s 1,234" in last_bar
    assert "actor/lr" not in shown
    assert "EVALUATION gsm8k/reward mean@1 0.25" in _words(shown)
    assert "saved [/runs/" + "x" * 200 + "]" in shown, "not wrapped, and brackets are no markup"
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1, "the cursor is hidden, and back at the end"


def test_in_a_narrow_terminal_the_count_of_steps_stays_whole() -> None:
    screen = io.StringIO()
    bar = ProgressConsole(1000, "GRPO of SmolLM2-135M", 40, console=Console(file=screen, force_terminal=True, width=80))
    bar.log(412, {"critic/score/mean": 0.5, "actor/pg_loss": 0.25, "perf/tokens_per_s": 1234.0})
    bar.close(failed=False)
    last_bar = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue()).split("GRPO of")[-1]
    assert "412/1000" in last_bar and "score 0.500" in last_bar and "tokens/s" not in last_bar
