"""How much memory this process can still have, so that more is refused with a clear word instead of ending in the kernel's killer."""

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int | None:
    """Bytes that can still be had without swapping: what the machine has available, or less where the control group allows less.
    None where the system does not say."""
    found = [amount for amount in (_machine(), _control_group()) if amount is not None]
    return min(found, default=None)


def _machine() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _control_group() -> int | None:
    """What the control group (version 2) at the root of this process's view leaves; its page cache can be taken back, so it counts as free."""
    try:
        limit = int((_CGROUP / "memory.max").read_text())  # 'max' is no number: no limit
        used = int((_CGROUP / "memory.current").read_text())
        cache = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines()).get("inactive_file", "0")
    except (OSError, ValueError):
        return None
    return max(0, limit - used + int(cache))
