"""Commands that decode on a scripted cloud: what they would ask a verifier for is written beforehand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from scripted_cloud import EOS, scripted_client
from tokenizers import Tokenizer

from outrider.cloud.models.family_index import target_folder, tokenizer_file
from outrider.deploy.arguments import Given
from outrider.edge import Client
from outrider.proto.types import CommittedToken, Open

FILE = tokenizer_file(target_folder("reference"))
TEMPLATE = target_folder("reference") / "chat_template.jinja"
TOKENIZER = Tokenizer.from_file(str(FILE))


def tokens_of(text: str) -> list[CommittedToken]:
    """Return the tokens of a text, and its end."""
    return [CommittedToken(token) for token in [*TOKENIZER.encode(text, add_special_tokens=False).ids, EOS]]


class ScriptedTexts:
    """A cloud that gives these texts one after the other.

    Attributes:
        opened: prompt of each text, as the verifier got it, and the sampling's seed.
    """

    def __init__(
        self, texts: Sequence[str], *, sizes: Sequence[int] = (), template: bool = False, **config: Any
    ) -> None:
        self.opened: list[tuple[str, int]] = []
        self._left = list(texts)
        self._config = config | ({"chat_template": TEMPLATE} if template else {})
        self._sizes = sizes

    async def make_client(self, _: Given) -> Client:
        """Return a client of this cloud, in place of a command's own."""
        client, channels = scripted_client(FILE, **self._config)
        channels.script = self._script
        channels.sizes = self._sizes
        return client

    def opening(self) -> Callable[[Given], AbstractAsyncContextManager[Client]]:
        """Return what opens and closes such a client."""

        @asynccontextmanager
        async def opened(given: Given) -> AsyncIterator[Client]:
            client = await self.make_client(given)
            await client.find()
            try:
                yield client
            finally:
                await client.close()

        return opened

    def _script(self, frame: Open) -> list[CommittedToken]:
        prompt = TOKENIZER.decode(list(frame.prompt), skip_special_tokens=False)
        self.opened.append((prompt, frame.sampling.seed))
        return tokens_of(self._left.pop(0))
