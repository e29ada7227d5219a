"""The layers a model is built from, behind one switch.

`te`: Megatron-Core's own Transformer Engine layers, where that is installed with a GPU. `torch`: plain torch, for a CPU
and for a GPU without Transformer Engine. Both give every parameter the same name, so weights, checkpoints and the
Hugging Face name map do not know which was used.
"""

from megarl.models.backends.switch import layer_backend, resolve_backend

__all__ = ["layer_backend", "resolve_backend"]
