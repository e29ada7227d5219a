"""Names of `torchvision.io`."""

from enum import Enum

from torchvision._absent import absent


class ImageReadMode(Enum):
    """How an image is decoded."""

    UNCHANGED = 0
    GRAY = 1
    GRAY_ALPHA = 2
    RGB = 3
    RGB_ALPHA = 4


decode_image = absent("torchvision.io.decode_image")
decode_jpeg = absent("torchvision.io.decode_jpeg")
encode_jpeg = absent("torchvision.io.encode_jpeg")
read_image = absent("torchvision.io.read_image")


class VideoReader:
    """Cannot be made."""

    __init__ = absent("torchvision.io.VideoReader")
