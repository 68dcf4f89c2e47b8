"""Texts that a target writes after a domain's prompts, as the records that a verifier would log of them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from outrider.cloud.learning.lesson_record import TOP, LessonRecord
from outrider.cloud.learning.own_text import record_of_text
from outrider.cloud.learning.record_file import read_records, write_records
from outrider.cloud.models.family_index import find_target, load_causal_lm, load_tokenizer
from outrider.cloud.target.target import Target
from outrider.proto.salts import salted
from outrider.proto.types import Sampling
from research.text_writer import TextRequest, TextWriter, WrittenText

PAGE = 16
TEXT_TOKENS = 96
AT_ONCE = 64
KEYS = 40  # whose texts they are said to be: each stays below its share of a buffer
HELD_OUT_TOKENS, HELD_OUT_SEED = 1 << 18, 0  # the embedded drafters have not seen the first of these


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """Texts of one domain; half are written at T = 0, half at T = 1.

    Attributes:
        texts: their number.
        held_out: whether their prompts are from documents that are set aside.
        prompt, length: tokens of a prompt, and of a text after it.
    """

    texts: int
    held_out: bool
    seed: int
    prompt: int = 48
    length: int = TEXT_TOKENS


class StreamWriter:
    """A target that writes streams, which are kept in a folder.

    Args:
        target: name of the target; it is loaded when something must be written.
        folder: place of the files.
    """

    def __init__(self, target: str, folder: Path) -> None:
        self._name = target
        self._source = find_target(target)
        self._folder = folder
        self._model: Target | None = None

    def stream(
        self, corpus: Path, plan: StreamPlan, prompt_class: int, say: Callable[[str], None]
    ) -> list[LessonRecord]:
        """Return the records of a domain's texts, from the folder or written now."""
        mark = hashlib.sha256(corpus.read_bytes() + repr((self._source, asdict(plan), prompt_class)).encode())
        path = self._folder / f"{domain_name(corpus)}-{mark.hexdigest()[:12]}.lessons"
        if path.exists():
            return read_records(path)
        records: list[LessonRecord] = []
        began = time.monotonic()
        for text in TextWriter(self._target(plan), at_once=AT_ONCE).stream(self.requests(corpus, plan)):
            if text.logits is not None:  # they are kept where texts are streamed
                records.append(self._record(text, text.logits.log_softmax(-1), prompt_class))
            if len(records) % AT_ONCE == 0:
                speed = sum(map(len, records)) / (time.monotonic() - began)
                say(f"{domain_name(corpus)}: {len(records)} of {plan.texts} texts, {speed:,.0f} tokens/s")
        records.sort(key=lambda record: record.session_salt)  # the writer's order is by length
        write_records(path, records)
        return records

    def _target(self, plan: StreamPlan) -> Target:
        if self._model is None:
            model = load_causal_lm(self._source, f"cannot load {self._name!r}", field="target")
            room = AT_ONCE * (plan.prompt + plan.length + PAGE)
            self._model = Target(model.eval(), "{}", kv_tokens=room, page_size=PAGE)
        return self._model

    def requests(self, corpus: Path, plan: StreamPlan) -> Sequence[TextRequest]:
        """Return what the texts of a plan are asked for with; the target need not be loaded."""
        tokenizer = load_tokenizer(self._source)
        documents = split_documents(read_documents(corpus, tokenizer.backend_tokenizer))[int(plan.held_out)]
        choose = np.random.default_rng([plan.seed, int(plan.held_out)])
        prefixes = choose_prefixes(documents, plan.texts, plan.prompt, plan.length, tokenizer.bos_token_id, choose)
        return [
            TextRequest(
                tuple(prefix.tolist()),
                Sampling(temperature=float(index % 2), seed=int(choose.integers(2**62)), max_tokens=plan.length),
                id=str(index),
            )
            for index, prefix in enumerate(prefixes)
        ]

    def _record(self, text: WrittenText, log_p: torch.Tensor, prompt_class: int) -> LessonRecord:
        """Return a text's record, all its rows, none of which had a draft; `log_p` [n, vocab] are the target's."""
        top = log_p.topk(min(TOP, log_p.shape[1]))
        rest = (1 - top.values.exp().sum(-1)).clamp(min=1e-9, max=1.0).log()
        top_ids, top_logp = top.indices.numpy().astype(np.uint32), top.values.clamp(max=0).to(torch.float16).numpy()
        return record_of_text(
            text.transcript,
            text.prompt_length,
            text.request.sampling,
            model=self._name,
            session_salt=salted(b"", f"{prompt_class}-{text.request.id}"),
            key_salt=salted(b"", f"key-{prompt_class}-{int(text.request.id) % KEYS}"),
            prompt_class=prompt_class,
            teacher=(top_ids, top_logp, rest.float().numpy()),
        )


def domain_name(path: Path) -> str:
    """Return the domain of a file: `code` for `train.code.jsonl`."""
    return path.name.removesuffix(path.suffix).removeprefix("train.")


def read_documents(corpus: Path, tokenizer: Tokenizer) -> list[np.ndarray]:
    """Return the tokens, int64 [length] each, of the texts of a .jsonl of {"text"}."""
    texts = [json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").splitlines() if line.strip()]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [np.array(each.ids, dtype=np.int64) for each in encoded if each.ids]


def split_documents(documents: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Set documents aside until they hold `HELD_OUT_TOKENS`, or a tenth of all tokens; return the others, and them."""
    lengths = np.array([len(document) + 2 for document in documents])  # each stands between two marks
    order = np.random.default_rng([HELD_OUT_SEED, 0]).permutation(len(documents))
    allowance = min(HELD_OUT_TOKENS, int(lengths.sum()) // 10)
    held = min(len(order) - 1, int(np.searchsorted(np.cumsum(lengths[order]), allowance)) + 1)
    return [documents[i] for i in np.sort(order[held:])], [documents[i] for i in order[:held]]


def choose_prefixes(
    documents: Sequence[np.ndarray], rows: int, length: int, new_tokens: int, bos: int, choose: np.random.Generator
) -> np.ndarray:
    """Choose prefixes `<bos>` + window of a document, int64 [rows, length].

    A document shorter than one whole row (`length + new_tokens`) is continued from its beginning, a longer one from
    anywhere inside it. Documents too short for the prefix are passed over; if all are, the prefix is shortened.
    """
    inner = np.array(list(map(len, documents)))
    length = min(length, int(inner.max()) + 1)
    eligible = np.flatnonzero(inner >= length - 1)
    weights = np.where(inner[eligible] < length + new_tokens, length + new_tokens, inner[eligible]).astype(float)
    picked = choose.choice(eligible, size=rows, p=weights / weights.sum())
    prefixes = np.full((rows, length), bos, dtype=np.int64)
    for row, index in enumerate(picked):
        room = inner[index] - (length - 1)
        first = 0 if inner[index] < length + new_tokens else int(choose.integers(room + 1))
        prefixes[row, 1:] = documents[index][first : first + length - 1]
    return prefixes
