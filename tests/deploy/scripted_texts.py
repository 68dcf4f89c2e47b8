"""Commands that decode on a scripted cloud: what they would ask a verifier for is written beforehand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from scripted_cloud import EOS, ScriptedChannels, scripted_client
from tokenizers import Tokenizer

from outrider.cloud.family_index import target_folder, tokenizer_file
from outrider.deploy.arguments import Given
from outrider.edge import Client
from outrider.proto.types import CommittedToken, Open

FILE = tokenizer_file(target_folder("reference"))
TEMPLATE = target_folder("reference") / "tokenizer_config.json"
TOKENIZER = Tokenizer.from_file(str(FILE))


def tokens_of(text: str) -> list[CommittedToken]:
    """Return the tokens of a text, and its end."""
    return [CommittedToken(token) for token in [*TOKENIZER.encode(text, add_special_tokens=False).ids, EOS]]


class ScriptedTexts:
    """A cloud that gives these texts one after the other, or what `script` answers.

    Attributes:
        opened: prompt of each text, as the verifier got it.
    """

    def __init__(self, texts: Sequence[str], *, sizes: Sequence[int] = (), template: bool = False) -> None:
        self.opened: list[str] = []
        self._left = list(texts)
        self._template = template
        self._sizes = sizes
        self.channels: ScriptedChannels | None = None

    def script(self, frame: Open) -> list[CommittedToken]:
        self.opened.append(TOKENIZER.decode(list(frame.prompt), skip_special_tokens=False))
        return tokens_of(self._left.pop(0))

    def opening(self) -> Callable[[Given], object]:
        """Return what opens a command's client."""

        @asynccontextmanager
        async def opened(_: Given) -> AsyncIterator[Client]:
            more = {"chat_template": TEMPLATE} if self._template else {}
            client, self.channels = scripted_client(FILE, **more)
            self.channels.script = self.script
            self.channels.sizes = self._sizes
            await client.find()
            try:
                yield client
            finally:
                await client.close()

        return opened
