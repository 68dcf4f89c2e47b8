"""Messages of a chat as turns of one conversation, so that each sends and computes only what is new."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from outrider.edge import Client, Conversation, Event, Finished, Sampling
from outrider.edge.chat.rendering import TemplateProcess
from outrider.proto.errors import FailedPrecondition

Message = dict[str, str]


class ChatTurns:
    """A chat with the target's model: what was said, and the conversation that holds it.

    Each prompt is the one that the chat template makes of all messages. Where it begins with the conversation's
    transcript, the turn continues that; elsewhere (after /retry, or where the template writes an answer in another way
    than the model) it begins another conversation, and the verifier computes what its cache of prefixes lacks.

    Attributes:
        messages: what was said, a system prompt first if there is one.
        continued: tokens of the last prompt that the conversation held already.
    """

    def __init__(
        self, client: Client, template: TemplateProcess, system: str, sampling: Sampling, stop: tuple[str, ...]
    ) -> None:
        self.messages: list[Message] = []
        self.continued = 0
        self._client = client
        self._template = template
        self._sampling = sampling
        self._stop = stop
        self._conversation: Conversation | None = None
        self.system = system

    @classmethod
    async def open(cls, client: Client, system: str, sampling: Sampling, stop: tuple[str, ...]) -> ChatTurns:
        """Find the target, and start the process of its chat template.

        Raises:
            FailedPrecondition: the target has no chat template.
            OutriderError: nobody answers.
        """
        ready = await client.find()
        template = await TemplateProcess.of(ready.chat_template)
        if template is None:
            raise FailedPrecondition(
                f"{ready.model} has none; give its file, or use `outrider generate`", field="chat_template"
            )
        return cls(client, template, system, sampling, stop)

    @property
    def system(self) -> str:
        """System prompt; empty: none."""
        return next((message["content"] for message in self.messages if message["role"] == "system"), "")

    @system.setter
    def system(self, text: str) -> None:
        said = [message for message in self.messages if message["role"] != "system"]
        self.messages = [{"role": "system", "content": text}, *said] if text else said

    @property
    def last_question(self) -> str:
        """The user's last message; empty: there is none."""
        asked = [message["content"] for message in self.messages if message["role"] == "user"]
        return asked[-1] if asked else ""

    def forget(self) -> None:
        """Begin again, with the same system prompt."""
        self.messages = self.messages[:1] if self.system else []

    def take_back(self) -> str:
        """Remove the last question and its answer, and return the question; empty: there is none."""
        question = self.last_question
        while question and self.messages.pop()["role"] != "user":
            pass
        return question

    async def say(self, content: str, *, seed_offset: int = 0) -> AsyncGenerator[Event]:
        """Ask, and yield the events of the answer; what came of one that was left early stays part of the chat.

        Raises:
            OutriderError: the answer cannot be finished anywhere, or the template refuses the messages.
        """
        messages = [*self.messages, {"role": "user", "content": content}]
        conversation, new = await self._continued(messages)
        sampling = replace(self._sampling, seed=(self._sampling.seed + seed_offset) % (1 << 64))
        answer, answered = "", False
        try:
            async with aclosing(conversation.say(new, sampling)) as events:
                async for event in events:
                    answer += event.text
                    answered |= bool(answer) or isinstance(event, Finished)
                    yield event
        finally:
            if answered:
                self.messages = [*messages, {"role": "assistant", "content": answer}]

    async def close(self) -> None:
        """End the conversation and the template's process; the client is closed by whoever made it."""
        await self._leave()
        await self._template.close()

    async def _continued(self, messages: list[Message]) -> tuple[Conversation, tuple[int, ...]]:
        """Return the conversation for a prompt, and those of the prompt's tokens that it does not hold yet."""
        ready = await self._client.find()
        prompt = await ready.encode_prompt(await self._template.render(messages), special=False)
        kept = self._conversation.transcript.tokens if self._conversation is not None else ()
        if self._conversation is None or len(prompt) <= len(kept) or prompt[: len(kept)] != kept:
            await self._leave()
            self._conversation, kept = self._client.conversation(self._sampling, stop=self._stop), ()
        self.continued = len(kept)
        return self._conversation, prompt[len(kept) :]

    async def _leave(self) -> None:
        conversation, self._conversation = self._conversation, None
        if conversation is not None:
            await conversation.close()
