"""Chooses the layer backend while a model is built."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from megarl import platform


def resolve_backend(name: str) -> str:
    """`te` or `torch` for `model.backend` = `auto`, `te` or `torch`.

    Raises:
        ValueError: `te` where it cannot work, or a name that is none of the three.
    """
    here = platform.current()
    if name == "auto":
        return here.layer_backend
    if name not in ("te", "torch"):
        raise ValueError(f"model.backend is {name!r}; use auto, te or torch")
    if name == "te" and here.layer_backend != "te":
        missing = "a GPU" if here.is_cpu else "the package transformer-engine (pip install 'megarl[gpu]')"
        raise ValueError(f"model.backend is 'te', which needs {missing}; use auto or torch")
    return name


@contextlib.contextmanager
def layer_backend(name: str) -> Iterator[None]:
    """Within this context Megatron-Core's "Transformer Engine" layer specs give layers of backend `name`.

    mbridge always asks Megatron-Core for its Transformer Engine spec, which takes its classes from module globals;
    those are replaced for the time of the construction and put back, so two models of one process may differ.
    """
    if name == "te":
        yield
        return
    import megatron.core.models.gpt.gpt_layer_specs as gpt_specs
    import megatron.core.models.gpt.moe_module_specs as moe_specs
    import megatron.core.transformer.multi_latent_attention as mla

    from megarl.models.backends import layers, provider

    replacements: list[tuple[Any, str, Any]] = [
        (gpt_specs, "TESpecProvider", provider.TorchSpecProvider),
        (gpt_specs, "TENorm", layers.Norm),
        (moe_specs, "TESpecProvider", provider.TorchSpecProvider),
        # MLA picks constructor arguments by comparing classes with these two names.
        (mla, "TELinear", layers.DuplicatedLinear),
        (mla, "TEColumnParallelLinear", layers.ColumnParallelLinear),
    ]
    with contextlib.ExitStack() as stack:
        for module, attribute, value in replacements:
            if hasattr(module, attribute):
                stack.callback(setattr, module, attribute, getattr(module, attribute))
            else:  # not imported where Transformer Engine is absent
                stack.callback(delattr, module, attribute)
            setattr(module, attribute, value)
        yield
