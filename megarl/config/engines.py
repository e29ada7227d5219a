"""What of an engine's options the trainer has to know. Imports no torch."""

from megarl.config.schema import RolloutConfig

_OTHER_PLACES = ("enable_eplb", "ep_num_redundant_experts", "init_expert_location", "moe_dp_size")
"""Arguments of SGLang with which its ranks have other experts than equal runs of them, or may change them."""


def engine_expert_shares(rollout: RolloutConfig) -> int:
    """In how many equal runs an engine shares its experts out among its ranks.

    1: each rank is given all of them, and keeps what it needs.
    """
    if rollout.engine != "sglang" or any(rollout.sglang.get(option) for option in _OTHER_PLACES):
        return 1
    return rollout.sglang.get("ep_size", 1)
