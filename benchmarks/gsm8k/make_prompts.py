"""Turn GSM8K's files into chats that headrace reads.

In: GSM8K's train.jsonl and test.jsonl (rows with `question`; MIT licence), published as
https://github.com/openai/grade-school-math. Out: two JSONL files with one user turn a row: `train.jsonl` (all
questions, in file order) and `test.jsonl` (100 of them, evenly spaced), for evaluation alone.

usage: make_prompts.py GSM8K_FOLDER OUT_FOLDER
"""

import json
import sys
from pathlib import Path

NUM_TEST = 100


def main(gsm8k: Path, out: Path) -> None:
    """Write both files."""
    out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        questions = [json.loads(line)["question"] for line in (gsm8k / f"{split}.jsonl").read_text().splitlines()]
        if split == "test":
            questions = questions[:: len(questions) // NUM_TEST][:NUM_TEST]
        rows = [json.dumps({"messages": [{"role": "user", "content": question}]}) for question in questions]
        (out / f"{split}.jsonl").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
