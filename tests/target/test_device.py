"""A device by its name, and the dtype it is fast in."""

from pathlib import Path

import pytest
import torch

from headrace.errors import TargetError
from headrace.target import device
from headrace.target.device import choose_device, fast_bfloat16, run_dtype

CPU = torch.device("cpu")


def test_auto_is_a_gpu_where_there_is_one() -> None:
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["gpu", "cpu:x", "cpu:0", "", "meta", "mps", "xla", "cuda:", "cuda:-1", "cuda:x"])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(TargetError, match=r"target\.device"):
        choose_device(name)


def test_a_gpu_beyond_those_there_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device.torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(TargetError, match="cuda:2, found 2 that PyTorch sees"):
        choose_device("cuda:2")


@pytest.mark.parametrize(
    ("able", "fast"), [({"avx2": True}, False), ({"avx512_bf16": True}, True), ({"amx_bf16": True}, True)]
)
def test_bfloat16_is_fast_only_with_instructions_for_it(
    able: dict[str, bool], fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device.torch.cpu, "get_capabilities", lambda: able)
    assert fast_bfloat16(CPU) is fast
    assert run_dtype("auto", CPU) == ("bfloat16" if fast else "float32")
    assert run_dtype("float16", CPU) == "float16"


def test_the_memory_of_a_container_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert device._cgroup_room(tmp_path) == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert device._cgroup_room(tmp_path) is None
    assert device._cgroup_room(tmp_path / "none") is None
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 10 kB\nMemAvailable:    4 kB\n")
    assert device._available(meminfo) == 4096
    assert (device.free_bytes(CPU) or 1) > 0
