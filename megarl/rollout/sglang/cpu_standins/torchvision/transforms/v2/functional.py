"""Names of `torchvision.transforms.v2.functional`: any, none of which can be called."""

import functools

from torchvision._absent import absent_attribute

__getattr__ = functools.partial(absent_attribute, __name__)
