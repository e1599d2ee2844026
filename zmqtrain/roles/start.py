"""The start of a process that is one task; it imports the task's modules only then."""

from __future__ import annotations

import gc
import sys

from zmqtrain.hints import host_error


def start(role: str | None) -> int:
    """Run the task of this process; return its exit code. ``role``: None if options name it."""
    gc.disable()  # all that is imported stays: looking for garbage in it takes an eighth of a start
    try:
        from zmqtrain.config.cluster import Role
        from zmqtrain.roles.launch import launch
    except (ImportError, OSError, MemoryError, RuntimeError) as error:
        limit = host_error(error)
        if limit is None:
            raise
        sys.stderr.write(f"error: {limit}\n")
        return limit.exit_code
    finally:
        gc.enable()
    return launch(None if role is None else Role(role))
