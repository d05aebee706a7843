"""Where a model runs, and in which dtype it runs fast there.

In: a device's name from a run file. Out: the device, its free memory, and whether its bfloat16 products are faster than
float32's; on processors without such instructions they are several times slower (docs/log.md, 2026-11-30).
"""

from pathlib import Path

import torch

from headrace.config import DEVICE
from headrace.errors import TargetError

# Keys of torch.cpu.get_capabilities, of x86 and Arm processors.
_BFLOAT16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises: TargetError for another name, or a device that does not exist."""
    if not DEVICE.fullmatch(name):
        raise TargetError("auto, cpu, cuda or cuda:N", repr(name), "check target.device")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(name.partition(":")[2] or 0) >= count:
        raise TargetError(
            f"a GPU for target.device {name}", f"{count} that PyTorch sees", "use target.device auto or cpu"
        )
    return torch.device(name)


def run_dtype(named: str, device: torch.device) -> str:
    """The dtype that a target runs in: the one that is named, or what `auto` means on a device."""
    if named != "auto":
        return named
    return "bfloat16" if fast_bfloat16(device) else "float32"


def fast_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 matrices in hardware."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        able = torch.cpu.get_capabilities()
        return any(able.get(name, False) for name in _BFLOAT16_INSTRUCTIONS)
    return False


def free_bytes(device: torch.device) -> float | None:
    """What is free on a device; None where nobody says."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    limits = [
        own for own in (_available(Path("/proc/meminfo")), _cgroup_room(Path("/sys/fs/cgroup"))) if own is not None
    ]
    return min(limits, default=None)


def _available(meminfo: Path) -> float | None:
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if found is None else float(found) * 1024


def _cgroup_room(root: Path) -> float | None:
    """What a container may still take; None without a limit."""
    try:
        limit, used = ((root / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    return None if limit == "max" else float(limit) - float(used)
