"""The `vllm serve` commands that headrace starts: an engine that captures, and one that serves a drafter.

In: what an engine is to serve, and the python of vLLM's environment. Out: arguments, environment variables, and the
command as a person may read it, secrets left out. Nothing is started here. Raises only TargetError.
"""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import TargetError
from headrace.target.engine_file import EngineFile

PARAMS = "headrace"  # our part of a request's and an answer's kv_transfer_params
CONNECTOR = "HeadraceConnector"
CONNECTOR_MODULE = "headrace.plugins.vllm_connector"
LOOPBACK = "127.0.0.1"
OLDEST, NEWER = (0, 32), (0, 33)  # vLLM versions from, and before
_SECRET = re.compile(r"key|token|secret|password|passphrase", re.IGNORECASE)
_NO_SECRET = ("--max-num-batched-tokens", "--num-speculative-tokens", "--tokenizer", "--tokenizer-mode")
_ASK = (
    "import importlib.metadata as m, json, sys\n"
    "found = {}\n"
    "for name in ('vllm', 'headrace'):\n"
    "    try:\n"
    "        found[name] = m.version(name)\n"
    "    except m.PackageNotFoundError:\n"
    "        found[name] = None\n"
    "print(json.dumps({**found, 'prefix': sys.prefix}))\n"
)


def check_version(version: str) -> None:
    """Raise TargetError for a vLLM outside the range that the connector was made for."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or not OLDEST <= (int(numbers[1]), int(numbers[2])) < NEWER:
        low, high = (".".join(map(str, bound)) for bound in (OLDEST, NEWER))
        raise TargetError(f"vLLM from {low}, before {high}", version, "install one of them (docs/engines.md)")


@dataclass(frozen=True)
class Installed:
    """A vLLM that was found: its version, the python it runs in, and the prefix of that environment."""

    version: str
    python: str
    prefix: Path

    @property
    def for_cpu(self) -> bool:
        """Whether it is a build for CPUs, as its version says."""
        return "cpu" in self.version


def find_vllm(python: str | None) -> Installed:
    """Ask a python for its vLLM and its headrace, without importing them; None means the one that runs this.

    Raises: TargetError for a python that does not run, one without either, and a vLLM out of range.
    """
    python = python or sys.executable
    try:
        done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise TargetError(f"a python at engine.python, {python}", str(exc), "check engine.python") from exc
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError as exc:
        raise TargetError(f"a python at engine.python, {python}", done.stderr[-400:], "check engine.python") from exc
    for name in ("vllm", "headrace"):
        if found[name] is None:
            hint = "docs/engines.md says how to install both; set engine.python to that environment's python"
            raise TargetError(f"{name} in the environment of {python}", "none", hint)
    check_version(found["vllm"])
    return Installed(found["vllm"], python, Path(found["prefix"]))


def capture_arguments(engine: EngineFile, path: Path, flags: Sequence[str]) -> list[str]:
    """Arguments of `vllm serve` for an engine that captures.

    Args:
        path: where `engine.json` lies, which the connector reads.
        flags: passed on as they are, last, so that they win.
    """
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": engine.layer_ids}},
    }
    transfer = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"engine": str(path.resolve())},
    }
    own = ["--speculative_config", json.dumps(speculative), "--kv_transfer_config", json.dumps(transfer)]
    return [*_common(engine.model_folder, engine.model, engine.url, engine.dtype), *own, *flags]


def drafter_arguments(
    folder: str, name: str, url: str, dtype: str, drafter: Path | None, num_drafted: int, flags: Sequence[str]
) -> list[str]:
    """Arguments of `vllm serve` for a target with a DFlash drafter, or with none."""
    speculative = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": num_drafted}
    own = [] if drafter is None else ["--speculative_config", json.dumps(speculative)]
    return [*_common(folder, name, url, dtype), *own, *flags]


def command(vllm: Installed, arguments: Sequence[str]) -> list[str]:
    """The whole command: the environment's `vllm`, or its python where there is no such script."""
    script = Path(vllm.python).with_name("vllm")
    start = [str(script)] if script.is_file() else [vllm.python, "-m", "vllm.entrypoints.cli.main"]
    return [*start, "serve", *arguments]


def variables(vllm: Installed, present: Mapping[str, str]) -> dict[str, str]:
    """Environment variables to add to those `present`, which win.

    Loopback between the engine's own processes, no usage reports, no look-up of a model that lies here; on CPUs all
    cores, a cache of 2 GiB, and Intel's OpenMP where the environment has it, without which speculation is slow there.
    """
    wanted = {"VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": LOOPBACK, "HF_HUB_OFFLINE": "1"}
    if vllm.for_cpu:
        wanted |= {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_CPU_KVCACHE_SPACE": "2"}
        openmp = vllm.prefix / "lib" / "libiomp5.so"
        if openmp.is_file():
            wanted["LD_PRELOAD"] = str(openmp)
    return {name: value for name, value in wanted.items() if name not in present}


def shown(arguments: Sequence[str], added: Mapping[str, str]) -> str:
    """A command with its added variables for a shell, values of flags that hold secrets replaced by ***."""
    words: list[str] = []
    hide = False
    for word in arguments:
        name, equals, _ = word.partition("=")
        secret = word.startswith("--") and bool(_SECRET.search(name)) and name.replace("_", "-") not in _NO_SECRET
        words.append("***" if hide and not word.startswith("--") else f"{name}=***" if secret and equals else word)
        hide = (secret and not equals) or (hide and not word.startswith("--"))
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in added.items()), shlex.join(words)])


def _common(folder: str, name: str, url: str, dtype: str) -> list[str]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    # A request says all about its sampling; a model's generation_config would add penalties and cuts to it.
    own = ["--generation-config", "vllm"]
    return [folder, "--served-model-name", name, "--host", host, "--port", port, "--dtype", dtype, *own]
