import json
import shlex
import stat
import sys
from pathlib import Path

import pytest

from headrace.errors import TargetError
from headrace.target.vllm_command import (
    Installed,
    capture_arguments,
    check_version,
    command,
    drafter_arguments,
    find_vllm,
    shown,
    variables,
)
from tests.target.test_engine_file import engine_file


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.32.0rc1.dev3+g12"])
def test_a_version_in_range_passes(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0", "dev", "0.4.32"])
def test_another_version_is_named_with_the_range(version: str) -> None:
    with pytest.raises(TargetError, match=r"vLLM from 0\.32, before 0\.33"):
        check_version(version)


def test_the_command_captures_the_columns_of_engine_json(tmp_path: Path) -> None:
    arguments = capture_arguments(engine_file(), tmp_path / "engine.json", ["--max-model-len", "64"])
    assert arguments[:11] == [
        "/models/tiny", "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", "8100", "--dtype", "float32",
        "--generation-config", "vllm",
    ]  # fmt: skip
    speculative = json.loads(arguments[arguments.index("--speculative_config") + 1])
    assert speculative["method"] == "extract_hidden_states"
    assert speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    transfer = json.loads(arguments[arguments.index("--kv_transfer_config") + 1])
    assert transfer["kv_connector_module_path"] == "headrace.plugins.vllm_connector"
    assert transfer["kv_connector_extra_config"] == {"engine": str(tmp_path / "engine.json")}
    assert arguments[-2:] == ["--max-model-len", "64"]


def test_a_drafter_is_served_with_all_but_the_anchor_of_its_block() -> None:
    arguments = drafter_arguments("/m", "m", "http://127.0.0.1:1", "float32", Path("/d"), 3, [])
    speculative = json.loads(arguments[-1])
    assert speculative == {"method": "dflash", "model": "/d", "num_speculative_tokens": 3}
    assert "--speculative_config" not in drafter_arguments("/m", "m", "http://127.0.0.1:1", "float32", None, 3, [])


def test_the_script_beside_the_python_is_used_where_there_is_one(tmp_path: Path) -> None:
    found = Installed("0.32.0", str(tmp_path / "python"), tmp_path)
    assert command(found, ["m"]) == [str(tmp_path / "python"), "-m", "vllm.entrypoints.cli.main", "serve", "m"]
    (tmp_path / "vllm").write_text("")
    assert command(found, ["m"]) == [str(tmp_path / "vllm"), "serve", "m"]


def test_cpu_builds_get_all_cores_and_their_openmp_and_what_is_set_already_wins(tmp_path: Path) -> None:
    cpu = Installed("0.32.0+cpu", "python", tmp_path)
    assert "LD_PRELOAD" not in variables(cpu, {})
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").write_text("")
    added = variables(cpu, {"VLLM_CPU_KVCACHE_SPACE": "9"})
    assert added["LD_PRELOAD"].endswith("libiomp5.so")
    assert added["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "0"
    assert "VLLM_CPU_KVCACHE_SPACE" not in added
    assert not [name for name in variables(Installed("0.32.0", "python", tmp_path), {}) if "CPU" in name]


def test_a_shown_command_holds_no_secret_and_reads_back_otherwise() -> None:
    arguments = [
        "vllm",
        "serve",
        "/m",
        "--api-key",
        "s3cr3t",
        "s3cond",
        "--hf-token=s3cr3t",
        "--max-num-batched-tokens",
    ]
    told = shown([*arguments, "512", "--tokenizer", "/t"], {"A": "1 2"})
    assert "s3c" not in told
    assert shlex.split(told)[:3] == ["A=1 2", "vllm", "serve"]
    assert "--api-key '***' '***' '--hf-token=***' --max-num-batched-tokens 512 --tokenizer /t" in told


def test_a_python_without_vllm_or_no_python_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"engine\.python"):
        find_vllm(str(tmp_path / "none"))
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\necho broken >&2\n")
    silent.chmod(silent.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(TargetError, match="broken"):
        find_vllm(str(silent))
    silent.write_text("""#!/bin/sh\necho '{"vllm": "0.31.0", "headrace": "0.1.0", "prefix": "/p"}'\n""")
    with pytest.raises(TargetError, match=r"0\.31\.0"):
        find_vllm(str(silent))
    silent.write_text("""#!/bin/sh\necho '{"vllm": "0.32.0+cpu", "headrace": null, "prefix": "/p"}'\n""")
    with pytest.raises(TargetError, match="headrace in the environment"):
        find_vllm(str(silent))


def test_a_vllm_is_found_by_what_its_environment_says(tmp_path: Path) -> None:
    for name in ("vllm-0.32.0+cpu", "headrace-0.1.0"):
        folder = tmp_path / f"{name}.dist-info"
        folder.mkdir()
        version = name.partition("-")[2]
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.partition('-')[0]}\nVersion: {version}\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    found = find_vllm(str(python))
    assert (found.version, found.for_cpu, found.prefix) == ("0.32.0+cpu", True, Path(sys.prefix))
