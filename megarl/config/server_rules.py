"""Rules of `rollout.servers`: engines on GPUs of their own. Imports no torch."""

from collections.abc import Iterator

from megarl.config.schema import RunConfig

TIMEOUT_MARGIN_S = 60.0
"""How much longer ranks wait for one another than one of them for its server, so that its word comes first."""


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of `host:port`; an IPv6 address stands in brackets.

    Raises:
        ValueError: it is not that.
    """
    host, _, port = text.rpartition(":")
    # A bare IPv6 address has colons of its own, and a URL has a scheme.
    if (
        not host
        or "/" in host
        or (":" in host and not host.startswith("["))
        or not port.isascii()
        or not port.isdigit()
        or not 0 < int(port) < 2**16
    ):
        raise ValueError(f"{text} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def server_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """What is wrong with the servers of a run, if it names some."""
    rollout, servers = config.rollout, list(config.rollout.servers)
    if not servers:
        return
    if rollout.engine != "sglang":
        yield (
            f"rollout.servers names engines on GPUs of their own, but rollout.engine is {rollout.engine}: set it to "
            "sglang, or leave servers out."
        )
        return
    for server in servers:
        try:
            parse_address(server)
        except ValueError:
            yield f"rollout.servers has {server!r}, but must be of host:port, e.g. node7:30000."
    if len(set(servers)) < len(servers):
        yield "rollout.servers names a server twice, but each answers one rank: name each once."
    if world_size % len(servers):
        yield (
            f"rollout.servers names {len(servers)}, which does not divide the world size {world_size}: equally many "
            "ranks share each, so name a divisor of it."
        )
    if rollout.server_timeout_s + TIMEOUT_MARGIN_S > config.observe.hang_timeout_s:
        yield (
            f"rollout.server_timeout_s is {rollout.server_timeout_s:g}, but while one rank waits for its server the "
            f"others wait for it, at most observe.hang_timeout_s {config.observe.hang_timeout_s:g}: set that to at "
            f"least {rollout.server_timeout_s + TIMEOUT_MARGIN_S:g}."
        )
