"""Where ranks stand and which layouts are refused, compared with what Megatron-Core itself computes and accepts."""

import itertools
from dataclasses import replace

import pytest
from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import get_num_layers_to_build

from megarl.config import Layout, ModelShape

LLAMA = ModelShape(
    model_type="llama",
    num_layers=8,
    hidden_size=64,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=128,
    num_dense_layers=8,
    vocab_size=257,
    max_positions=128,
    tied=False,
)
QWEN3_MOE = replace(LLAMA, model_type="qwen3_moe", num_dense_layers=0, num_experts=8, moe_ffn_size=32)

LAYOUTS = [
    layout
    for tp, pp, cp, ep, etp, copies in itertools.product((1, 2, 4), (1, 2, 3), (1, 2), (1, 2, 4), (1, 2), (1, 2, 3))
    if not (layout := Layout(world_size=tp * pp * cp * copies, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp)).problems()
]


def groups_of(layout: Layout, *axes: str) -> list[list[int]]:
    """Ranks that differ only along `axes`, by our coordinates; the axes of experts and of the rest are two systems."""
    system = ("etp", "ep", "expert_dp", "pp") if set(axes) & {"etp", "ep", "expert_dp"} else ("tp", "cp", "dp", "pp")
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        coordinates = layout.coordinates(rank)
        others = tuple(getattr(coordinates, axis) for axis in system if axis not in axes)
        groups.setdefault(others, []).append(rank)
    return sorted(groups.values())


def test_the_layouts_compared_with_megatron_are_many():
    assert len(LAYOUTS) > 100


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_ranks_that_share_coordinates_are_megatrons_groups(layout):
    order = "tp-cp-ep-dp-pp"
    decoder = RankGenerator(tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp, order=order)
    for axes in (("tp",), ("cp",), ("dp",), ("pp",), ("tp", "pp"), ("dp", "cp"), ("tp", "cp", "pp")):
        assert groups_of(layout, *axes) == sorted(decoder.get_ranks("-".join(axes)))
    experts = RankGenerator(tp=layout.etp, ep=layout.ep, dp=layout.expert_dp, pp=layout.pp, cp=1, order=order)
    for axes in (("etp",), ("ep",), ("expert_dp",), ("etp", "ep")):
        token = "-".join(axes).replace("etp", "tp").replace("expert_dp", "dp")
        assert groups_of(layout, *axes) == sorted(experts.get_ranks(token))


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_coordinates_count_along_their_group_as_ranks_do(layout):
    for axis in ("tp", "cp", "dp", "pp", "etp", "ep", "expert_dp"):
        for group in groups_of(layout, axis):
            assert [getattr(layout.coordinates(rank), axis) for rank in group] == list(range(len(group)))


def test_a_rank_outside_the_world_has_no_coordinates():
    for rank in (-1, 4):
        with pytest.raises(ValueError, match="not within a world of 4"):
            Layout(world_size=4).coordinates(rank)


def megatron_stage_layers(num_layers: int, layout: Layout) -> list[int] | None:
    """Layers on each stage as Megatron-Core builds them; None where it refuses."""
    try:
        config = TransformerConfig(
            num_layers=num_layers,
            hidden_size=64,
            num_attention_heads=8,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            num_layers_in_first_pipeline_stage=layout.first_stage_layers,
            num_layers_in_last_pipeline_stage=layout.last_stage_layers,
            pipeline_dtype="float32",
        )
        return [
            sum(get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage) for chunk in range(layout.vpp))
            for stage in range(layout.pp)
        ]
    except (ValueError, AssertionError):
        return None


def test_stages_are_divided_and_refused_as_megatron_does():
    refused = accepted = 0
    sizes = itertools.product((4, 6, 7, 12), (2, 3, 4), (1, 2, 3), (None, 1, 2, 4), (None, 1, 2, 4))
    for num_layers, pp, vpp, first, last in sizes:
        layout = Layout(world_size=pp, pp=pp, vpp=vpp, first_stage_layers=first, last_stage_layers=last)
        problems = layout.problems(replace(LLAMA, num_layers=num_layers))
        expected = megatron_stage_layers(num_layers, layout)
        if expected is not None and min(expected) > 0:
            accepted += 1
            assert problems == [], (num_layers, layout)
            assert layout.stage_layers(num_layers) == expected, (num_layers, layout)
        else:
            refused += 1
            assert problems, (num_layers, layout)
    assert accepted > 20 and refused > 20


def test_sixty_one_layers_of_deepseek_fit_on_sixteen_stages():
    layout = Layout(world_size=16, pp=16, first_stage_layers=3, last_stage_layers=2)
    assert layout.stage_layers(61) == [3, *[4] * 14, 2]


