"""The weight map and the sync plan as parts of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from megarl.planning.hardware import COLLECTIVE_EFFICIENCY, GPU
from megarl.planning.published import similar_syncs
from megarl.planning.sections import Section
from megarl.planning.sync_plan import UNCERTAINTY, Route, SyncPlan
from megarl.planning.weight_map import PROBLEMS_SHOWN
from megarl.planning.weight_map_run import WeightMap

_GB = 1e9


def map_section(maps: Sequence[WeightMap], world_size: int) -> Section:
    """What was built, and whether it makes up the models."""
    lines = []
    for of_model in maps:
        names = " and ".join(of_model.models)
        if of_model.problems:
            lines.append(f"{names}: not proven, {len(of_model.problems)} problems; the first are below")
            continue
        lines += [
            f"{names}: the shards of all {world_size} ranks hold each of the {of_model.elements:,} elements of the "
            f"architecture's {of_model.tensors:,} tensors exactly once",
            f"built without memory: modules of {of_model.built} ranks, the largest with {of_model.largest:,} weights; "
            + _others(world_size - of_model.built)
            + f" ({of_model.seconds:.0f} s)",
        ]
    return Section(
        name="weight_map", title="Weight map", lines=lines, data={"models": [asdict(of_model) for of_model in maps]}
    )


def map_problems(maps: Sequence[WeightMap]) -> list[str]:
    """The first problems of each model, and how many more there are."""
    found = []
    for of_model in maps:
        found += [f"Weight map of the {of_model.models[0]}: {text}" for text in of_model.problems[:PROBLEMS_SHOWN]]
        left = len(of_model.problems) - PROBLEMS_SHOWN
        if left > 0:
            found.append(f"Weight map of the {of_model.models[0]}: {left} more problems of this kind (all in --json).")
    return found


def sync_section(plan: SyncPlan, parameters: int, gpu: GPU) -> Section:
    """What a sync moves, as it is done and at least.

    Args:
        parameters: of the model.
    """
    published = [sync.describe() for sync in similar_syncs(parameters)]
    lines = [
        f"engines: {plan.engines} of {plan.engine_size} ranks; {plan.num_bytes / _GB:,.1f} GB in {plan.tensors:,} "
        "tensors",
        f"whole tensors to every engine rank, as megarl syncs: {_moved(plan.whole)}",
        f"only each engine rank's share, which is the floor: {_moved(plan.shares)}; all tensors fill about "
        f"{plan.buckets:,} buckets of {plan.bucket_bytes / 2**20:.0f} MiB",
        f"assumed: {gpu.link / _GB:.0f} GB/s within a node and {gpu.network / _GB:.0f} GB/s a GPU across nodes, of "
        f"which {100 * COLLECTIVE_EFFICIENCY:.0f} % are reached",
        f"certainty: the bytes within a factor of {UNCERTAINTY:g}; what each tensor costs besides is not counted; not "
        "calibrated on a run of megarl on GPUs",
        *(f"published: {sync}" for sync in published),
    ]
    data = {**asdict(plan), "uncertainty_factor": UNCERTAINTY, "published": published}
    return Section(name="sync", title="Weight sync", lines=lines, data=data)


def _moved(route: Route) -> str:
    return (
        f"rank {route.rank} receives {route.across_nodes / _GB:,.1f} GB across nodes and "
        f"{route.within_node / _GB:,.1f} GB within its node, about {route.seconds:.1f} s"
    )


def _others(count: int) -> str:
    if not count:
        return "that is every rank"
    return f"each of the other {count} differs from one of them in its data- or context-parallel place only"
