"""What the commands and their processes log on standard error: warnings and errors, or everything from INTERLOCK_LOGGING_LEVEL on."""

import logging
import os
from typing import Final

from interlock.core.errors import ConfigError

VARIABLE: Final = "INTERLOCK_LOGGING_LEVEL"
_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def set_up_logging() -> None:
    """Follow the environment. Raises ConfigError for a level that is none."""
    level = os.environ.get(VARIABLE, "")
    if not level:
        return
    if level.upper() not in _LEVELS:
        raise ConfigError(f"{VARIABLE} is {level!r}, expected one of {list(_LEVELS)}")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("interlock")
    logger.addHandler(handler)
    logger.setLevel(level.upper())
