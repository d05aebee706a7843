"""Masks beside an independent reference, for a test and for `make prove-masks`.

In: the public data: rendered masks, templates with `generation` blocks, chats of many layouts. Out: one row for each
comparison, with a reason for each difference. Everything is compared as text, so that no tokenizer is needed but one
of bytes: ids of a reference become text by a small table of pieces, and what the table lacks by a stand-in.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from headrace.errors import PrepareError
from headrace.prepare.chats import TEXT_FIELDS, read_chats
from headrace.prepare.kept import NotKept
from headrace.prepare.mask import BoundaryUnclear, answered_turns, masked_samples
from headrace.prepare.template import ChatTemplate, TemplateRefused
from tests.prepare.tiny import byte_tokenizer

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
PIECES = ROOT / "tests" / "fixtures" / "reference_pieces.json"
CHATS_A_CELL = 12

# What a reference may do otherwise, each with why it is not done here.
NEWLINE = "newline"
LEFT_OUT = "left out"
OPENING = "opening tag"
EMPTY_BLOCK = "empty block"
HEADER = "header"
REWRITTEN = "rewritten"
REASONS = {
    NEWLINE: "the reference trains the newline behind the end marker too; the target stops at the marker",
    LEFT_OUT: "the reference trains nothing of this turn: its pattern finds only turns of one shape; here the turn is "
    "trained as it was served",
    OPENING: "the reference leaves out the opening think tag, which its target's prompt holds; the template "
    "here leaves it to the target",
    EMPTY_BLOCK: "the reference trains an empty think block, or its end, that the template added; the target never "
    "wrote it (case B50)",
    HEADER: "the reference's block holds the header of the turn, or the opening think tag, which the prompt holds",
    REWRITTEN: "the reference renders the turn as history, with the end marker of history; here it stands as served",
}

_LIST = "{% for m in messages %}"
_KIMI = (
    _LIST + "{{ '<|im_' + ('system' if m.role == 'system' else m.role) + '|>' + m.role + '<|im_middle|>' }}"
    "{% if m.role == 'assistant' and thinks %}{{ '<think></think>' }}{% endif %}{{ m.content + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
)
_LING = (
    _LIST
    + "{{ '<role>' + {'system': 'SYSTEM', 'user': 'HUMAN', 'assistant': 'ASSISTANT'}[m.role] + '</role>' + m.content"
    " + '<|role_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<role>ASSISTANT</role>' }}{% endif %}"
)
_DEEPSEEK = (
    "{{ bos_token }}"
    + _LIST
    + "{{ {'system': '', 'user': '<｜User｜>', 'assistant': '<｜Assistant｜>'}[m.role] + m.content }}"
    "{% if m.role == 'assistant' %}{{ '<｜end▁of▁sentence｜>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)
# Layouts for which the public data has masks and no template; stated from the masks' own markers.
OWN_LAYOUTS = {"kimi": _KIMI, "ling": _LING, "deepseek": _DEEPSEEK}


@dataclass(frozen=True)
class Peer:
    """How one family of references is read: its pieces, its template, and what ends its turns."""

    pieces: str
    template: str
    end: str
    args: dict[str, Any] = field(default_factory=dict)
    thinks: bool = True  # False: think tags are text like any other


PEERS = (
    ("qwen3-next-thinking", Peer("qwen", "qwen3_6", "<|im_end|>")),
    ("qwen3.5", Peer("qwen3.5", "qwen3_6", "<|im_end|>")),
    ("qwen3-", Peer("qwen", "qwen3", "<|im_end|>")),
    ("qwen_standard", Peer("qwen", "qwen2_5", "<|im_end|>")),
    ("qwen_tool", Peer("qwen", "qwen3_instruct_2507", "<|im_end|>", thinks=False)),
    ("repo-wiki", Peer("qwen", "qwen3_instruct_2507", "<|im_end|>", thinks=False)),
    ("gpt-oss", Peer("gpt-oss", "gptoss", "<|return|>", {"reasoning_effort": "low"})),
    ("kimi-k2-thinking", Peer("kimi", "kimi", "<|im_end|>", {"thinks": True})),
    ("kimi-k2-instruct", Peer("kimi", "kimi", "<|im_end|>", {"thinks": False})),
    ("ling", Peer("ling", "ling", "<|role_end|>")),
    ("deepseek", Peer("deepseek", "deepseek", "<｜end▁of▁sentence｜>")),
)


@dataclass
class Compared:
    """One row: turns compared, turns equal, and the differences by reason; `unexplained` names the others."""

    name: str
    template: str
    turns: int = 0
    equal: int = 0
    same_text: bool | None = None
    reasons: Counter[str] = field(default_factory=Counter)
    unexplained: list[tuple[str, str]] = field(default_factory=list)

    def add(self, theirs: str, ours: str) -> None:
        """Compare the trained text of one turn."""
        self.turns += 1
        found = explain(theirs, ours)
        if found == "":
            self.equal += 1
        elif found is None:
            self.unexplained.append((theirs, ours))
        else:
            self.reasons[found] += 1


def explain(theirs: str, ours: str) -> str | None:
    """Empty for equal texts; else the reason of the difference, None without one. The newline is a reason by itself
    only where nothing else differs."""
    if theirs == ours:
        return ""
    bare = theirs.removesuffix("\n")
    if bare == ours:
        return NEWLINE
    if not theirs:
        return LEFT_OUT
    for header in ("<think>\n", "<|start|>assistant", "<|start_header_id|>assistant<|end_header_id|>\n\n"):
        if bare == header + ours:
            return HEADER
    if ours == "<think>\n" + bare:
        return OPENING
    if re.sub(r"^(<think>\s*|\s*)</think>\s*", "", bare) == ours:
        return EMPTY_BLOCK
    without = re.sub(r"<\|(end|return)\|>$", "", bare.removeprefix("<|start|>assistant"))
    if without in ("", re.sub(r"<\|(end|return)\|>$", "", ours)):
        return REWRITTEN
    return None


def peer_of(name: str) -> Peer:
    """The family of a reference by the beginning of its name."""
    return next(peer for start, peer in PEERS if name.startswith(start))


def template_text(name: str) -> str:
    """A template of the public data, or a layout stated here."""
    if name in OWN_LAYOUTS:
        return OWN_LAYOUTS[name]
    return next((DATA / "chat_templates").rglob(f"{name}.jinja")).read_text(encoding="utf-8")


def opened(text: str, end: str, args: dict[str, Any] | None = None) -> ChatTemplate:
    """A template over a tokenizer of bytes; a target stops at what opens the next turn where GLM's do."""
    made = byte_tokenizer(text, end)
    stops = [made.convert_tokens_to_ids(mark) for mark in ("<|user|>", "<|observation|>") if mark in made.get_vocab()]
    return ChatTemplate(made, text, args, stops)


