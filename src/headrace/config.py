"""The run file: every setting of every stage, on one page.

In: one YAML file and `--set section.key=value` flags. Out: one frozen, typed tree, and for each value where it came
from (flag > file > default). Unknown keys are refused by name. A default is written once, here; a stage takes its own
section, never the whole tree. Secrets come from environment variables and are never part of this tree.
"""

import json
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from headrace.errors import ConfigError
from headrace.kinds import (
    MAX_SEED,
    Beta,
    DataSource,
    EngineConfig,
    EvaluateConfig,
    Float,
    Int,
    MiB,
    ServeConfig,
    StreamConfig,
    Strict,
    greedy_or_warm,
    known_roles,
    plain,
)
from headrace.yaml_text import flow, read_yaml

RESOLVED = "run.resolved.yaml"  # beside every stage's output
DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?")


class TargetConfig(Strict):
    """The large model whose hidden states are captured."""

    model: str = Field("demo", description="demo (the built-in target), a local folder or a hub id")
    dtype: Literal["auto", "bfloat16", "float32", "float16"] = Field(
        "auto", description="dtype the target runs in; auto: bfloat16 where the device is fast in it, else float32"
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    taps: list[str] | None = Field(None, description="tap names; none means the default rule with num_taps")
    num_taps: Int = Field(5, ge=1, description="how many taps the default rule places")
    chat_template: str | None = Field(None, description="path of a Jinja template that replaces the tokenizer's")
    engine: Literal["transformers", "vllm"] = Field(
        "transformers", description="what captures: this process, or the servers that headrace engine starts"
    )

    @field_validator("device")
    @classmethod
    def _device_is_known(cls, name: str) -> str:
        if not DEVICE.fullmatch(name):
            raise ValueError("auto, cpu, cuda or cuda:N is needed")
        return name


class PrepareConfig(Strict):
    """From chats to token ids and loss masks."""

    data: list[str | DataSource] = Field(
        default=["demo"], description="chats: files, folders, hub:OWNER/NAME, or demo; or mappings"
    )
    num_demo_prompts: Int = Field(480, ge=1, description="how many prompts the demo writes")
    max_tokens: Int = Field(2048, ge=2, description="longer samples are dropped and counted, never cut")
    min_trained_tokens: Int = Field(2, ge=1, description="samples with fewer trained tokens are dropped and counted")
    heldout_fraction: Float = Field(0.1, ge=0, lt=1, description="share of chats held out, chosen by content")
    template_args: Annotated[dict[str, Any], AfterValidator(plain)] = Field(
        default_factory=dict, description="extra arguments of the chat template"
    )
    max_samples: Int | None = Field(None, ge=1, description="stop after so many chats of `data`")
    heldout_data: list[str | DataSource] = Field(default_factory=list, description="chats that are held out whole")
    roles: Annotated[dict[str, str], AfterValidator(known_roles)] = Field(
        default_factory=dict, description="other names of roles, each with the role it stands for"
    )
    train_turns: Literal["all", "last"] = Field("all", description="which assistant turns of a chat are trained")
    train_tool_arguments: bool = Field(True, description="false leaves out the arguments of tool calls")
    shuffle: bool = Field(False, description="rows in the order of a hash of their content, so that sources mix")

    def decisive(self) -> dict[str, Any]:
        """What decides samples, data apart; newer settings where they are set, so that older sets stay valid."""
        newer = ("roles", "train_turns", "train_tool_arguments", "shuffle")
        unset = {key for key in newer if getattr(self, key) == getattr(PrepareConfig(), key)}
        return self.model_dump(exclude={"data", "heldout_data", *unset})


class RegenerateConfig(Strict):
    """Answers written by the target itself."""

    enabled: bool = Field(True, description="replace the answers of the data by the target's own")
    max_new_tokens: Int = Field(256, ge=1, description="answers are cut after so many tokens, and counted")
    temperature: Annotated[Float, AfterValidator(greedy_or_warm)] = Field(0.0, ge=0, description="0 is greedy")
    top_p: Float = Field(1.0, ge=0.01, le=1, description="nucleus, for temperature > 0")
    batch_size: Int = Field(32, ge=1, description="prompts answered together")
    drop_cut: bool = Field(False, description="leave out answers that met the limit")
    seed: Int = Field(0, ge=0, le=MAX_SEED, description="seed of sampled answers")
    with_states: bool = Field(
        False,
        description="engines give states with the answers, in one pass; with target.engine vllm, capture.tokens needed",
    )


class OrderConfig(Strict):
    """In which order samples are met."""

    seed: Int = Field(0, ge=0, le=MAX_SEED, description="seed of every epoch's order")
    window_samples: Int = Field(128, ge=1, description="samples shuffled, captured and sharded together")


class CaptureConfig(Strict):
    """How states are made."""

    group_tokens: Int = Field(4096, ge=1, description="padded tokens of one forward pass")
    codec: str = Field(
        "raw",
        description="raw, lossless, fp8, rotated:BITS, latent:RANKxBITS (fitted on a raw slice first), auto (by "
        "store.max_bytes), or the folder that headrace codec fit made",
    )
    fit_tokens: Int = Field(400_000, ge=1, description="tokens of the raw slice that a latent is fitted on")
    dtype: Literal["bfloat16", "float32", "float16"] | None = Field(
        None, description="dtype of stored states; none means target.dtype, or bfloat16 where that is auto"
    )
    final_state: bool = Field(False, description="store the target's last state too, for train.objective kl or tv")
    tokens: Literal["all", "needed"] = Field(
        "all",
        description="tokens that have states; needed leaves out what no drafter reads (exact), beyond the last anchor",
    )
    window: Int | None = Field(
        None, ge=1, description="with tokens needed: no layer of the drafter sees so many tokens back or more"
    )
    tolerate_failures: Float = Field(0.01, ge=0, le=1, description="stop when more than this share of samples fails")
    ray_resources: dict[str, Float] = Field(
        default_factory=dict,
        description="of a Ray cluster, what one target of headrace capture --ray takes: CPU, GPU, memory, or your own "
        "names; none: one CPU",
    )
    ray_accelerator: str | None = Field(None, description="Ray's name of the accelerator it needs, as in H100")
    ray_targets: Int = Field(1, ge=1, description="targets of headrace capture --ray at once")
    probe_over: Int = Field(
        100_000, ge=0, description="prove the states right first (headrace probe) where more tokens are to be captured"
    )


class StoreConfig(Strict):
    """Where states lie, when shards are sealed, and what they may take."""

    at: str | None = Field(None, description="address of objects, as in s3://BUCKET/PREFIX; none means RUN/states")
    shard_bytes: Int = Field(256 * MiB, gt=0, description="size at which a shard is sealed")
    shard_seconds: Float = Field(60.0, gt=0, description="age at which a shard is sealed")
    max_bytes: Int | None = Field(None, gt=0, description="bytes that states may take; none means what the disk holds")
    queue_bytes: Int = Field(256 * MiB, gt=0, description="records held in memory while the disk is slow")


class DrafterConfig(Strict):
    """Shape of the drafter; what is not given is derived from the target."""

    init_from: str | None = Field(
        None, description="folder of a drafter to go on from: z-lab's layout or speculators'; its shape is kept"
    )
    num_layers: Int | None = Field(None, ge=1, description="decoder layers; none means derived, and said with reasons")
    block_size: Int | None = Field(None, ge=2, description="tokens of a block, the anchor included; none: derived")
    mask_token_id: Int | None = Field(
        None, ge=0, description="explicit mask token; none means the target's own, else a row that no text produces"
    )
    intermediate_size: Int | None = Field(None, ge=1, description="MLP width; none: derived")
    num_heads: Int | None = Field(None, ge=1, description="none: derived")
    num_kv_heads: Int | None = Field(None, ge=1, description="none: derived")
    head_dim: Int | None = Field(None, ge=2, description="size of a head; none: derived")
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = Field(
        None, description="of each layer, first to last; none means full attention everywhere"
    )
    sliding_window: Int | None = Field(
        None, ge=1, description="a slot of a sliding layer sees what lies less than so many tokens away"
    )
    sliding_causal: bool | None = Field(
        None, description="a slot of a sliding layer sees nothing later in its block; none: so, as z-lab has it"
    )
    draft_vocabulary: Int | None = Field(
        None, ge=2, description="ids that may be drafted: the most frequent of the trained tokens; none: all"
    )
    features: bool = Field(True, description="false trains the floor: a drafter that sees no target state")


_LR = {"muon": 5e-3, "adamw": 1e-3}  # docs/training.md has the comparison


class TrainConfig(Strict):
    """How the drafter learns."""

    epochs: Int = Field(6, ge=1, description="visits of every sample")
    max_steps: Int | None = Field(None, ge=1, description="stop after so many steps")
    max_seconds: Float | None = Field(None, gt=0, description="plan the schedule to end within this time")
    step_tokens: Int = Field(4096, ge=1, description="tokens of one global step")
    micro_tokens: Int = Field(2048, ge=1, description="tokens of one forward pass")
    anchors: Int = Field(64, ge=1, description="blocks drawn from each sample at each visit")
    draws: Int = Field(1, ge=1, description="updates from each record that is read, each with anchors of its own")
    replay_steps: Int = Field(8, ge=1, description="recent steps kept in memory, from which further draws choose")
    group_blocks: Int = Field(64, ge=1, description="blocks run forward and backward together; bounds memory")
    objective: Literal["ce", "kl", "tv"] = Field(
        "ce", description="ce: the target's tokens; kl, tv: its distributions, which need capture.final_state"
    )
    loss: Literal["decay", "dpace"] = Field("dpace", description="how slots are weighted")
    gamma: Float = Field(4.0, gt=0, description="decay: slot k weighs exp(-(k-1)/gamma)")
    alpha: Float = Field(0.5, ge=0, le=1, description="dpace: smoothing of the drafter's confidence")
    optimizer: Literal["muon", "adamw"] = Field("muon", description="muon: Muon for matrices, AdamW for vectors")
    lr: Float | None = Field(
        None, gt=0, le=10, description="peak learning rate; none: 5e-3 for muon, 1e-3 for adamw, as measured"
    )
    min_lr_ratio: Float = Field(0.02, ge=0, le=1, description="last learning rate as a share of the peak")
    warmup_ratio: Float = Field(0.04, ge=0, lt=1, description="share of steps with a rising rate")
    schedule: Literal["cosine", "linear", "wsd"] = Field(
        "cosine", description="how the rate falls; wsd: not before the last decay_ratio of the run"
    )
    decay_ratio: Float = Field(0.2, gt=0, le=1, description="wsd: share of steps with a falling rate")
    weight_decay: Float = Field(0.01, ge=0, description="on matrices only")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="AdamW's")
    sampled_vocabulary: Int | None = Field(
        None, ge=256, description="rows of the head that a step's loss looks at, drawn anew each step; none: all"
    )
    scale_taps: bool = Field(True, description="divide each tap by its RMS before fc, folded in at export")
    ema: Float = Field(
        0.0, ge=0, lt=1, description="decay of an average of the weights, which is evaluated and exported; 0: none"
    )
    clip: Float = Field(1.0, gt=0, description="largest gradient norm")
    autocast: bool | None = Field(
        None, description="bfloat16 autocast, weights stay float32; none means where the device is fast in bfloat16"
    )
    seed: Int = Field(0, ge=0, le=MAX_SEED, description="weights and anchors")
    threads: Int | None = Field(None, ge=1, description="CPU threads; none means all")
    eval_every: Int = Field(100, ge=1, description="steps between held-out evaluations")
    eval_samples: Int = Field(48, ge=1, description="held-out samples of one evaluation")
    save_seconds: Float = Field(300.0, gt=0, description="time between checkpoints")
    read_ahead: Int = Field(64, ge=1, description="records decoded ahead of the step")
    map_shards: bool = Field(
        False, description="map shards instead of reading them: faster; a failing disk ends the run"
    )
    tensorboard: bool = Field(True, description="write TensorBoard events")
    trackers: list[Literal["wandb", "mlflow", "trackio"]] = Field(
        default_factory=list, description="send the same figures to wandb, mlflow, trackio too"
    )

    @property
    def peak_lr(self) -> float:
        """The learning rate that is given, or the optimizer's own."""
        return _LR[self.optimizer] if self.lr is None else self.lr


