"""The runtime: ``Runtime`` starts a team of agents with its engine; everything that touches MLX is below."""

from offbook.runtime.app import Runtime, RuntimeInUse, hours, minutes, seconds
from offbook.runtime.config import EngineConfig, InvalidConfig, parse_memory

__all__ = [
    "EngineConfig",
    "InvalidConfig",
    "Runtime",
    "RuntimeInUse",
    "hours",
    "minutes",
    "parse_memory",
    "seconds",
]
