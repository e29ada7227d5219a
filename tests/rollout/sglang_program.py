"""One SGLang engine through everything that an engine does: what it answered goes into a file.

    python sglang_program.py FOLDER

FOLDER has two models, `a` and `b`. It ends by killing itself, as a rank that the machine kills would.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from megarl import platform
from megarl.rollout.engine import EngineDied, Request, Response, SamplingParams, WeightUpdateError
from megarl.rollout.sglang.options import EngineSettings
from megarl.rollout.sglang.placement import place
from megarl.rollout.sglang_engine import SGLangEngine
from megarl.trainers.engine_keeper import EngineKeeper
from megarl.weights.bucket import pack
from megarl.weights.checksum import checksum
from megarl.weights.safetensors_io import SafetensorsReader
from tests.launch import LIMIT_S

MAX_TOKENS = 128
STOP = 9
PROMPTS = ([5, 6, 7], [20, 21, 22, 23, 24, 25], [33, 34, 35])
SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cooler": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "top-p": {"top_p": 0.8},
    "top-k": {"top_k": 5, "temperature": 1.3},
}
_PER_BUCKET = 20


class Case:
    """The engine and its models."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        settings = EngineSettings(
            model_path=str(folder / "a"),
            dtype="float32",
            max_tokens=MAX_TOKENS,
            max_num_seqs=16,
            gpu_memory_utilization=0.5,
            seed=1,
            options={},
        )
        self.engine = SGLangEngine(settings, place(0, 1, 1), None)

    def buckets(self, model: str) -> list[Any]:
        reader = SafetensorsReader(self.folder / model)
        tensors = [(name, reader.read(name)) for name in reader.names()]
        parts = [tensors[start : start + _PER_BUCKET] for start in range(0, len(tensors), _PER_BUCKET)]
        return [pack(part, {name: checksum(tensor) for name, tensor in part}, mapped=True) for part in parts]

    def update(self, model: str, version: int) -> None:
        self.engine.begin_weight_update(version)
        for bucket in self.buckets(model):
            self.engine.receive_bucket(bucket)
        self.engine.end_weight_update()

    def scheduler(self) -> psutil.Process:
        return next(p for p in psutil.Process(self.engine.pid).children() if "sglang::" in " ".join(p.cmdline()))


def requests(n: int = 2, max_new_tokens: int = 12, stop: tuple[int, ...] = (STOP,), **sampling: Any) -> list[Request]:
    params = SamplingParams(n=n, max_new_tokens=max_new_tokens, seed=3, stop_token_ids=stop, **sampling)
    return [Request(request_id=i, prompt_ids=prompt, sampling=params) for i, prompt in enumerate(PROMPTS)]


def error_of(action: Callable[[], Any]) -> str:
    """Kind and text of what it raises."""
    try:
        action()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def samplings(case: Case) -> dict[str, list[Response]]:
    return {name: list(case.engine.generate(requests(**sampling))) for name, sampling in SAMPLINGS.items()}


def endings(case: Case) -> dict[str, Any]:
    engine = case.engine
    endless = list(engine.generate(requests(n=4, max_new_tokens=100, stop=())))
    short, long = (SamplingParams(n=1, max_new_tokens=count, seed=0, stop_token_ids=()) for count in (3, 100))
    pair = [Request(request_id=i, prompt_ids=[5, 6], sampling=s) for i, s in enumerate((long, short))]
    beside = list(engine.generate(pair))
    running = engine.generate([pair[0], Request(request_id=2, prompt_ids=[5, 6], sampling=short)])
    before_abort = next(running)
    engine.abort()
    aborted = list(running)
    dropped = engine.generate(pair)
    next(dropped)
    dropped.close()
    return {
        "endless": endless,
        "beside": beside,
        "before abort": before_abort,
        "aborted": aborted,
        "after a dropped iterator": list(engine.generate(requests())),
        "too long": error_of(lambda: engine.generate(requests(max_new_tokens=MAX_TOKENS))),
        "longest": list(engine.generate(requests(n=1, max_new_tokens=MAX_TOKENS - len(PROMPTS[1]), stop=()))),
    }


