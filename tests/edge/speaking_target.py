"""A daemon over a scripted target that calls functions in one of the formats, its markers special tokens or not.

Asked a question, the target calls the first function that it is shown, for Paris; where the question has "both", twice.
Once a result is in the prompt, it says it. `python speaking_target.py FOLDER` serves one daemon for each format, and
prints their URLs as a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from scripted_cloud import scripted_client
from tokenizers import Tokenizer
from tool_templates import FORMAT_OF, TEMPLATES

from outrider.edge.daemon import DaemonConfig
from outrider.edge.daemon.http_server import Daemon
from outrider.edge.tool_calls.formats import FORMATS
from outrider.proto.types import CommittedToken, Open, TokenFacts

EOS, MODEL = 1, "reference"
ARGUMENTS = json.dumps({"city": "Paris"})
RESULT = re.compile(
    r'(?:<tool_response>\n|ipython<\|end_header_id\|>\n\n"?|\[TOOL_RESULTS\] \{"content": )(.*?)"?[\n<,]'
)
SHOWN = re.compile(r'"name": "(\w+)"')
ANSWER = "It is said: {}"
QUESTIONS = re.compile(r"\[INST\]|<\|im_start\|>user\n(?!<tool)|user<\|end_header_id\|>")


def call_in(form: str, name: str, arguments: str, count: int) -> str:
    """Return calls of a function as a format's models write them."""
    key = "parameters" if form == "llama3" else "arguments"
    call = f'{{"name": "{name}", "{key}": {arguments}}}'
    if form == "hermes":
        return "\n".join([f"<tool_call>\n{call}\n</tool_call>"] * count)
    if form == "llama3":
        return "<|python_tag|>" + "; ".join([call] * count)
    return f"[TOOL_CALLS] [{', '.join([call] * count)}]"


def answer_to(form: str, prompt: str) -> str:
    """Return what the target writes after a prompt."""
    *_, last = QUESTIONS.split(prompt)
    results = RESULT.findall(last)
    if results:
        return ANSWER.format(results[0])
    shown = SHOWN.search(prompt)
    arguments = ARGUMENTS if "city" in prompt else "{}"
    return call_in(form, shown[1], arguments, 2 if "both" in last else 1) if shown else "Hello."


class SpeakingTarget:
    """A daemon over such a target; `name` is one of `TEMPLATES`.

    Args:
        name: chat template.
        tokenizer: tokenizer.json of a target.
        folder: takes the target's own files.
    """

    def __init__(self, name: str, tokenizer: Path, folder: Path) -> None:
        self._form = FORMAT_OF[name]
        self._name = name
        self._folder = folder / name
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        if name != "qwen":  # whose markers are plain tokens
            self._tokenizer.add_special_tokens(list(FORMATS[self._form].markers))
        self._listener: asyncio.Server | None = None
        self._daemon: Daemon | None = None

    async def start(self) -> str:
        """Serve, and return the URL."""
        self._listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        self._folder.mkdir(parents=True)
        tokenizer, template = self._folder / "tokenizer.json", self._folder / "tokenizer_config.json"
        tokenizer.write_text(self._tokenizer.to_str())
        template.write_text(
            json.dumps({"chat_template": TEMPLATES[self._name], "bos_token": "<s>", "eos_token": "</s>"})
        )
        address = f"127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"
        client, channels = scripted_client(tokenizer, verifier=address, model=MODEL, chat_template=template)
        channels.script = self._script()
        channels.paced = False
        self._daemon = Daemon(DaemonConfig(listen="127.0.0.1:0", grace_s=0.2), client)
        self._daemon.cloud.every_s = 0.05
        url = await self._daemon.start()
        while self._daemon.cloud.health.status != "ok":  # noqa: ASYNC110 - the watch has no event for it
            await asyncio.sleep(0.01)
        return url

    async def stop(self) -> None:
        """End the daemon."""
        if self._daemon is not None:
            await self._daemon.stop()
        if self._listener is not None:
            self._listener.close()

    def _script(self) -> Callable[[Open], Sequence[CommittedToken]]:
        def tokens(frame: Open) -> Sequence[CommittedToken]:
            prompt = self._tokenizer.decode(list(frame.prompt), skip_special_tokens=False)
            written = self._tokenizer.encode(answer_to(self._form, prompt), add_special_tokens=False).ids
            return [CommittedToken(token, -0.5, TokenFacts(-0.5, 1)) for token in [*written, *[EOS] * 8]]

        return tokens


async def main(folder: Path) -> None:
    """Serve a daemon for each template, until cancelled."""
    from outrider.cloud.models.family_index import target_folder, tokenizer_file

    targets = {name: SpeakingTarget(name, tokenizer_file(target_folder("reference")), folder) for name in TEMPLATES}
    print(json.dumps({name: await target.start() for name, target in targets.items()}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