def spans(template: ChatTemplate, ids: Any, mask: Any) -> list[str]:
    """Text of each run of trained tokens."""
    found: list[list[int]] = []
    before = 0
    for token, trained in zip(ids, mask, strict=True):
        if trained:
            found = [*found, [int(token)]] if not before else [*found[:-1], [*found[-1], int(token)]]
        before = trained
    return [str(template.tokenizer.decode(run)) for run in found]


def our_turns(template: ChatTemplate, messages: list[dict[str, Any]]) -> list[str]:
    """Trained text of each assistant turn, in order."""
    samples = masked_samples(template, messages)
    if len(samples) == 1:
        return spans(template, *samples[0])
    return [spans(template, *sample)[-1] for sample in samples]


def reference_rows() -> Iterator[Compared]:
    """Each rendered mask of the public data beside ours."""
    pieces = json.loads(PIECES.read_text(encoding="utf-8"))
    for path in sorted((DATA / "loss_masks").glob("*.json")):
        peer = peer_of(path.name)
        stored = json.loads(path.read_text(encoding="utf-8"))
        parts = _parts(stored["input_ids"], stored["loss_mask"], pieces[peer.pieces])
        messages, theirs = _chat_of(parts, peer)
        template = opened(template_text(peer.template), peer.end, peer.args)
        row = Compared(path.name.removesuffix("_ref.json"), peer.template)
        for their, our in zip(theirs, our_turns(template, messages), strict=True):
            row.add(their, our)
        ids, _ = masked_samples(template, messages)[-1]
        whole = "".join(text for text, _ in parts).replace("<｜begin▁of▁sentence｜>", "<s>")
        row.same_text = _undated(template.tokenizer.decode(ids)) == _undated(whole.rstrip("\n"))
        yield row


