"""Stand-in for `torchvision`, whose wheels load only with the torch build that they were made with.

SGLang imports names of it for models that see images. megarl trains language models, so the names are all there is.
"""

import torch

if torch.cuda.is_available():
    raise ImportError(
        "this torchvision is megarl's stand-in for machines without CUDA, and this machine has CUDA: "
        "install the real one with  pip install -e '.[sglang]'"
    )

from torchvision import io, transforms

__version__ = "0.0.0"
__all__ = ["io", "transforms"]
