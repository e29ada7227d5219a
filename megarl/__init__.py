"""megarl: Megatron-native reinforcement learning of large language models.

This module imports nothing: `launch/train.py --help` and validation must answer before torch could be loaded.
"""

__version__ = "0.1.0"