def _undated(text: str) -> str:
    """gpt-oss's template writes the day; its history ends turns with another mark than its target does."""
    return re.sub(r"Current date: \S+", "", text).removesuffix("<|return|>").removesuffix("<|end|>")


def _parts(ids: list[int], mask: list[int], pieces: dict[str, str]) -> list[tuple[str, int]]:
    """Text by runs of equal mask. Pieces are bytes, for a character may be several tokens."""
    runs: list[tuple[bytes, int]] = []
    for token, trained in zip(ids, mask, strict=True):
        piece = pieces.get(str(token), f"[{token}]").encode("latin-1")
        if runs and runs[-1][1] == trained:
            runs[-1] = (runs[-1][0] + piece, trained)
        else:
            runs.append((piece, trained))
    return [(text.decode("utf-8"), trained) for text, trained in runs]


_TURNS = {
    "qwen": r"<\|im_start\|>(?P<role>\w+)\n(?P<said>.*?)<\|im_end\|>\n?",
    "kimi": r"<\|im_\w+\|>(?P<role>\w+)<\|im_middle\|>(?P<said>.*?)<\|im_end\|>",
    "ling": r"<role>(?P<role>\w+)</role>(?P<said>.*?)<\|role_end\|>",
    "deepseek": r"<｜(?P<role>User|Assistant)｜>(?P<said>.*?)(?:<｜end▁of▁sentence｜>|(?=<｜))",
    "gpt-oss": r"<\|start\|>(?P<role>\w+)(?:<\|channel\|>(?P<channel>\w+))?<\|message\|>(?P<said>.*?)<\|end\|>",
}
_ROLES = {"HUMAN": "user", "User": "user"}


def _chat_of(parts: list[tuple[str, int]], peer: Peer) -> tuple[list[dict[str, Any]], list[str]]:
    """The chat a reference was rendered from, and its trained text in each assistant turn."""
    family, text = peer.pieces, "".join(part for part, _ in parts)
    trained = [bool(mark) for part, mark in parts for _ in part]
    messages: list[dict[str, Any]] = []
    theirs: list[str] = []
    if family == "deepseek":
        opening = text.removeprefix("<｜begin▁of▁sentence｜>").partition("<｜User｜>")[0]
        messages += [{"role": "system", "content": opening}] if opening else []
    for turn in re.finditer(_TURNS["qwen" if family == "qwen3.5" else family], text, re.DOTALL):
        role = _ROLES.get(turn["role"], turn["role"].lower())
        own = "".join(c for c, mark in zip(turn[0], trained[turn.start() : turn.end()], strict=True) if mark)
        if family == "gpt-oss" and role == "system":
            continue  # the template writes it
        if family == "gpt-oss" and messages and messages[-1]["role"] == role == "assistant":
            messages[-1]["content"] = turn["said"]
            theirs[-1] += own
        elif role == "assistant":
            messages.append({"role": role, **_answer(turn["said"], turn.groupdict().get("channel"), peer)})
            theirs.append(own)
        else:
            messages.append({"role": role, "content": turn["said"]})
    return messages, theirs


def _answer(said: str, channel: str | None, peer: Peer) -> dict[str, Any]:
    if channel == "analysis":
        return {"content": "", "thinking": said}
    block = re.match(r"<think>(.*?)</think>\s*", said, re.DOTALL) if peer.thinks else None
    if block is None:
        return {"content": said}
    thought = block[1].strip()
    return {"content": said[block.end() :], **({"reasoning_content": thought} if thought else {})}