def update_in_the_middle(case: Case) -> list[Response]:
    """Version 2 has the weights of b."""
    engine = case.engine
    running = engine.generate(
        [
            Request(
                request_id=i,
                prompt_ids=prompt,
                sampling=SamplingParams(n=1, max_new_tokens=count, seed=i, stop_token_ids=()),
            )
            for i, (prompt, count) in enumerate(zip(PROMPTS, (1, 100, 100), strict=True))
        ]
    )
    responses = [next(running)]
    engine.pause()
    case.update("b", 2)
    engine.resume()
    return responses + list(running)


def refusals(case: Case) -> dict[str, str]:
    engine = case.engine
    good = case.buckets("a")
    damaged = case.buckets("a")[1]
    place_of_bit = damaged.entries[3].offset + 5
    damaged.data[place_of_bit] ^= 4
    found = {"damaged name": damaged.entries[3].name}
    engine.begin_weight_update(3)
    engine.receive_bucket(good[0])
    found["damaged"] = error_of(lambda: engine.receive_bucket(damaged))
    found["unknown"] = error_of(lambda: engine.receive_bucket(pack([("model.nothing.weight", torch.zeros(3))])))
    found["shape"] = error_of(lambda: engine.receive_bucket(pack([("model.norm.weight", torch.zeros(3))])))
    found["twice"] = error_of(lambda: engine.receive_bucket(good[0]))
    found["missing"] = error_of(engine.end_weight_update)
    found["generate"] = error_of(lambda: engine.generate(requests()))
    return found


def sleeping(case: Case) -> dict[str, Any]:
    engine = case.engine
    case.update("a", 4)
    for _ in range(4):  # at once after the last response, which SGLang is still putting away
        list(engine.generate(requests(n=1, max_new_tokens=2)))
        engine.sleep()
        engine.wake(["weights"])
        case.update("a", 4)
        engine.wake(["kv_cache"])
    engine.sleep()
    found = {"asleep": error_of(lambda: engine.generate(requests()))}
    engine.wake()
    found["no weights"] = error_of(lambda: engine.generate(requests()))
    case.update("a", 5)
    found["awake"] = list(engine.generate(requests()))
    return found


def deaths(case: Case) -> dict[str, Any]:
    engine = case.engine
    running = engine.generate(requests(n=4, max_new_tokens=100, stop=()))
    case.scheduler().kill()
    found: dict[str, Any] = {"rollout": error_of(lambda: list(running))}
    found["dead"], found["afterwards"] = engine.is_dead, error_of(lambda: engine.generate(requests()))
    engine.restart()
    first, second = case.buckets("a")[:2]
    engine.begin_weight_update(6)
    engine.receive_bucket(first)
    case.scheduler().kill()
    found["sync"] = error_of(lambda: engine.receive_bucket(second))
    keeper = EngineKeeper(engine, max_restarts=1)

    def give(awake: Any) -> Any:
        # As `sync_weights`, which tells all ranks of what one engine raised.
        try:
            case.update("a", 7)
        except EngineDied as error:
            raise WeightUpdateError(str(error)) from None

    keeper.sync(give)
    found["restarted"] = list(keeper.generate(requests()))
    return found


def main(folder: Path) -> None:
    platform.init_distributed(LIMIT_S)
    torch.set_num_threads(1)
    case = Case(folder)
    results: dict[str, Any] = {"no weights": error_of(lambda: case.engine.generate(requests()))}
    case.update("a", 1)
    for step in (samplings, endings, update_in_the_middle, refusals, sleeping, deaths):
        start = time.monotonic()
        results[step.__name__] = step(case)
        print(f"{step.__name__}: {time.monotonic() - start:.1f} s", flush=True)
    server = psutil.Process(case.engine.pid)
    results["pids"] = [server.pid, *(child.pid for child in server.children(recursive=True))]
    torch.save(results, folder / "results.pt")
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