def test_heads_are_refused_as_megatron_does():
    for heads, kv_heads, tp in itertools.product((6, 8, 12), (1, 2, 3, 4, 6), (1, 2, 3, 4, 6, 8)):
        if heads % kv_heads:
            continue
        # A head of 48 leaves only the rule about heads: its rows divide by every tp here.
        shape = replace(LLAMA, num_heads=heads, num_kv_heads=kv_heads, head_dim=48, ffn_size=48)
        try:
            TransformerConfig(
                num_layers=1,
                hidden_size=heads * 8,
                num_attention_heads=heads,
                num_query_groups=kv_heads,
                tensor_model_parallel_size=tp,
            )
            accepted = True
        except ValueError:
            accepted = False
        assert (Layout(world_size=tp, tp=tp).problems(shape) == []) == accepted, (heads, kv_heads, tp)


def test_the_fused_query_key_value_matrix_must_divide_where_heads_are_shared():
    shape = replace(LLAMA, num_heads=16, num_kv_heads=2, head_dim=2, ffn_size=128)  # 40 rows
    assert Layout(world_size=8, tp=8).problems(shape) == []
    (problem,) = Layout(world_size=16, tp=16).problems(shape)
    assert "40 rows of the fused query-key-value matrix" in problem


REFUSED = {
    "a world that the model does not divide": (Layout(world_size=6, tp=2, pp=2), LLAMA, "a multiple of 4"),
    "a world that the experts do not divide": (Layout(world_size=6, ep=4), QWEN3_MOE, "a multiple of 4"),
    "sequence parallel without tensor parallel": (Layout(sequence_parallel=True), LLAMA, "sequence_parallel is true"),
    "virtual stages without stages": (Layout(vpp=2), LLAMA, "virtual_pipeline_model_parallel_size is 2"),
    "an uneven first stage without stages": (Layout(first_stage_layers=3), LLAMA, "leave it out"),
    "a feed-forward width": (Layout(world_size=4, tp=4), replace(LLAMA, ffn_size=130), "130 feed-forward width"),
    "a shared-expert width": (
        Layout(world_size=4, tp=4),
        replace(QWEN3_MOE, shared_ffn_size=34),
        "34 shared-expert width",
    ),
    "an expert width": (Layout(world_size=4, tp=4), replace(QWEN3_MOE, moe_ffn_size=34), "use 1, 2, 17 or 34"),
    "experts over ranks": (Layout(world_size=3, ep=3), QWEN3_MOE, "8 experts: use 1, 2, 4 or 8"),
    "expert parallel without experts": (Layout(world_size=2, ep=2), LLAMA, "has no experts: set it to 1"),
    "expert tensor parallel without experts": (Layout(world_size=2, tp=2, etp=1), LLAMA, "has no experts: leave it"),
    "expert tensor parallel beyond tensor parallel": (Layout(world_size=2, etp=2), QWEN3_MOE, "must divide"),
    "experts without sequence parallel": (
        Layout(world_size=2, tp=2, sequence_parallel=False),
        QWEN3_MOE,
        "sequence_parallel is false",
    ),
    "layers that do not divide": (Layout(world_size=3, pp=3), LLAMA, "8 layers: use 1, 2, 4 or 8"),
    "a size of nothing": (Layout(tp=0), LLAMA, "tensor_model_parallel_size is 0"),
}


@pytest.mark.parametrize(("layout", "shape", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_it_is_refused_for_this_reason_alone(layout, shape, reason):
    (problem,) = layout.problems(shape)
    assert reason in problem


def test_all_reasons_come_at_once():
    problems = Layout(world_size=9, tp=2, pp=3, vpp=2, ep=2, sequence_parallel=False).problems(LLAMA)
    assert len(problems) == 4  # the world twice, the layers, and no experts
    assert len(set(problems)) == 4


def test_a_dense_width_that_no_layer_has_is_not_checked():
    assert Layout(world_size=2, tp=2).problems(replace(QWEN3_MOE, ffn_size=129)) == []


def test_derived_sizes():
    layout = Layout(world_size=32, tp=4, pp=2, cp=2, ep=4, etp=1)
    assert (layout.model_parallel_size, layout.dp, layout.expert_dp, layout.sequence_parallel) == (16, 2, 4, True)
    assert Layout(world_size=4, tp=4).etp == 4


def test_a_layout_says_in_one_line_what_it_is():
    assert Layout().describe() == "1 rank"
    assert Layout(world_size=8, tp=2, pp=2).describe() == "8 ranks = TP2 × PP2 × DP2, sequence parallel"
    text = Layout(world_size=8, tp=2, pp=2, vpp=2, ep=2, etp=1, sequence_parallel=False).describe()
    assert text == "8 ranks = TP2 × PP2 × DP2, 2 virtual stages on each pipeline stage, experts EP2 × ETP1 × DP2"
