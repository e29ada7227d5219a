"""A sequence's score is the value of its last token, whichever rank holds that, and so is its gradient."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from megarl.models.scores import scored_position, scoring_pad_token_id
from tests.data.chat_models import make_chat_model
from tests.models import score_ranks
from tests.spawn import run_ranks

LENGTHS = [5, 8, 2, 13]  # padded to multiples of 4, their last tokens are on both ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_scores_and_their_gradient_do_not_depend_on_context_parallelism(ranks: int) -> None:
    results = run_ranks(score_ranks.scores_and_gradient, ranks, LENGTHS)
    pack = score_ranks.pack(LENGTHS, ranks)
    values = torch.sin(torch.arange(pack.total_tokens).float()).requires_grad_()
    last = [start + length - 1 for start, length in zip(pack.bounds, LENGTHS, strict=False)]
    by_row = sorted(range(len(LENGTHS)), key=score_ranks.ROWS.__getitem__)
    expected = values[[last[i] for i in by_row]]
    score_ranks.loss_of(expected).backward()
    for scores, gradient, scored_here in results:
        assert torch.allclose(scores, expected)
        assert torch.allclose(gradient, values.grad)
        assert scored_here > 0
    assert sum(scored_here for _, _, scored_here in results) == len(LENGTHS)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pack_of_padding_has_no_scores_and_a_gradient_of_0(ranks: int) -> None:
    assert run_ranks(score_ranks.empty_pack, ranks) == [([0, 2], 0.0)] * ranks


@pytest.mark.parametrize("pad", [None, 0, 7])
def test_the_scored_token_is_the_one_that_transformers_takes(pad: int | None) -> None:
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1, pad_token_id=pad,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForSequenceClassification(config).eval()
    for ids in ([3, 4, 5], [3, 7, 4, 7, 7], [0, 1, 0], [7, 7], [0, 0]):
        sequence = torch.tensor(ids)
        with torch.no_grad():
            expected = model(sequence[None]).logits[0, 0]
            per_token = model.score(model.model(sequence[None]).last_hidden_state)[0, :, 0]
        found = per_token[scored_position(sequence, pad)]
        assert found.item() == pytest.approx(expected.item(), abs=1e-6), ids


@pytest.mark.parametrize(
    ("in_config", "in_tokenizer", "expected"),
    [(5, "<|endoftext|>", 5), (None, "<|endoftext|>", "<|endoftext|>"), (None, None, "<|im_end|>")],
)
def test_padding_is_that_of_the_config_or_of_the_tokenizer_or_the_end_token(
    tmp_path: Path, in_config: int | None, in_tokenizer: str | None, expected: int | str
) -> None:
    make_chat_model(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    if in_tokenizer is not None:
        tokenizer.pad_token = in_tokenizer
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"pad_token_id": in_config}))
    wanted = expected if isinstance(expected, int) else tokenizer.convert_tokens_to_ids(expected)
    assert scoring_pad_token_id(tmp_path) == wanted


def test_a_folder_that_names_no_padding_is_scored_at_the_last_token(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert scoring_pad_token_id(tmp_path) is None