class RunFile(Strict):
    """One run, from chats to report."""

    run: str = Field("runs/demo", description="folder of everything the run writes")
    source: str | None = Field(
        None, description="where training reads states: grpc+tls://host:port, or several; none means the run's folder"
    )
    floor: bool = Field(True, description="train the no-features drafter too, as the floor of the report")
    target: TargetConfig = Field(default_factory=TargetConfig)
    prepare: PrepareConfig = Field(default_factory=PrepareConfig)
    regenerate: RegenerateConfig = Field(default_factory=RegenerateConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    order: OrderConfig = Field(default_factory=OrderConfig)
    capture: CaptureConfig = Field(default_factory=CaptureConfig)
    store: StoreConfig = Field(default_factory=StoreConfig)
    serve: ServeConfig = Field(default_factory=ServeConfig)
    stream: StreamConfig = Field(default_factory=StreamConfig)
    drafter: DrafterConfig = Field(default_factory=DrafterConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig)

    @property
    def states_dtype(self) -> Literal["bfloat16", "float32", "float16"]:
        """The dtype of stored states."""
        if self.capture.dtype is not None:
            return self.capture.dtype
        return "bfloat16" if self.target.dtype == "auto" else self.target.dtype

    @model_validator(mode="after")
    def _sampled_vocabulary_needs_tokens(self) -> "RunFile":
        if self.train.sampled_vocabulary is not None and self.train.objective != "ce":
            raise ValueError(
                f"train.sampled_vocabulary needs train.objective ce, found {self.train.objective}: "
                "a distance between distributions looks at every token"
            )
        return self

    @model_validator(mode="after")
    def _one_pass_needs_engines(self) -> "RunFile":
        if self.regenerate.with_states and (self.target.engine != "vllm" or self.capture.tokens != "needed"):
            raise ValueError(
                "regenerate.with_states needs target.engine vllm and capture.tokens needed (no engine gives the state "
                f"of an answer's last token), found {self.target.engine} and {self.capture.tokens}"
            )
        return self

    @model_validator(mode="after")
    def _micro_fits_step(self) -> "RunFile":
        if self.train.micro_tokens > self.train.step_tokens:
            raise ValueError(
                f"train.micro_tokens must be <= train.step_tokens ({self.train.step_tokens}), "
                f"found {self.train.micro_tokens}"
            )
        return self


@dataclass(frozen=True)
class Resolved:
    """A run file with the origin of each value: flag, file or default, by dotted path."""

    run: RunFile
    origins: Mapping[str, str]

    def to_yaml(self) -> str:
        """The whole tree as YAML; each leaf carries its origin as a comment. Reads back as a run file."""
        lines: list[str] = []
        section = ""
        for path, value in leaves(self.run.model_dump()):
            head, _, key = path.rpartition(".")
            if head != section:
                lines.append(f"{head}:")
                section = head
            indent = "  " if head else ""
            lines.append(f"{indent}{key or path}: {flow(value)}  # {self.origins[path]}")
        return "\n".join(lines) + "\n"

    def save(self, folder: Path) -> Path:
        """Write it into a folder, atomically."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / RESOLVED
        temporary = path.with_suffix(".tmp")
        temporary.write_text(self.to_yaml(), encoding="utf-8")
        temporary.replace(path)
        return path


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each setting as (dotted path, value); a section is never a value, a free-form mapping always is one."""
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and path in RunFile.model_fields:
            yield from leaves(value, path + ".")
        else:
            yield path, value


def load_run_file(path: Path | None, flags: Sequence[str] = ()) -> Resolved:
    """Read a run file (none means all defaults) and apply `section.key=value` flags.

    Raises: ConfigError for a missing file, broken YAML, unknown keys and values of the wrong kind, each by its path.
    """
    tree = {} if path is None else _read_tree(path)
    from_file = {p for p, _ in leaves(tree)}
    from_flag = set()
    for flag in flags:
        from_flag.add(_apply_flag(tree, flag))
    try:
        run = RunFile.model_validate(tree)
    except ValidationError as exc:
        raise ConfigError(
            "settings that headrace knows", _explain(exc), "docs/run-file.md lists every setting"
        ) from exc
    _check_text(run)
    # A flag may reach inside a free-form setting: prepare.template_args.enable_thinking=false.
    by_flag = {p for p, _ in leaves(run.model_dump()) if any(f == p or f.startswith(p + ".") for f in from_flag)}
    origins = {
        p: "flag" if p in by_flag else "file" if p in from_file else "default" for p, _ in leaves(run.model_dump())
    }
    return Resolved(run, origins)


def _read_tree(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError("a readable run file", f"{path}: {exc}", "check the path") from exc
    loaded = read_yaml(text, "YAML, each key once", f"{path}: ", "mend the line it names")
    if loaded is not None and not isinstance(loaded, dict):
        raise ConfigError("sections and settings", f"{path} holds a {type(loaded).__name__}", "see docs/run-file.md")
    return loaded or {}


def _check_text(run: RunFile) -> None:
    """Refuse half of a surrogate pair, which no file can hold; YAML's escapes and shells can write one."""
    try:
        json.dumps(run.model_dump(), ensure_ascii=False).encode()
    except UnicodeEncodeError as exc:
        broken = exc.object[max(exc.start - 20, 0) : exc.end]
        raise ConfigError("text that UTF-8 can hold", ascii(broken), "write the whole character") from exc


def _apply_flag(tree: dict[str, Any], flag: str) -> str:
    path, equals, text = flag.partition("=")
    if not equals or not path:
        raise ConfigError("--set section.key=value", repr(flag), "for example --set train.lr=3e-4")
    *sections, key = path.split(".")
    node = tree
    for section in sections:
        child = node.setdefault(section, {})
        if not isinstance(child, dict):
            raise ConfigError("a section", f"{section} in {path}", "it is a setting, not a section")
        node = child
    node[key] = _number_or_yaml(text)
    return path


def _number_or_yaml(text: str) -> Any:
    """YAML 1.1 reads 3e-4 as a string; people mean the number."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        pass
    return read_yaml(text, "a YAML value", f"{text!r}: ", "quote it for your shell")


def _explain(error: ValidationError) -> str:
    parts = []
    for item in error.errors():
        path = ".".join(str(p) for p in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            parts.append(f"{path}: unknown key")
        elif path:
            parts.append(f"{path}: {message} (found {reprlib.repr(item['input'])})")
        else:  # a rule over several settings: it says itself what it found, its input is the whole run file
            parts.append(message)
    return "; ".join(parts)


@dataclass(frozen=True)
class RunFolder:
    """Where each stage of a run keeps what it made."""

    root: Path

    @property
    def prompts(self) -> Path:
        """Prompt ids to be answered (a prepared set without trained tokens)."""
        return self.root / "prompts"

    @property
    def answers(self) -> Path:
        """The target's own answers."""
        return self.root / "answers"

    @property
    def prepared(self) -> Path:
        """The prepared set that capture and training read."""
        return self.root / "prepared"

    @property
    def states(self) -> Path:
        """The store of encoded states."""
        return self.root / "states"

    def train(self, features: bool = True) -> Path:
        """Checkpoints and metrics of the drafter, or of the floor that sees no target state."""
        return self.root / ("train" if features else "train-no-features")

    @property
    def export(self) -> Path:
        """The stock drafter."""
        return self.root / "drafter"

    @property
    def evaluation(self) -> Path:
        """Results of evaluations."""
        return self.root / "eval"


def settings_table() -> str:
    """Every setting as a Markdown table a section: name, default, meaning. docs/run-file.md holds it."""
    lines: list[str] = []
    for name, field in RunFile.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Strict):
            meaning = (section.__doc__ or "").strip().splitlines()[0]
            lines += ["", f"## {name}", meaning, "", "| setting | default | meaning |", "|---|---|---|"]
            for key, inner in section.model_fields.items():
                default = json.dumps(inner.get_default(call_default_factory=True))
                lines.append(f"| `{name}.{key}` | `{default}` | {inner.description} |")
        else:
            if not lines:
                lines += ["| setting | default | meaning |", "|---|---|---|"]
            lines.append(f"| `{name}` | `{json.dumps(field.default)}` | {field.description} |")
    return "\n".join(lines) + "\n"