TRAINING = {
    "gemma3": "<end_of_turn>",
    "gptoss": "<|return|>",
    "llama3": "<|eot_id|>",
    "qwen3": "<|im_end|>",
    "qwen3_6": "<|im_end|>",
}
_MARKED_CHATS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "yes"}],
    [
        {"role": "user", "content": "yes"}, {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "yes"}, {"role": "assistant", "content": "no cat\n\nnor dog"},
    ],
    [
        {"role": "user", "content": "a question"},
        {"role": "assistant", "content": "yes", "reasoning_content": "a thought"},
    ],
)  # fmt: skip


def marked_rows() -> Iterator[Compared]:
    """Templates with `generation` blocks: the blocks, beside what is found where they are taken out."""
    for name, end in TRAINING.items():
        text = template_text(f"{name}_training")
        marked, bare = opened(text, end), opened(without_blocks(text), end)
        row = Compared(f"{name}_training", f"{name}_training")
        for messages in _MARKED_CHATS:
            if messages[-1].get("reasoning_content") and bare.thinking_field is None:
                continue
            for i in answered_turns(messages):
                served = bare.served(messages[: i + 1])
                ids, marks = marked.ids(served, False), marked.marked(served)
                assert marks is not None
                row.add(spans(marked, ids, marks)[-1], our_turns(bare, served)[-1])
        yield row


def without_blocks(text: str) -> str:
    """The same template without `generation` blocks, its white space kept."""
    text = re.sub(r"\{%(-?)\s*generation\s*(-?)%\}", r"{%\1 if true \2%}", text)
    return re.sub(r"\{%(-?)\s*endgeneration\s*(-?)%\}", r"{%\1 endif \2%}", text)


ENDS = {
    "SmolLM2": "<|im_end|>", "deepseekv3": "<｜end▁of▁sentence｜>", "gemma": "<end_of_turn>", "gemma3": "<end_of_turn>",
    "gemma3_training": "<end_of_turn>", "glm4moe": "<|endoftext|>", "gptoss": "<|return|>",
    "gptoss_training": "<|return|>", "llama3": "<|eot_id|>", "llama3_1": "<|eot_id|>", "llama3_2": "<|eot_id|>",
    "llama3_training": "<|eot_id|>",
}  # fmt: skip
FILES = (
    "conversations/fastchat/dummy_conversation.json", "conversations/modelopt/synthetic_conversations_1k.jsonl",
    "conversations/oumi/alpaca_format.jsonl", "conversations/oumi/oumi_format.jsonl",
    "conversations/torchspec/eval_conversations.jsonl", "conversations/torchspec/sample_conversations.jsonl",
    "reasoning/qwen35_tokenize_data.jsonl", "reasoning/sample_kimi_k25_conversations.jsonl",
    "tool_calling/glaive_toolcall_en_demo.json", "tool_calling/tool_use_conversation.jsonl",
)  # fmt: skip


@dataclass
class Cell:
    """One template over the first chats of one file: turns whose mask is right, refusals by reason, and the wrong."""

    template: str
    file: str
    right: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def all_templates() -> list[str]:
    """Names of the public templates."""
    return sorted(path.stem for path in (DATA / "chat_templates").rglob("*.jinja"))


def cells(templates: list[str]) -> Iterator[Cell]:
    """Every template over every file of chats; each trained turn is judged by the texts of the chat alone."""
    for name in templates:
        template = opened(template_text(name), ENDS.get(name, "<|im_end|>"))
        for file in FILES:
            cell = Cell(name, file)
            for chat in islice(read_chats([str(DATA / file)], 0), CHATS_A_CELL):
                if chat.refused:
                    cell.refused[chat.refused] += 1
                    continue
                try:
                    samples = masked_samples(template, chat.messages, chat.tools)
                except (BoundaryUnclear, NotKept, TemplateRefused) as exc:
                    cell.refused[_why(exc)] += 1
                    continue
                judge(cell, template, list(chat.messages), samples, chat.place)
            yield cell


