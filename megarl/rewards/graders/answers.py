"""Where in a response its answer stands."""

from __future__ import annotations

import re

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOX = "\\boxed{"


def tagged_answer(response: str) -> str:
    """What stands in the last `<answer>…</answer>`, or the whole response where there is none; without outer space."""
    tagged = _TAGGED.findall(response)
    return (tagged[-1] if tagged else response).strip()


def boxed_answer(response: str) -> str | None:
    r"""What stands in the last closed `\boxed{…}`, which may hold braces; None where there is none."""
    start = len(response)
    while (start := response.rfind(_BOX, 0, start)) >= 0:
        inner = start + len(_BOX)
        depth = 1
        for position in range(inner, len(response)):
            depth += {"{": 1, "}": -1}.get(response[position], 0)
            if depth == 0:
                return response[inner:position]
    return None
