"""Drafters in vLLM itself: the answers it gives and how many blocks it verified.

usage: drafters_side.py INPUTS OUT; INPUTS holds target, prompts, limit, tokens drafted, and the folder of each drafter
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams

_COUNTED = "vllm:spec_decode_num_drafts"


def main(inputs: str, out: str) -> None:
    given = json.loads(Path(inputs).read_text())
    found = {}
    for name, folder in given["drafters"].items():
        engine = LLM(
            model=given["target"],
            dtype="float32",
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=4,
            enable_prefix_caching=False,
            disable_log_stats=False,
            speculative_config={"method": "dflash", "model": folder, "num_speculative_tokens": given["num_drafted"]},
        )
        prompts = [{"prompt_token_ids": ids} for ids in given["prompts"]]
        answers = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=given["limit"]))
        found[name] = {
            "ids": [list(answer.outputs[0].token_ids) for answer in answers],
            "num_drafts": sum(metric.value for metric in engine.get_metrics() if metric.name == _COUNTED),
        }
        del engine
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
