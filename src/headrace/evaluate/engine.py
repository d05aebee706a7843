"""The serving check: an exported drafter in a real vLLM server, beside our own evaluation of the same files.

In: held-out prompts, a target, an exported drafter, vLLM's environment. Out: under `eval-vllm/`, what each pass gained
in the engine and here, and whether the engine's answers, drafted and plain, are the target's own. Prompt by prompt,
greedy, one line of JSON each as it is done, so that an interrupted check goes on. The rule of ties is identity.py's.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import urllib3

from headrace.config import RunFile, RunFolder
from headrace.drafter.acceptance import AcceptanceCount
from headrace.drafter.stock import WEIGHTS, load_stock
from headrace.errors import EvaluateError
from headrace.evaluate.decode import decode, decode_plain
from headrace.evaluate.identity import compare
from headrace.evaluate.propose import DrafterProposer
from headrace.evaluate.run import begun_stage, check_shape, heldout_rows, proposer_of
from headrace.evaluate.sampling import Sampling
from headrace.evaluate.verify import LiveVerifier
from headrace.files import append_json_line, read_json_lines, write_json
from headrace.prepare.prepared import PreparedSet
from headrace.progress import Progress
from headrace.record import digest
from headrace.target.engine_file import LOG_FILE
from headrace.target.head import load_head
from headrace.target.transformers_target import TransformersTarget
from headrace.target.vllm_command import LOOPBACK, command, drafter_arguments, find_vllm, variables
from headrace.target.vllm_process import START_S, EngineProcess

FOLDER = "eval-vllm"
_METRIC = re.compile(r"^vllm:spec_decode_num_(drafts|accepted_tokens)_total\{[^}]*\} (\S+)$", re.MULTILINE)
Line = dict[str, Any]


@dataclass
class Served:
    """A running server, and how to ask it for one greedy answer."""

    url: str
    model: str
    max_new_tokens: int
    stop_ids: Sequence[int]

    def answer(self, prompt: Sequence[int]) -> Line:
        """Returns: `ids` of the answer and `gained`, the tokens of each pass after the prefill, as they were streamed.

        Raises: EvaluateError for a status other than 200 and for another prompt than was sent.
        """
        body = {
            "model": self.model, "prompt": list(prompt), "max_tokens": self.max_new_tokens, "temperature": 0,
            "stop_token_ids": list(self.stop_ids), "stream": True, "return_token_ids": True,
        }  # fmt: skip
        sent = urllib3.request(
            "POST", f"{self.url}/v1/completions", json=body, preload_content=False, retries=False, timeout=600
        )
        if sent.status != 200:
            raise EvaluateError("an answer of the server", f"status {sent.status}: {sent.data[:300]!r}", "see its log")
        passes: list[list[int]] = []
        for event in _events(sent.stream(decode_content=True)):
            choice = event["choices"][0] if event.get("choices") else {}
            if choice.get("prompt_token_ids") and list(choice["prompt_token_ids"]) != list(prompt):
                raise EvaluateError(
                    "the answer to the prompt that was sent", "another prompt's", "see the server's log"
                )
            if choice.get("token_ids"):
                passes.append(list(choice["token_ids"]))
        return {"ids": [token for one in passes for token in one], "gained": [len(one) for one in passes[1:]]}

    def counters(self) -> dict[str, int]:
        """`drafts` and `accepted_tokens` since the server started, as its /metrics say."""
        text = urllib3.request("GET", f"{self.url}/metrics", timeout=30).data.decode()
        return {name: int(float(value)) for name, value in _METRIC.findall(text)}


def evaluate_in_engine(
    cfg: RunFile, folder: RunFolder, target: TransformersTarget, progress: Progress, exported: Path | None = None
) -> dict[str, Any]:
    """Serve the run's exported drafter, or `exported`, in vLLM, and compare.

    Returns: the figures of `eval-vllm/results.json` (docs/engines.md).
    Raises: EvaluateError for sampled evaluation and without held-out prompts; DrafterError for a folder that is no
    drafter; TargetError for no vLLM of a known version, or a server that dies.
    """
    if cfg.evaluate.temperature != 0:
        raise EvaluateError("greedy answers", f"evaluate.temperature {cfg.evaluate.temperature}", "set it to 0")
    drafter = exported or folder.export
    proposer = _proposer(drafter, target)
    vllm = find_vllm(cfg.engine.python)
    prepared, where = PreparedSet.open(folder.prepared), folder.root / FOLDER
    prompts = {
        row: prepared.sample(row).input_ids[: int(prepared.prompt_tokens[row])].tolist()
        for row in heldout_rows(prepared, cfg.evaluate.num_prompts)
    }
    identity = {
        "evaluate": cfg.evaluate.model_dump(mode="json"),
        "prepared": prepared.fingerprint,
        "target": asdict(target.spec)["weights_hash"],
        "drafter": digest((drafter / WEIGHTS).read_bytes()).hex(),
        "vllm": vllm.version,
        "flags": cfg.engine.flags,
    }
    stage = begun_stage(where, identity, progress, ("own.jsonl", "drafted.jsonl", "plain.jsonl"))
    own = _lines(where / "own.jsonl", prompts, progress, lambda ids: _own(cfg, target, proposer, ids))
    counted: dict[str, int] | None = None
    engine: dict[str, dict[int, Line]] = {}
    for name, served_drafter in (("drafted", drafter), ("plain", None)):
        path = where / f"{name}.jsonl"
        if {line["row"] for line in read_json_lines(path)} >= set(prompts):
            engine[name] = _lines(path, prompts, progress, _nothing)
            continue
        with _server(cfg, where / name, target, served_drafter, proposer.block_size, progress) as served:
            whole = not path.exists()  # a server counts what it was asked itself
            engine[name] = _lines(path, prompts, progress, served.answer)
            counted = served.counters() if whole and served_drafter is not None else counted
    results = summarise(own, engine["drafted"], engine["plain"], cfg.evaluate.tie_gap)
    results |= {"engine_version": vllm.version, "counters": counted}
    write_json(where / "results.json", results)
    stage.finish(results)
    _tell(results, progress)
    return results


def summarise(
    own: Mapping[int, Line], drafted: Mapping[int, Line], plain: Mapping[int, Line], tie_gap: float
) -> dict[str, Any]:
    """Compare prompt by prompt.

    Counts are compared where the answers are the same to the end: after a tie they are those of another answer.
    """
    here, there = AcceptanceCount(), AcceptanceCount()
    rows: list[Line] = []
    for row, line in own.items():
        here.add(line["gained"], line["offered"])
        there.add(drafted[row]["gained"], [0] * len(drafted[row]["gained"]))
        answers = {
            name: asdict(compare(line["plain"], found["ids"], line["gaps"], tie_gap))
            for name, found in (("drafted", drafted[row]), ("plain", plain[row]))
        }
        same = line["ids"] == drafted[row]["ids"]
        counts = ("same" if line["gained"] == drafted[row]["gained"] else "differs") if same else "not compared"
        rows.append({"row": row, "counts": counts, **answers})
    verdicts = {name: [one[name]["verdict"] for one in rows] for name in ("drafted", "plain")}
    return {
        "num_prompts": len(rows),
        "tau": here.tau,
        "tau_engine": there.tau,
        "num_same_counts": sum(one["counts"] == "same" for one in rows),
        "num_other_counts": sum(one["counts"] == "differs" for one in rows),
        "passes": sum(len(line["gained"]) for line in own.values()),
        "passes_engine": sum(len(line["gained"]) for line in drafted.values()),
        "answers_identical": "differs" not in verdicts["drafted"],
        "plain_identical": "differs" not in verdicts["plain"],
        "num_ties": verdicts["drafted"].count("tie"),
        "num_same_as_plain": sum(drafted[row]["ids"] == plain[row]["ids"] for row in own),
        "prompts": rows,
    }


def _proposer(folder: Path, target: TransformersTarget) -> DrafterProposer:
    drafter, model = load_stock(folder), target.model
    check_shape(drafter.shape, target)
    return proposer_of(drafter, target, load_head(target.folder, model.config).to(model.device, model.dtype))


def _own(cfg: RunFile, target: TransformersTarget, proposer: DrafterProposer, ids: list[int]) -> Line:
    """The same prompt here: plainly, with the gaps that ties are judged by, and with the drafter."""
    limit, stops, greedy = cfg.evaluate.max_new_tokens, target.stop_ids, Sampling()
    with LiveVerifier(target, ()) as live:
        plain = decode_plain(live, ids, limit, stops, greedy)
    with LiveVerifier(target, proposer.taps) as live:
        own = decode(live, proposer, ids, limit, stops, greedy)
    return {"plain": plain.ids, "gaps": plain.gaps, "ids": own.ids, "gained": own.gained, "offered": own.offered}


@contextmanager
def _server(
    cfg: RunFile, where: Path, target: TransformersTarget, drafter: Path | None, block_size: int, progress: Progress
) -> Iterator[Served]:
    vllm, url = find_vllm(cfg.engine.python), f"http://{LOOPBACK}:{cfg.engine.port}"
    folder = None if drafter is None else drafter.resolve()
    arguments = drafter_arguments(
        str(target.folder.resolve()), "target", url, target.spec.dtype, folder, block_size - 1, cfg.engine.flags
    )
    with EngineProcess(command(vllm, arguments), variables(vllm, os.environ), where / LOG_FILE, url) as server:
        progress.start("engine starts", None, "s")
        seconds = server.wait_healthy(START_S, lambda passed: progress.advance(int(passed)))
        progress.end()
        progress.note(f"eval: vLLM {'with the drafter' if drafter else 'alone'} healthy after {seconds:.0f} s")
        yield Served(url, "target", cfg.evaluate.max_new_tokens, sorted(target.stop_ids))
        server.check()


def _lines(
    path: Path, prompts: Mapping[int, list[int]], progress: Progress, make: Callable[[list[int]], Line]
) -> dict[int, Line]:
    """A line for each prompt; those that the file holds are kept."""
    done = {line["row"]: line for line in read_json_lines(path)}
    progress.start(f"eval {path.stem}", len(prompts), "prompts", len(done))
    for row, ids in prompts.items():
        if row not in done:
            done[row] = {"row": row, **make(ids)}
            append_json_line(path, done[row])
        progress.advance(len(done))
    progress.end()
    return {row: done[row] for row in prompts}


def _nothing(_ids: list[int]) -> Line:
    raise AssertionError("every prompt is done")


def _events(chunks: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """JSON of each server-sent event but the last, which says [DONE]."""
    held = b""
    for chunk in chunks:
        *lines, held = (held + chunk).split(b"\n")
        for line in lines:
            content = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and content != b"[DONE]":
                yield json.loads(content)


def _tell(results: Mapping[str, Any], progress: Progress) -> None:
    progress.note(
        f"eval: in vLLM τ {results['tau_engine']:.3f}, here {results['tau']:.3f}; the same counts for "
        f"{results['num_same_counts']} of {results['num_prompts']} prompts, others for {results['num_other_counts']}"
    )
    for name, key in (("drafted", "answers_identical"), ("plain", "plain_identical")):
        same = "identical to the target's" if results[key] else "NOT the target's"
        ties = sum(one[name]["verdict"] == "tie" for one in results["prompts"])
        progress.note(f"eval: {name} answers of vLLM {same}, {ties} ties")
