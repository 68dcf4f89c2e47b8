"""Commands of an edge alone: chat, edge, doctor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.deploy.arguments import Command, Part, part
from outrider.edge.daemon import DaemonConfig
from outrider.edge.edge_config import CONNECTION, DRAFTING, SHARING, EdgeConfig
from outrider.proto.address import http_url
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.files import cache_folder, read_text
from outrider.proto.plumbing.tls import ServerTls
from outrider.proto.settings import Settings, at_least, between, option
from outrider.proto.types import Grammar, GrammarKind, Sampling

ANSWER_TOKENS = 1024
LEARNING_HERE = "learning on this machine"
GRAMMAR = "grammar (the text follows it, and ends where it does; give one)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSettings(Settings):
    """Prompts to decode, and the form of their texts."""

    prompt: str | None = option(None, "text to continue; - reads standard input", metavar="PROMPT", positional=True)
    prompts: Path | None = option(None, 'file of prompts: .jsonl of {"id","prompt"}, or text with one per line')
    json: bool = option(False, "print one JSON object per prompt")
    sessions: int = option(1, "with --json: prompts decoded at once", check=at_least(1))

    def check_together(self) -> None:
        """Refuse two sources of prompts, and none."""
        if self.prompt is not None and self.prompts is not None:
            raise ConfigError("give PROMPT or --prompts FILE, not both", field="prompt")
        if not (self.prompt or self.prompts):
            raise ConfigError("is missing; give PROMPT, `-` for standard input, or --prompts FILE", field="prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkSettings(Settings):
    """Marks of the target's own tokens in a text."""

    marks: str = option(
        "auto", "mark the target's own tokens; auto: where the output is a terminal", choices=("auto", "on", "off")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSettings(Settings):
    """Stop strings."""

    stop: tuple[str, ...] = option((), "string that ends the text", group="sampling")


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkSettings(Settings):
    """A chat in the terminal."""

    system: str = option("", "system prompt; empty: none")
    no_history: bool = option(False, "keep nothing of what is typed for the next chat")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSettings(Settings):
    """Grammars of the texts."""

    json_schema: Path | None = option(None, "JSON Schema of the text", group=GRAMMAR)
    grammar_file: Path | None = option(None, "grammar of the text, in llguidance's Lark", group=GRAMMAR)

    def check_together(self) -> None:
        """Refuse two grammars."""
        if self.json_schema and self.grammar_file:
            raise ConfigError("cannot be given with --json-schema; give one", field="grammar_file")

    def grammar(self) -> Grammar | None:
        """Read the grammar, which the verifier will check; None: the text is free.

        Raises:
            ConfigError: the file cannot be read.
            InvalidArgument: it is empty or too large.
        """
        for name, kind in (("json_schema", GrammarKind.JSON_SCHEMA), ("grammar_file", GrammarKind.LARK)):
            path: Path | None = getattr(self, name)
            if path is not None:
                return Grammar(kind, read_text(path, name))
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySettings(Settings):
    """The file of a client's API key."""

    api_key_file: Path | None = option(None, "file of the API key; not set: OUTRIDER_API_KEY", group=CONNECTION)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings(Settings):
    """A server that is there already, in place of a coordinator or a verifier."""

    server: str = option(
        "",
        "address of a vLLM, SGLang or llama-server that computes the target, such as http://127.0.0.1:8000, with the "
        "verifier in this process (docs/servers.md)",
        metavar="URL",
        parse=http_url,
    )
    server_model: str = option("", "with --server: its name of the model; empty: the only one", metavar="NAME")
    server_key_file: Path | None = option(None, "with --server: its API key; not set: OUTRIDER_TARGET_KEY")
    server_ca: Path | None = option(None, "with --server: certificate of its authority; not set: the public ones")

    def check_together(self) -> None:
        """Refuse what belongs to a server where none is given."""
        for name in ("server_model", "server_key_file", "server_ca"):
            if getattr(self, name) and not self.server:
                raise ConfigError("needs --server; give both", field=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnHereSettings(Settings):
    """Learning from an edge's own texts on its own machine."""

    learn_here: bool = option(
        False,
        "train the drafter here, from texts that pass; nothing of them leaves this machine; needs the extra [cloud]",
        group=LEARNING_HERE,
    )
    learn_here_folder: Path | None = option(
        None,
        "folder of what --learn-here has learned, so that it survives a restart; weights, which may tell of the texts, "
        "and no text; not set: forgotten on exit",
        metavar="DIR",
        group=LEARNING_HERE,
    )

    learn_cpu_share: float = option(
        0.5, "share of one core that training may take", group=LEARNING_HERE, check=between(0, 1)
    )

    def check_together(self) -> None:
        """Refuse a folder for learning where nothing learns here."""
        if self.learn_here_folder is not None and not self.learn_here:
            raise ConfigError("needs --learn-here; give both", field="learn_here_folder")


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorSettings(Settings):
    """Output of the findings."""

    json: bool = option(False, "print one JSON object")


def edge_part(*names: str) -> Part:
    """Choose the fields of an edge's settings that a command takes."""
    return part(EdgeConfig, *names, defaults={"cache": cache_folder})


WHERE = ("coordinator", "verifier", "model", "tokenizer", "cache")
CHOSEN = ("temperature", "seed", "top_k", "top_p", "max_tokens")
CHAT = Command(
    "outrider.deploy.chat:chat",
    (
        part(TalkSettings),
        part(MarkSettings),
        edge_part(*WHERE, "chat_template", "service", DRAFTING, SHARING, CONNECTION),
        part(KeySettings),
        part(Sampling, *CHOSEN, defaults={"max_tokens": ANSWER_TOKENS}),
        part(StopSettings),
    ),
)
EDGE = Command(
    "outrider.deploy.daemon:edge",
    (
        edge_part(*WHERE, "chat_template", "service"),
        part(ServerSettings),
        part(DaemonConfig),
        edge_part(DRAFTING, "battery", SHARING),
        part(LearnHereSettings),
        part(ServerTls, defaults={"cert": None, "key": None}),
        part(
            EdgeConfig,
            CONNECTION,
            flags={
                f"tls_{name}": f"cloud-tls-{name.replace('_', '-')}" for name in ("ca", "cert", "key", "server_name")
            },
        ),
        part(KeySettings),
        edge_part("trace_endpoint"),
    ),
)
DOCTOR = Command(
    "outrider.deploy.doctor:doctor",
    (
        edge_part(*WHERE),
        part(ServerSettings),
        part(DoctorSettings),
        edge_part(CONNECTION),
        part(KeySettings),
        edge_part("drafter"),
    ),
)
