"""Names of `torchvision.transforms`."""

from enum import Enum

from torchvision._absent import absent
from torchvision.transforms import functional


class InterpolationMode(Enum):
    """How an image is resized; transformers keeps a table of these at import."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


from torchvision.transforms import v2  # noqa: E402  (it takes InterpolationMode from here)

CenterCrop = absent("torchvision.transforms.CenterCrop")
Compose = absent("torchvision.transforms.Compose")
Lambda = absent("torchvision.transforms.Lambda")
Normalize = absent("torchvision.transforms.Normalize")
Resize = absent("torchvision.transforms.Resize")
ToTensor = absent("torchvision.transforms.ToTensor")

__all__ = ["InterpolationMode", "functional", "v2"]
