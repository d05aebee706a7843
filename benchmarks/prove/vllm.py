"""`make prove-vllm`: real vLLM on the CPU: a run through two servers, the probe, throughput, the demo's drafter.

In: a folder, the python of vLLM's environment, GSM8K's folder, the demo's run folder, and `small` or `full`. Out:
claims. Each of the four parts keeps its rows in the folder, so that a stopped proof goes on with the next part.

usage: vllm.py FOLDER PYTHON GSM8K_FOLDER DEMO_RUN [full]
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import urllib3
import yaml
from claims import Claims

from headrace.capture.engine_launch import Engine, Wish, prepared_engine
from headrace.config import RunFile, RunFolder
from headrace.errors import TargetError
from headrace.files import read_json_lines, write_json
from headrace.prepare.prepared import PreparedSet
from headrace.progress import Silent
from headrace.store.manifest import FILE_NAME
from headrace.store.reader import StoreReader
from headrace.target.vllm_command import capture_arguments, command, find_vllm
from headrace.target.vllm_process import START_S, EngineProcess, is_healthy

PROJECT = Path(__file__).parents[2]
HEADRACE = str(Path(sys.executable).with_name("headrace"))
PORT, START_POLL_S = 8410, 0.5
FLAGS = ["--enforce-eager", "--max-model-len", "2048", "--max-num-batched-tokens", "512", "--max-num-seqs", "16"]
IN_FLIGHT = 8
NAMES = ("0", "1")  # two engines, each on the core of its number
Row = tuple[str, str, str, bool]


@dataclass(frozen=True)
class Size:
    """How much is done: questions, tokens of an answer, training steps; prompts a turn, rounds; prompts, tokens."""

    questions: int
    answer_tokens: int
    steps: int
    throughput: tuple[str, str]
    served: tuple[int, int]


SIZES = {
    "small": Size(40, 16, 10, ("8", "1"), (3, 16)),
    "full": Size(520, 16, 60, ("12", "5"), (8, 24)),
}


@dataclass(frozen=True)
class Given:
    """What the proof is given."""

    out: Path
    python: str
    gsm8k: Path
    demo: Path
    size: Size

    def run_file(self, name: str, **sections: Any) -> Path:
        """A run file beside its run's folder, in float32, whose engine is vLLM."""
        path = self.out / f"{name}.yaml"
        engine = {"python": self.python, "port": PORT, "flags": FLAGS, **sections.pop("engine", {})}
        own = {"run": str(self.out / name), "target": {"dtype": "float32", "engine": "vllm"}, "engine": engine}
        path.write_text(yaml.safe_dump({**own, **sections}))
        return path


def headrace(*words: str, ok: bool = True) -> "subprocess.CompletedProcess[str]":
    """One headrace command; what it says goes on to stderr."""
    done = subprocess.run([HEADRACE, *words], capture_output=True, text=True, check=False)
    sys.stderr.write(done.stderr)
    if ok and done.returncode:
        sys.exit(f"headrace {' '.join(words)} ended with {done.returncode}")
    return done


