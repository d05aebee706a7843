"""Questions, code and chat prompts for the codec experiment, from public files.

In: a folder with `gsm8k/train.jsonl`, `math500.jsonl`, `humaneval/HumanEval.jsonl`, `mt_bench/question.jsonl` and
`self_instruct/{seed_tasks,user_oriented_instructions}.jsonl`, as their authors publish them. Out: `prompts.jsonl`, one
user turn a row with its `source` (math, code, chat). The target writes the answers.

usage: make_prompts.py PUBLIC_FOLDER OUT_FOLDER
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NUM_GSM8K, NUM_MATH = 650, 300
CODE = (
    "Complete this Python function.\n\n{}",
    "Explain step by step, in words, how you would write this function.\n\n{}",
    "Write five assert statements that test this function, and say what each one checks.\n\n{}",
)


def rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def prompts(public: Path) -> Iterator[tuple[str, str]]:
    """Source and text of every prompt."""
    yield from (("math", row["question"]) for row in rows(public / "gsm8k" / "train.jsonl")[:NUM_GSM8K])
    yield from (("math", row["turns"][0]) for row in rows(public / "math500.jsonl")[:NUM_MATH])
    for row in rows(public / "humaneval" / "HumanEval.jsonl"):
        yield from (("code", asked.format(row["prompt"])) for asked in CODE)
    yield from (("chat", row["turns"][0]) for row in rows(public / "mt_bench" / "question.jsonl"))
    for name in ("seed_tasks", "user_oriented_instructions"):
        for row in rows(public / "self_instruct" / f"{name}.jsonl"):
            given = row["instances"][0]["input"]
            yield "chat", f"{row['instruction']}\n\n{given}" if given else row["instruction"]


def main(public: Path, out: Path) -> None:
    """Write the file."""
    out.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"messages": [{"role": "user", "content": text}], "source": source}, ensure_ascii=False)
        for source, text in prompts(public)
    ]
    (out / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines):,} prompts in {out / 'prompts.jsonl'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
