"""The weight side of the transformers engine: updates, their checksums, what is refused, sleep and wake."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.rollout.engine import WeightUpdateError
from megarl.rollout.transformers_engine import TransformersEngine
from megarl.weights.bucket import Bucket, pack
from megarl.weights.checksum import checksum
from tests.rollout.helpers import answers, engine_of, prompts, request
from tests.tiny_models import DENSE, MOE, make_hf_model

NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_model("llama", tmp_path_factory.mktemp("llama"))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def empty_engine(folder: Path, dtype: torch.dtype = torch.float32) -> TransformersEngine:
    return TransformersEngine(folder, dtype=dtype, max_num_seqs=4)


def checked(weights: dict[str, torch.Tensor]) -> Bucket:
    """All of them in one bucket, with their checksums."""
    return pack(weights.items(), {name: checksum(tensor) for name, tensor in weights.items()})


def requests() -> list:
    return [request(index, prompt, n=2) for index, prompt in enumerate(prompts())]


@pytest.mark.parametrize("family", DENSE + MOE)
def test_the_engine_takes_exactly_the_checkpoints_tensors_and_holds_their_bits(family: str, tmp_path: Path) -> None:
    weights = weights_of(make_hf_model(family, tmp_path))
    engine = empty_engine(tmp_path)
    engine.begin_weight_update(7)
    engine.receive_bucket(checked(weights))  # refuses what it does not hold bit by bit
    engine.end_weight_update()
    assert engine.weight_version == 7


def test_an_update_changes_what_is_generated_to_what_the_new_weights_say(llama: Path, tmp_path: Path) -> None:
    engine = engine_of(llama)
    before = answers(engine, requests())
    other = make_hf_model("llama", tmp_path, seed=5)
    engine.begin_weight_update(3)
    weights = list(weights_of(other).items())
    engine.receive_bucket(pack(weights[:10]))
    engine.receive_bucket(pack(weights[10:]))
    engine.end_weight_update()
    after = answers(engine, requests())
    fresh = answers(engine_of(other), requests())
    assert {place: r.token_ids for place, r in after.items()} == {place: r.token_ids for place, r in fresh.items()}
    assert {place: r.token_ids for place, r in after.items()} != {place: r.token_ids for place, r in before.items()}
    assert {response.weight_version for response in after.values()} == {3}


def test_a_bucket_may_be_overwritten_as_soon_as_it_is_taken(llama: Path) -> None:
    weights = weights_of(llama)
    engine = empty_engine(llama)
    engine.begin_weight_update(0)
    bucket = checked(weights)
    engine.receive_bucket(bucket)
    bucket.data.fill_(255)
    engine.end_weight_update()
    assert answers(engine, requests()) == answers(engine_of(llama), requests())


def test_an_empty_bucket_is_taken(llama: Path) -> None:
    engine = empty_engine(llama)
    engine.begin_weight_update(0)
    engine.receive_bucket(pack([]))
    engine.receive_bucket(checked(weights_of(llama)))
    engine.end_weight_update()


@pytest.mark.parametrize("family", MOE)
def test_a_bfloat16_engine_holds_what_a_bfloat16_trainer_sends(family: str, tmp_path: Path) -> None:
    """Some families keep a bias of the router in float32, on both sides."""
    folder = make_hf_model(family, tmp_path)
    sent = {
        name: tensor if name.endswith(".e_score_correction_bias") else tensor.to(torch.bfloat16)
        for name, tensor in weights_of(folder).items()
    }
    engine = empty_engine(folder, torch.bfloat16)
    engine.begin_weight_update(0)
    engine.receive_bucket(checked(sent))
    engine.end_weight_update()


def test_a_bit_that_flips_on_the_way_is_found_and_named(llama: Path) -> None:
    engine = empty_engine(llama)
    bucket = checked(weights_of(llama))
    dict(bucket.tensors())[NORM].view(torch.int32)[17] ^= 1
    engine.begin_weight_update(0)
    with pytest.raises(WeightUpdateError, match=f"^{NORM} arrived changed"):
        engine.receive_bucket(bucket)


def test_an_incomplete_update_names_what_is_missing_and_nothing_is_generated_until_it_is_whole(llama: Path) -> None:
    weights = weights_of(llama)
    norm = weights.pop(NORM)
    engine = engine_of(llama)
    engine.begin_weight_update(1)
    engine.receive_bucket(pack(weights.items()))
    with pytest.raises(WeightUpdateError, match=f"1 of {len(weights) + 1} tensors did not come: {NORM}"):
        engine.end_weight_update()
    with pytest.raises(RuntimeError, match="no complete weights"):
        engine.generate(requests())
    engine.receive_bucket(pack([(NORM, norm)]))
    engine.end_weight_update()
    assert engine.weight_version == 1
    assert answers(engine, requests())


@pytest.mark.parametrize(
    ("name", "tensor", "sentence"),
    [
        ("model.layers.9.mlp.up_proj.weight", torch.zeros(2), "no tensor model.layers.9.mlp.up_proj.weight"),
        (NORM, torch.zeros(63), rf"{NORM} came as torch.float32 \[63\], and the engine holds torch.float32 \[64\]"),
        (NORM, torch.zeros(64, dtype=torch.bfloat16), "came as torch.bfloat16"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(
    llama: Path, name: str, tensor: torch.Tensor, sentence: str
) -> None:
    engine = empty_engine(llama)
    engine.begin_weight_update(0)
    with pytest.raises(WeightUpdateError, match=sentence):
        engine.receive_bucket(pack([(name, tensor)]))


def test_a_tensor_that_comes_twice_is_refused(llama: Path) -> None:
    engine = empty_engine(llama)
    engine.begin_weight_update(0)
    with pytest.raises(WeightUpdateError, match=f"{NORM} came twice"):
        engine.receive_bucket(pack([(NORM, torch.zeros(64))] * 2))


def test_a_tied_output_layer_is_not_a_tensor_of_its_own(tmp_path: Path) -> None:
    engine = empty_engine(make_hf_model("llama_tied", tmp_path))
    engine.begin_weight_update(0)
    with pytest.raises(WeightUpdateError, match=r"no tensor lm_head\.weight"):
        engine.receive_bucket(pack([("lm_head.weight", torch.zeros(262, 64))]))


def test_weights_outside_an_update_are_refused(llama: Path) -> None:
    engine = engine_of(llama)
    with pytest.raises(WeightUpdateError, match="without begin_weight_update"):
        engine.receive_bucket(pack([(NORM, torch.zeros(64))]))
    with pytest.raises(WeightUpdateError, match="without begin_weight_update"):
        engine.end_weight_update()


def test_no_update_begins_while_responses_are_generated(llama: Path) -> None:
    engine = engine_of(llama)
    iterator = engine.generate(requests())
    next(iterator)
    for action in (lambda: engine.begin_weight_update(1), engine.sleep):
        with pytest.raises(RuntimeError, match="another generate"):
            action()
    iterator.close()


def test_an_engine_without_weights_does_not_generate(llama: Path) -> None:
    with pytest.raises(RuntimeError, match="no complete weights"):
        empty_engine(llama).generate(requests())


def test_weights_that_are_not_finite_are_named_by_version_and_leave_nothing_behind(llama: Path) -> None:
    engine = engine_of(llama)
    weights = weights_of(llama)
    engine.begin_weight_update(4)
    engine.receive_bucket(
        pack((name, torch.full_like(t, torch.nan) if name == NORM else t) for name, t in weights.items())
    )
    engine.end_weight_update()
    with pytest.raises(FloatingPointError, match=r"not finite at token 0 .* weights of version 4"):
        list(engine.generate(requests()))
    engine.load_folder(llama)
    # Short prompts in slots that had longer ones, beside one that makes attention read that far.
    other = [request(0, prompts()[3]), request(1, prompts()[2], n=3)]
    assert answers(engine, other) == answers(engine_of(llama), other)


def test_a_sleeping_engine_takes_weights_first_and_generates_when_all_is_awake(llama: Path) -> None:
    engine = engine_of(llama)
    good = answers(engine, requests())
    engine.sleep()
    with pytest.raises(RuntimeError, match="asleep: wake them"):
        engine.begin_weight_update(1)
    engine.wake(["weights"])
    engine.begin_weight_update(0)
    engine.receive_bucket(pack(weights_of(llama).items()))
    engine.end_weight_update()
    with pytest.raises(RuntimeError, match=r"sleeps \(kv_cache\)"):
        engine.generate(requests())
    engine.wake(["kv_cache"])
    assert answers(engine, requests()) == good
    engine.sleep()
    engine.wake()
    assert answers(engine, requests()) == good