class Launched:
    """`headrace engine --launch` of one engine on one core; killed and started again."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name, self.log = path, name, path.with_name(f"engine-{name}.log")
        self.port = PORT + int(name)
        self.start()

    def start(self) -> None:
        """Start it; does not wait."""
        words = [HEADRACE, "engine", str(self.path), "--launch", "--name", self.name, "--port", str(self.port)]
        core = ["taskset", "-c", str(int(self.name) % (os.cpu_count() or 1))]
        with open(self.log, "w") as out:
            one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.child = subprocess.Popen([*core, *words], env=one_thread, stdout=out, stderr=out)

    def wait_healthy(self) -> None:
        """Wait for the server. Ends the proof when its command ends first."""
        while not is_healthy(f"http://127.0.0.1:{self.port}"):
            if self.child.poll() is not None:
                sys.exit(f"engine {self.name} ended: {self.log.read_text()[-2000:]}")
            time.sleep(START_POLL_S)

    def answered(self) -> int:
        """Requests that it has answered since it was started."""
        text = urllib3.request("GET", f"http://127.0.0.1:{self.port}/metrics", timeout=30).data.decode()
        return sum(int(float(number)) for number in re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", text, re.M))

    def kill(self) -> None:
        """Kill -9 the server and its workers; its command then ends by itself."""
        server = int(re.findall(r"process (\d+)", self.log.read_text())[-1])
        os.killpg(server, signal.SIGKILL)
        self.child.wait(60)

    def stop(self) -> None:
        """End it as Ctrl-C does."""
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
            self.child.wait(60)


@contextmanager
def two_engines(path: Path) -> Iterator[list[Launched]]:
    """Both, healthy."""
    engines = [Launched(path, name) for name in NAMES]
    try:
        for one in engines:
            one.wait_healthy()
        yield engines
    finally:
        for one in engines:
            one.stop()


def real_run(given: Given) -> list[Row]:
    """Questions answered and captured through two servers, one killed on the way; then trained and evaluated."""
    size, folder = given.size, RunFolder(given.out / "run")
    path = given.run_file(
        "run",
        engine={"set_aside_s": 5, "in_flight": IN_FLIGHT},
        prepare={"data": [_chats(given)], "max_samples": size.questions, "heldout_fraction": 0.05, "max_tokens": 512},
        regenerate={"max_new_tokens": size.answer_tokens, "batch_size": 64},
        capture={"codec": "latent:280x4", "fit_tokens": 8000, "probe_over": 10**9},
        drafter={"num_layers": 1, "block_size": 4},
        train={
            "max_steps": size.steps, "step_tokens": 1024, "micro_tokens": 1024, "anchors": 16, "group_blocks": 256,
            "sampled_vocabulary": 8192, "optimizer": "muon", "lr": 5e-3, "eval_every": size.steps, "eval_samples": 8,
        },
        evaluate={"num_prompts": 6, "max_new_tokens": 24},
        floor=False,
    )  # fmt: skip
    headrace("prepare", str(path))
    began = time.monotonic()
    with two_engines(path) as engines:
        headrace("regenerate", str(path))
        killed = _captured(path, folder, engines[1], size.questions)
        minutes = (time.monotonic() - began) / 60
        for one in engines:  # the one that was killed may be on its way
            one.wait_healthy()
        found = json.loads(headrace("probe", str(path), "--json", ok=False).stdout)
        write_json(given.out / "probe-vllm.json", found)
    headrace("train", str(path))
    results = json.loads(headrace("eval", str(path), "--json").stdout)
    return [*_store_rows(folder, size, killed, minutes), _evaluated(results)]


def _chats(given: Given) -> str:
    out = given.out / "chats"
    script = PROJECT / "benchmarks" / "gsm8k" / "make_prompts.py"
    subprocess.run([sys.executable, str(script), str(given.gsm8k), str(out)], check=True)
    return str(out / "train.jsonl")


def _captured(path: Path, folder: RunFolder, victim: Launched, questions: int) -> int:
    """Capture; kill one server when it has answered its part of a quarter, and start it again.

    Returns: what the server had answered of this capture when it was killed; 0: it was not.
    """
    child = subprocess.Popen([HEADRACE, "capture", str(path)])
    before, then = -1, 0
    while child.poll() is None:
        if before < 0 and (folder.states / FILE_NAME).is_file():  # what a latent is fitted on was asked before
            before = victim.answered()
        if before >= 0 and not then and (done := victim.answered() - before) > questions // 8:
            then = done
            victim.kill()
            victim.start()
        time.sleep(START_POLL_S)
    if child.returncode:
        sys.exit(f"headrace capture ended with {child.returncode}")
    return then


def _store_rows(folder: RunFolder, size: Size, killed: int, minutes: float) -> list[Row]:
    prepared, reader = PreparedSet.open(folder.prepared), StoreReader(folder.states)
    rows = reader.rows.tolist()
    sound = sum(len(reader.read(row, prepared.sample(row).id).input_ids) for row in rows)
    failures = len(reader.failures)
    engines = read_json_lines(folder.states / "capture_metrics.jsonl")[-1]["engines"]
    ended = {name: one["num_requests"] for name, one in engines.items()}
    again = sum(one["num_failures"] + one["num_retries"] for one in engines.values())
    reader.close()
    verified = headrace("store", "verify", str(folder.states), ok=False)
    tokens = int(prepared.lengths.sum())
    whole = sorted(rows) == list(range(prepared.num_samples)) and sound == tokens
    told = f"{len(rows)} of {prepared.num_samples} rows, {sound:,} of {tokens:,} tokens; {verified.stderr.strip()}"
    restarted = ended["1"] - killed > IN_FLIGHT  # some may have been answered while it was killed
    enough = prepared.num_samples >= (500 if size.questions >= 500 else 1)
    return [
        (
            f"{size.questions} questions of GSM8K answered and captured by two vLLM servers of one core each",
            "500 or more; every row once, every digest right",
            f"{told}; {minutes:.1f} min",
            whole and enough and verified.returncode == 0 and failures == 0,
        ),
        (
            "one killed -9 in the middle of the capture and started again",
            "killed while both work; it answers again (full)",
            f"killed after {killed} answers; {again} failed or tried again; {ended['0']} and {ended['1']} in the end",
            killed > 0 and (restarted or size.questions < 500),
        ),
    ]


def _evaluated(results: dict[str, Any]) -> Row:
    told = f"τ {results['tau']:.3f}, greedy identity {str(results['greedy_identical']).lower()}"
    holds = results["tau"] > 1 and results["greedy_identical"]
    return "the drafter trained on it for a few steps, evaluated", "τ above 1, greedy identity", told, holds


def probes(given: Given) -> list[Row]:
    """What passes, what fails, and which cause is named."""
    found = json.loads((given.out / "probe-vllm.json").read_text())
    rows = [_passing("the two real vLLM servers, one of them started again", found)]
    done = headrace("probe", str(given.out / "run.yaml"), "--set", "target.engine=transformers", "--json", ok=False)
    rows.append(_passing("the target in transformers", json.loads(done.stdout)))
    tests = ["tests/capture/test_probe_run.py", "tests/capture/test_hypotheses.py"]
    pytest = [sys.executable, "-m", "pytest", "-q", *tests]
    ended = subprocess.run(pytest, cwd=PROJECT, stdout=subprocess.PIPE, text=True, check=False)
    last = ended.stdout.strip().splitlines()[-1]
    claim = "the probe fails, with its cause, for each fault of the fake engine"
    rows.append((claim, "its tests pass", last, ended.returncode == 0))
    return [*rows, *_shifted(given)]


def _passing(subject: str, found: list[dict[str, Any]]) -> Row:
    wrong = [one["cause"] for one in found if not one["ok"]]
    ratios = [one["figures"]["ratio"] for one in found if "ratio" in one["figures"]]
    parts = sorted({one["part"] for one in found})
    told = f"{len(found)} findings in {', '.join(parts)}, {len(wrong)} failed; the least ratio {min(ratios):,.0f}"
    return f"the probe passes on {subject}", "none failed; ratios above 3", told, not wrong and min(ratios) > 3


def _shifted(given: Given) -> list[Row]:
    """A real server whose layer ids are one off: as its own engine.json says too, and against it."""
    path = given.run_file("shifted", engine={"port": PORT + 2}, capture={"codec": "raw"})
    cfg, folder = RunFile.model_validate(yaml.safe_load(path.read_text())), RunFolder(given.out / "shifted")
    with contextlib.suppress(FileExistsError):
        folder.root.mkdir()
        folder.prepared.symlink_to(given.out.resolve() / "run" / "prepared")
    with prepared_engine(cfg, folder, Wish(), Silent()) as engine:
        off = dataclasses.replace(engine.file, layer_ids=[number - 1 for number in engine.file.layer_ids])
        refused = _refused(given, engine, off.layer_ids)
        off.write(engine.path.parent)
        with _served(given, engine, off.layer_ids) as server:
            server.wait_healthy(START_S)
            done = headrace("probe", str(path), "--json", ok=False)
    causes = {one["cause"] for one in json.loads(done.stdout) if not one["ok"]}
    named = sorted(cause for cause in causes if "one block early" in cause)
    every = all(any(cause.startswith(f"{tap} holds ") for cause in named) for tap in engine.file.taps)
    told = f"exit {done.returncode}; {'; '.join(named) or causes}"
    claim = "the probe on a real server launched with ids one too low"
    return [
        (claim, "it fails and names the block of each column", told, done.returncode == 6 and every),
        (
            "a real server launched with other ids than its engine.json",
            "it does not start",
            refused,
            "layers" in refused,
        ),
    ]


@contextmanager
def _served(given: Given, engine: Engine, layer_ids: list[int]) -> Iterator[EngineProcess]:
    """The engine's server with other layer ids in its command."""
    launched = dataclasses.replace(engine.file, layer_ids=layer_ids)
    words = command(find_vllm(given.python), capture_arguments(launched, engine.path, FLAGS))
    with EngineProcess(words, engine.added, engine.path.with_name("log"), launched.url) as server:
        yield server


