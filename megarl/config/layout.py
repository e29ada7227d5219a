"""Where ranks stand: the parallel sizes of a run, checked against its world size and model. Pure Python."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megarl.config.model_shape import ModelShape

__all__ = ["Coordinates", "Layout", "ModelShape"]

TP_KEY = "parallel.tensor_model_parallel_size"
PP_KEY = "parallel.pipeline_model_parallel_size"
VPP_KEY = "parallel.virtual_pipeline_model_parallel_size"
CP_KEY = "parallel.context_parallel_size"
EP_KEY = "parallel.expert_model_parallel_size"
ETP_KEY = "parallel.expert_tensor_parallel_size"
SP_KEY = "parallel.sequence_parallel"
FIRST_STAGE_KEY = "parallel.num_layers_in_first_pipeline_stage"
LAST_STAGE_KEY = "parallel.num_layers_in_last_pipeline_stage"


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    """Where one rank stands; each value counts from 0 within the size of the same name."""

    tp: int
    pp: int
    cp: int
    dp: int
    ep: int
    etp: int
    expert_dp: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The parallel sizes of a run.

    A layout can be built from any numbers; `problems` says what is wrong with them, and the properties and
    `coordinates` mean something only where it says nothing.

    `etp` and `sequence_parallel` may be left out (or given as None) and hold their resolved value from then on, so
    `dataclasses.replace(layout, tp=…)` keeps the values resolved for the old `tp`: build a new layout instead.
    """

    world_size: int = 1
    """Ranks of the whole run."""
    tp: int = 1
    """Tensor parallel: ranks that share each matrix."""
    pp: int = 1
    """Pipeline parallel: stages that share the layers."""
    vpp: int = 1
    """Virtual pipeline: model chunks on each stage; 1 is the plain schedule."""
    cp: int = 1
    """Context parallel: ranks that share each sequence."""
    ep: int = 1
    """Expert parallel: ranks that share the experts of a layer."""
    etp: int = None  # type: ignore[assignment]  # None on the way in only
    """Expert tensor parallel: ranks that share each expert's matrices. None: `tp`."""
    sequence_parallel: bool = None  # type: ignore[assignment]  # None on the way in only
    """Whether tensor-parallel ranks also share the tokens outside attention and feed-forward. None: `tp > 1`."""
    first_stage_layers: int | None = None
    """Layers on the first pipeline stage where stages are uneven. None: an equal share."""
    last_stage_layers: int | None = None
    """Layers on the last pipeline stage where stages are uneven. None: an equal share."""

    def __post_init__(self) -> None:
        if self.etp is None:
            object.__setattr__(self, "etp", self.tp)
        if self.sequence_parallel is None:
            object.__setattr__(self, "sequence_parallel", self.tp > 1)

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model and see the same data."""
        return self.tp * self.pp * self.cp

    @property
    def dp(self) -> int:
        """Data parallel: model-parallel groups that see different data."""
        return self.world_size // self.model_parallel_size

    @property
    def expert_dp(self) -> int:
        """Copies of each expert."""
        return self.world_size // (self.etp * self.ep * self.pp)

    @property
    def replica_block(self) -> int:
        """Consecutive ranks of a stage that hold all its weights and share none with the next such block: at least one
        copy of the dense weights and one of the experts, whichever needs more ranks."""
        return math.lcm(self.tp, self.etp * self.ep)

    def replica(self, rank: int) -> int:
        """Number of the replica domain of `rank`: the ranks, one block of each stage, that hold a whole model."""
        return rank % (self.world_size // self.pp) // self.replica_block

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands, in Megatron-Core's rank order `tp-cp-ep-dp-pp` (`parallel_state.RankGenerator`).

        Ranks count fastest along `tp`, then `cp`, `dp`, `pp`; experts see the same ranks as `etp`, `ep`,
        `expert_dp`, `pp`.

        Raises:
            ValueError: `rank` is not within the world.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not within a world of {self.world_size} ranks")
        within_stage, pp = rank % (self.world_size // self.pp), rank // (self.world_size // self.pp)
        return Coordinates(
            tp=within_stage % self.tp,
            cp=within_stage // self.tp % self.cp,
            dp=within_stage // (self.tp * self.cp),
            pp=pp,
            etp=within_stage % self.etp,
            ep=within_stage // self.etp % self.ep,
            expert_dp=within_stage // (self.etp * self.ep),
        )

    def stage_layers(self, num_layers: int) -> list[int]:
        """Layers on each pipeline stage (all of its virtual chunks together), as Megatron-Core divides them.

        Raises:
            ValueError: the layers cannot be divided so.
        """
        stages: list[int | None] = [None] * self.pp
        for stage, layers in ((0, self.first_stage_layers), (-1, self.last_stage_layers)):
            if layers is not None:
                stages[stage] = layers
        open_stages = stages.count(None)
        left = num_layers - sum(layers for layers in stages if layers is not None)
        if left < open_stages or (left > 0 and open_stages == 0) or (open_stages and left % open_stages):
            raise ValueError(f"{left} layers cannot be shared equally by {open_stages} pipeline stages")
        share = left // open_stages if open_stages else 0
        return [share if layers is None else layers for layers in stages]

    def chunk_layers(self, num_layers: int, stage: int) -> list[range]:
        """Numbers of the layers in each virtual chunk of pipeline stage `stage`, in the order tokens pass through them.

        Megatron-Core deals layers out in rounds (`get_transformer_layer_offset`): virtual stage v of all pipeline
        stages comes before virtual stage v + 1 of the first.
        """
        per_chunk = [layers // self.vpp for layers in self.stage_layers(num_layers)]
        before, round_size = sum(per_chunk[:stage]), sum(per_chunk)
        starts = [virtual * round_size + before for virtual in range(self.vpp)]
        return [range(start, start + per_chunk[stage]) for start in starts]

    def problems(self, model: ModelShape | None = None) -> list[str]:
        """Every reason to refuse this layout, one sentence each; empty if there is none.

        Rules that depend on the model are left out where `model` is None. There is no rule for the vocabulary: it is
        padded to a multiple of `tp`. What micro-batches must satisfy (their number under VPP, sequence lengths under
        CP and SP) is arranged when batches are packed.

        Source of the rules: Megatron-Core 0.16.1 (`TransformerConfig.__post_init__`, `initialize_model_parallel`,
        `Attention.__init__`, `MoELayer`) unless a comment says otherwise.
        """
        sizes = list(self._size_problems())
        if sizes:  # the other rules divide by these sizes
            return sizes
        found = [*self._world_problems(), *self._switch_problems()]
        if model is not None:
            found += [*self._tensor_problems(model), *self._layer_problems(model), *self._expert_problems(model)]
        return found

    def describe(self) -> str:
        """The layout in one line for people, e.g. `8 ranks = TP2 × PP2 × DP2, sequence parallel`."""
        sizes = {"TP": self.tp, "CP": self.cp, "PP": self.pp, "DP": self.dp}
        factors = " × ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)
        text = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        text += f" = {factors}" if factors else ""
        if self.vpp > 1:
            text += f", {self.vpp} virtual stages on each pipeline stage"
        if self.ep > 1 or self.etp != self.tp:
            text += f", experts EP{self.ep} × ETP{self.etp} × DP{self.expert_dp}"
        return text + (", sequence parallel" if self.sequence_parallel else "")

    def _size_problems(self) -> Iterator[str]:
        sizes = {
            "the world size": self.world_size,
            TP_KEY: self.tp,
            PP_KEY: self.pp,
            VPP_KEY: self.vpp,
            CP_KEY: self.cp,
            EP_KEY: self.ep,
            ETP_KEY: self.etp if self.etp != self.tp else None,  # left out, it repeats what tp has
            FIRST_STAGE_KEY: self.first_stage_layers,
            LAST_STAGE_KEY: self.last_stage_layers,
        }
        for name, size in sizes.items():
            if size is not None and size < 1:
                yield f"{name} is {size}, but must be at least 1."

    def _world_problems(self) -> Iterator[str]:
        size = self.model_parallel_size
        if self.world_size % size:
            yield (
                f"{TP_KEY} {self.tp} × {PP_KEY} {self.pp} × {CP_KEY} {self.cp} = {size} ranks hold one model, which "
                f"does not divide the world size {self.world_size}: "
                f"start a multiple of {size} ranks or choose smaller sizes."
            )
        expert_size = self.etp * self.ep * self.pp
        has_expert_layout = self.ep > 1 or self.etp != self.tp
        if has_expert_layout and self.world_size % expert_size:
            yield (
                f"{ETP_KEY} {self.etp} × {EP_KEY} {self.ep} × {PP_KEY} {self.pp} = {expert_size} ranks hold one copy "
                f"of the experts, which does not divide the world size {self.world_size}: "
                f"start a multiple of {expert_size} ranks or choose smaller sizes."
            )

    def _switch_problems(self) -> Iterator[str]:
        if self.sequence_parallel and self.tp == 1:
            yield f"{SP_KEY} is true, but with {TP_KEY} 1 there is nothing to share: leave it out, or raise {TP_KEY}."
        if self.pp > 1:
            return
        if self.vpp > 1:
            yield f"{VPP_KEY} is {self.vpp}, but virtual stages need at least 2 in {PP_KEY}: set one of the two."
        for key, layers in ((FIRST_STAGE_KEY, self.first_stage_layers), (LAST_STAGE_KEY, self.last_stage_layers)):
            if layers is not None:
                yield f"{key} is {layers}, but with {PP_KEY} 1 there is one stage, which has all layers: leave it out."

    def _tensor_problems(self, model: ModelShape) -> Iterator[str]:
        if model.num_heads % self.tp:
            yield _does_not_divide(TP_KEY, self.tp, model.num_heads, "attention heads")
        elif model.num_kv_heads % self.tp and self.tp % model.num_kv_heads:
            yield (
                f"{TP_KEY} is {self.tp}, but must divide the model's {model.num_kv_heads} key/value heads or be a "
                f"multiple of them: {_working_divisors(model.num_heads, model.num_kv_heads)}."
            )
        elif (rows := (model.num_heads + 2 * model.num_kv_heads) * model.head_dim) % self.tp:
            # With fewer key/value heads than ranks, Megatron cuts the fused QKV matrix by rows, not by heads.
            yield _does_not_divide(TP_KEY, self.tp, rows, "rows of the fused query-key-value matrix")
        if model.num_dense_layers and model.ffn_size % self.tp:
            yield _does_not_divide(TP_KEY, self.tp, model.ffn_size, "feed-forward width")
        if model.shared_ffn_size % self.tp:
            yield _does_not_divide(TP_KEY, self.tp, model.shared_ffn_size, "shared-expert width")

    def _layer_problems(self, model: ModelShape) -> Iterator[str]:
        if self.pp == 1:  # with one stage, _switch_problems has said what can be said
            return
        try:
            stages = self.stage_layers(model.num_layers)
        except ValueError:
            uneven = self.first_stage_layers is not None or self.last_stage_layers is not None
            yield (
                self._uneven_problem(model)
                if uneven
                else (
                    _does_not_divide(PP_KEY, self.pp, model.num_layers, "layers")
                    + f" Or make the stages uneven with {FIRST_STAGE_KEY} and {LAST_STAGE_KEY}."
                )
            )
            return
        for layers in sorted(set(stages)):
            if layers % self.vpp:
                yield (
                    f"{VPP_KEY} is {self.vpp}, which does not divide the {layers} layers of a pipeline stage "
                    f"({model.num_layers} layers over {self.pp} stages): use {_divisors(layers)}."
                )

    def _uneven_problem(self, model: ModelShape) -> str:
        given = {FIRST_STAGE_KEY: self.first_stage_layers, LAST_STAGE_KEY: self.last_stage_layers}
        parts = " and ".join(f"{key} {layers}" for key, layers in given.items() if layers is not None)
        left = model.num_layers - sum(layers for layers in given.values() if layers is not None)
        stages = self.pp - sum(layers is not None for layers in given.values())
        return (
            f"{parts} of {model.num_layers} layers leave {left} layers for the {stages} other pipeline stages, which "
            f"must get an equal number of at least one each: change these numbers or {PP_KEY}."
        )

    def _expert_problems(self, model: ModelShape) -> Iterator[str]:
        if not model.is_moe:
            if self.ep > 1:
                yield f"{EP_KEY} is {self.ep}, but a {model.model_type} model has no experts: set it to 1."
            if self.etp != self.tp:
                yield f"{ETP_KEY} is {self.etp}, but a {model.model_type} model has no experts: leave it out."
            return
        if model.num_experts % self.ep:
            yield _does_not_divide(EP_KEY, self.ep, model.num_experts, "experts")
        if model.moe_ffn_size % self.etp:
            yield _does_not_divide(ETP_KEY, self.etp, model.moe_ffn_size, "expert feed-forward width")
        if self.tp % self.etp:
            # Megatron-Core would build it; nobody has compared its gradients with anything.
            yield f"{ETP_KEY} is {self.etp}, but must divide {TP_KEY} {self.tp}: use {_divisors(self.tp)}."
        if self.tp > 1 and not self.sequence_parallel:
            # MoELayer.forward raises: without it every tensor-parallel rank would route the same tokens again.
            yield f"{SP_KEY} is false, but experts with {TP_KEY} {self.tp} need it: leave it out or set it to true."


def _does_not_divide(key: str, size: int, total: int, what: str) -> str:
    return f"{key} is {size}, which does not divide the model's {total} {what}: use {_divisors(total)}."


# Nobody runs a parallel size above this, and a list of all divisors of a feed-forward width helps no one.
_LARGEST_SUGGESTION = 64


def _divisors(number: int) -> str:
    return _either(size for size in range(1, min(number, _LARGEST_SUGGESTION) + 1) if number % size == 0)


def _working_divisors(heads: int, kv_heads: int) -> str:
    sizes = (size for size in range(1, min(heads, _LARGEST_SUGGESTION) + 1) if heads % size == 0)
    return "use " + _either(size for size in sizes if kv_heads % size == 0 or size % kv_heads == 0)


def _either(sizes: Iterator[int]) -> str:
    *most, last = sizes
    return f"{', '.join(map(str, most))} or {last}" if most else str(last)