def _why(error: PrepareError) -> str:
    if isinstance(error, NotKept):
        return f"leaves out {error.what}"
    return "template refuses" if isinstance(error, TemplateRefused) else "boundary unclear"


# What a template may write inside the target's own tokens.
_SYNTAX = re.compile(
    r"<\|[a-z_]+\|>|<｜[^｜]+｜>|</?think>|</?tool_call>|<end_of_turn>|</?(?:function|parameter|arg_key|arg_value)[^>]*>"
    r"|\b(?:final|analysis|commentary|function|functions|json|name|arguments|parameters|assistant|to|type)\b|[^\w<]+|<"
)


def judge(cell: Cell, template: ChatTemplate, messages: list[dict[str, Any]], samples: Any, place: str) -> None:
    """Count a chat's trained turns as right or wrong by the texts of its messages alone."""
    turns = [messages[i] for i in answered_turns(messages)]
    texts = [text for sample in samples for text in spans(template, *sample)[-1 if len(samples) > 1 else 0 :]]
    if len(texts) != len(turns):
        turns = turns[-len(texts) :]  # turns that answer nobody are context
    for turn, text in zip(turns, texts, strict=True):
        rest = text
        for part in _authored(turn):
            part = part if part in rest else json.dumps(part, ensure_ascii=False)[1:-1]
            if part not in rest:
                cell.wrong.append(f"{place}: {part!r} is not in {text!r}")
                return
            rest = rest.replace(part, " ", 1)
        if left := _SYNTAX.sub("", rest):
            cell.wrong.append(f"{place}: {left!r} is trained and not the target's, in {text!r}")
            return
        cell.right += 1


def _authored(turn: dict[str, Any]) -> list[str]:
    """Every text of a turn, longest first; thinking inside the content apart from the rest of it."""
    said = [str(turn.get(name) or "") for name in TEXT_FIELDS]
    parts = [piece.strip() for text in said for piece in re.split(r"</?think>", text)]
    for call in turn.get("tool_calls", ()):
        parts += [call["function"]["name"], *_leaves(call["function"]["arguments"])]
    return sorted((part for part in parts if part), key=len, reverse=True)


def _leaves(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for key, inner in value.items() for text in (key, *_leaves(inner))]
    if isinstance(value, list):
        return [text for inner in value for text in _leaves(inner)]
    return [json.dumps(value, ensure_ascii=False).strip('"')] if not isinstance(value, str) else [value]


def comparison_table(rows: list[Compared]) -> str:
    """The rows of `reference_rows` and `marked_rows` as Markdown, the reasons below."""
    lines = ["| reference | template | turns | equal | differences | same text |", "|---|---|---|---|---|---|"]
    met: set[str] = set()
    for row in rows:
        differences = ", ".join(f"{number} {why}" for why, number in sorted(row.reasons.items())) or "none"
        met |= row.reasons.keys()
        same = {True: "yes", False: "no", None: ""}[row.same_text]
        lines.append(f"| {row.name} | {row.template} | {row.turns} | {row.equal} | {differences} | {same} |")
    return "\n".join([*lines, "", *(f"- *{why}*: {REASONS[why]}." for why in REASONS if why in met)]) + "\n"


def cell_table(made: list[Cell]) -> str:
    """One line a template: turns that are right, chats that were refused by reason, and wrong turns."""
    lines = ["| template | turns right | wrong | chats refused |", "|---|---|---|---|"]
    for name in dict.fromkeys(cell.template for cell in made):
        own = [cell for cell in made if cell.template == name]
        refused = sum((cell.refused for cell in own), Counter[str]())
        told = ", ".join(f"{number} {why}" for why, number in sorted(refused.items()))
        lines.append(f"| {name} | {sum(c.right for c in own)} | {sum(len(c.wrong) for c in own)} | {told} |")
    return "\n".join(lines) + "\n"