def _refused(given: Given, engine: Engine, layer_ids: list[int]) -> str:
    try:
        with _served(given, engine, layer_ids) as server:
            server.wait_healthy(START_S)
    except TargetError:
        text = engine.path.with_name("log").read_text()
        found = re.findall(r"TargetError: (expected layers .*)", text)
        return found[0] if found else text[-300:]
    return "it started"


def throughput(given: Given) -> list[Row]:
    """Five ways of taking states, and none."""
    script = PROJECT / "benchmarks" / "vllm" / "throughput.py"
    words = [str(given.out / "throughput"), given.python, str((given.demo / "codec").resolve())]
    done = subprocess.run(
        [sys.executable, str(script), *words, *given.size.throughput], stdout=subprocess.PIPE, text=True, check=True
    )
    return [(claim, needed, measured, holds) for claim, needed, measured, holds in json.loads(done.stdout)]


def serving(given: Given) -> list[Row]:
    """The demo's drafter in a real server."""
    num_prompts, tokens = given.size.served
    path = given.run_file(
        "serving", engine={"port": PORT + 3}, evaluate={"num_prompts": num_prompts, "max_new_tokens": tokens}
    )
    for name in ("prepared", "drafter"):
        shutil.copytree(given.demo / name, given.out / "serving" / name, dirs_exist_ok=True)
    found = json.loads(headrace("eval", str(path), "--engine", "vllm", "--json").stdout)
    compared = num_prompts - found["num_ties"]
    counts = (
        f"{found['num_same_counts']} the same, {found['num_other_counts']} others, {found['num_ties']} ties; "
        f"τ {found['tau_engine']:.3f} there, {found['tau']:.3f} here"
    )
    same = found["num_other_counts"] == 0 and found["num_same_counts"] == compared > 0
    answers = (
        f"drafted {str(found['answers_identical']).lower()}, plain {str(found['plain_identical']).lower()}; "
        f"{found['num_same_as_plain']} of {num_prompts} alike to the last token with the drafter and without"
    )
    return [
        (f"the demo's drafter in vLLM, float32, {num_prompts} prompts: accepted counts", "those here", counts, same),
        (
            "its answers, by the rule of ties",
            "the target's",
            answers,
            found["answers_identical"] and found["plain_identical"],
        ),
    ]


PARTS: dict[str, Callable[[Given], list[Row]]] = {
    "run": real_run,
    "probes": probes,
    "throughput": throughput,
    "serving": serving,
}


def main(given: Given, size: str, parts: list[str]) -> None:
    """Each part once."""
    given.out.mkdir(parents=True, exist_ok=True)
    os.environ.update({"OMP_WAIT_POLICY": "PASSIVE", "VLLM_CPU_KVCACHE_SPACE": "1"})  # of every server alike
    claims, began = Claims(f"real vLLM, {size}"), time.monotonic()
    for name in parts:
        kept = given.out / f"rows-{name}.json"
        if not kept.exists():
            write_json(kept, PARTS[name](given))
        for claim, needed, measured, holds in json.loads(kept.read_text()):
            claims.add(claim, needed, measured, holds)
        print(f"{name}: {(time.monotonic() - began) / 60:.1f} min so far", flush=True)
    claims.close()


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt  # engines end with us


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    folder, python, gsm8k, demo = sys.argv[1:5]
    chosen = "full" if sys.argv[5:6] == ["full"] else "small"
    whole = Given(Path(folder) / chosen, python, Path(gsm8k), Path(demo), SIZES[chosen])
    main(whole, chosen, sys.argv[6:] or list(PARTS))
