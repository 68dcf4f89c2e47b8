"""`outrider edge --server`: every door of the daemon over a server that is not ours; texts equal our own engine's."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from command_processes import Command, free_port
from openai import AsyncOpenAI, BadRequestError
from scoring_double import ScoringDouble
from tool_templates import QWEN

from outrider.cloud.models.family_index import load_causal_lm, target_folder
from outrider.cloud.probes.vllm_server import VllmServer
from outrider.cloud.serving.server_loading import load_probe_engine
from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy.commands.edge_options import ServerSettings
from outrider.deploy.local.server_here import verifier_here
from outrider.edge import Client, EdgeConfig
from outrider.edge.daemon import DaemonConfig
from outrider.edge.daemon.http_server import Daemon
from outrider.edge.link.routes import DirectRoute
from outrider.proto.errors import ConfigError, Unavailable

VOCAB, CONTEXT = 8192, 2048
CHAT: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]
PROMPT = "def main(argv):\n    parser = argparse.ArgumentParser()\n"
CARDS = {"reference": {"root": "/models/reference", "max_model_len": CONTEXT}}
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.95, "seed": 3, "extra_body": {"top_k": 20}},
    {"temperature": 1.0, "seed": 4},
    {"temperature": 0.5, "seed": 5, "presence_penalty": 0.8, "logit_bias": {"11": -5, "12": 2}},
)


class Reference:
    """The embedded target as the language of a double: float32, by transformers' own forward pass."""

    def __init__(self) -> None:
        self._model = load_causal_lm(target_folder("reference"), "is not there", field="target")
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def __call__(self, text: tuple[int, ...]) -> np.ndarray:
        if text not in self._known:
            with torch.inference_mode():
                logits = self._model(torch.tensor([text])).logits[0]
            logp = torch.log_softmax(logits.float(), dim=-1).numpy()
            self._known |= {text[: end + 1]: logp[end] for end in range(len(text))}
        return self._known[text]


@dataclass
class Setting:
    """A server, the daemon over it, and a client of our own verifier of the same target."""

    double: ScoringDouble
    openai: AsyncOpenAI
    ours: Client


def model_folder(folder: Path, tokenizer_file: Path) -> Path:
    """The files of a model but its weights."""
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(target_folder("reference") / name, folder / name)
    shutil.copy(tokenizer_file, folder / "tokenizer.json")
    return folder


@asynccontextmanager
async def setting(folder: Path, **double: Any) -> AsyncIterator[Setting]:
    server = ScoringDouble(vocab=VOCAB, language=Reference(), max_logprobs=-1, cards=CARDS, **double)
    verifier = VerifierServer(VerifierConfig(threads=1, dtype="float32", listen="127.0.0.1:0"))
    asked = ServerSettings(server=f"http://127.0.0.1:{(await server.__aenter__()).port}")
    tokenizer = folder / "tokenizer.json"
    async with verifier_here(asked, folder) as (_, where):
        daemon = Daemon(DaemonConfig(listen="127.0.0.1:0", grace_s=0.1), Client(EdgeConfig(drafter="ngram", **where)))
        daemon.cloud.every_s = 0.1
        url = await daemon.start()
        ours = EdgeConfig(verifier=await verifier.start(), model="reference", tokenizer=tokenizer, drafter="none")
        try:
            await asyncio.wait_for(daemon.cloud.found.wait(), 30)
            openai = AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
            async with openai, Client(ours) as client:
                yield Setting(server, openai, client)
        finally:
            await daemon.stop()
            await verifier.stop(0)
            await server.__aexit__(None, None, None)


@pytest.mark.parametrize("double", [{}, {"runner": "V2"}, {"scale_out": False}], ids=["rows", "V2", "prompts"])
async def test_texts_are_those_of_our_own_engine(double: dict[str, Any], tmp_path: Path, tokenizer_file: Path) -> None:
    async with setting(model_folder(tmp_path, tokenizer_file), **double) as at:
        for settings in SETTINGS:
            asked = {"model": "reference", "prompt": PROMPT, "max_tokens": 40, **settings}
            text = await at.openai.completions.create(**asked)
            sampling = {**settings, **settings.get("extra_body", {})}
            sampling.pop("extra_body", None)
            bias = {int(token): value for token, value in sampling.pop("logit_bias", {}).items()}
            expected = await at.ours.complete(PROMPT, max_tokens=40, logit_bias=tuple(bias.items()), **sampling)
            assert text.choices[0].text == expected.text
            chunks = [each async for each in await at.openai.completions.create(**asked, stream=True)]
            assert "".join(each.choices[0].text for each in chunks if each.choices) == expected.text


async def test_a_chat_with_a_prediction_json_and_log_probabilities(tmp_path: Path, tokenizer_file: Path) -> None:
    async with setting(model_folder(tmp_path, tokenizer_file)) as at:
        asked: dict[str, Any] = {"model": "reference", "messages": CHAT, "max_tokens": 24, "temperature": 0}
        plain = await at.openai.chat.completions.create(**asked, logprobs=True, top_logprobs=4)
        content = plain.choices[0].message.content
        assert content
        told = plain.choices[0].logprobs
        assert told is not None
        assert told.content is not None
        assert [len(each.top_logprobs) for each in told.content] == [4] * len(told.content)
        assert all(each.logprob == max(top.logprob for top in each.top_logprobs) for each in told.content)
        predicted = await at.openai.chat.completions.create(**asked, prediction={"type": "content", "content": content})
        assert predicted.choices[0].message.content == content
        schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
        shape: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
        answer = await at.openai.chat.completions.create(**asked | {"max_tokens": 60}, response_format=shape)
        if answer.choices[0].finish_reason == "stop":
            jsonschema.validate(json.loads(answer.choices[0].message.content or ""), schema)
        else:
            assert (answer.choices[0].message.content or "").lstrip().startswith("{")


async def test_a_tool_is_called_in_the_templates_format(tmp_path: Path, tokenizer_file: Path) -> None:
    folder = model_folder(tmp_path, tokenizer_file)
    (folder / "chat_template.jinja").write_text(QWEN)
    async with setting(folder) as at:
        tool: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
        asked: dict[str, Any] = {"model": "reference", "messages": CHAT, "max_tokens": 80, "temperature": 0}
        answer = await at.openai.chat.completions.create(**asked, tools=[tool], tool_choice="required")
        calls = answer.choices[0].message.tool_calls
        assert calls or answer.choices[0].finish_reason == "length"
        assert not calls or calls[0].function.name == "add"  # type: ignore[union-attr]


async def test_a_text_goes_on_at_another_verifier_of_the_server(tmp_path: Path, tokenizer_file: Path) -> None:
    folder, sampling = model_folder(tmp_path, tokenizer_file), {"temperature": 0.7, "top_k": 20, "seed": 3}
    async with ScoringDouble(vocab=VOCAB, language=Reference(), max_logprobs=-1, cards=CARDS, step_s=0.01) as double:
        verifiers = []
        for name in ("a", "b"):
            where = {"engine": "probes", "target_url": double.url, "target_tokenizer": folder}
            config = VerifierConfig(name=name, draft_here="on", draft_with="ngram", **where)
            verifiers.append(VerifierServer(config, engine=await load_probe_engine(config)))
        addresses = [await verifier.start() for verifier in verifiers]
        edge = EdgeConfig(verifier=addresses[0], model="reference", tokenizer=tokenizer_file, drafter="ngram")
        async with Client(edge) as client:
            await client.prepare()
            whole = await client.complete(PROMPT, max_tokens=40, **sampling)
            assert client.ready is not None
            route = DirectRoute(tuple(addresses), "reference", client.ready.tokenizer_sha256)
            object.__setattr__(client.ready, "route", route)
            text, ended = "", False
            async for event in client.generate(PROMPT, max_tokens=40, **sampling):
                text += event.text
                if len(text) > 20 and not ended:
                    ended = True
                    await verifiers[0].stop(0)
            assert text == whole.text
        status = verifiers[1].status()
        assert status.committed_tokens > 0
        assert verifiers[0].status().drafted_here > 0
        assert status.server.startswith("vLLM 0.32.0, V1: all rows of a probe in one prompt")
        await verifiers[1].stop(0)


async def test_what_a_server_cannot_do_is_refused_by_name(tmp_path: Path, tokenizer_file: Path) -> None:
    async with setting(model_folder(tmp_path, tokenizer_file)) as at:
        with pytest.raises(BadRequestError, match="repetition_penalty"):
            await at.openai.completions.create(model="reference", prompt=PROMPT, extra_body={"repetition_penalty": 1.2})
        with pytest.raises(BadRequestError, match="logprobs"):
            await at.openai.completions.create(model="reference", prompt=PROMPT, echo=True, logprobs=1)


@pytest.mark.parametrize(("template", "alike"), [("{{ messages[0].content }}", False), ("{% broken", True)])
async def test_a_template_that_is_not_the_servers_is_said_and_a_bad_one_ends_nothing(
    template: str, alike: bool, tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    async def chat(self: VllmServer, messages: Any) -> list[int]:
        return [5, 6, 7]

    monkeypatch.setattr(VllmServer, "chat", chat)
    folder = model_folder(tmp_path, tokenizer_file)
    (folder / "chat_template.jinja").write_text(template)
    double = ScoringDouble(vocab=VOCAB, cards=CARDS, port=free_port())
    here = verifier_here(ServerSettings(server=double.url), folder, wait=False)
    async with double, here as (facts, where):
        assert facts.model == where["model"] == "reference"
    assert ("renders chats by another template" in caplog.text) is not alike


def test_a_command_that_lacks_a_package_names_the_extra_that_has_it(tmp_path: Path) -> None:
    without = "import sys; sys.modules['aiohttp'] = None; "
    code = f"{without}from outrider.deploy.cli import main; sys.exit(main(sys.argv[1:]))"
    words = ["edge", "--server", "http://127.0.0.1:9", "--tokenizer", str(tmp_path)]
    ended = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "[server]" in ended.stderr
    assert "Traceback" not in ended.stderr


async def test_settings_of_a_server_that_are_wrong_name_their_option(tmp_path: Path, tokenizer_file: Path) -> None:
    folder, key = model_folder(tmp_path, tokenizer_file), tmp_path / "key"
    key.write_text("wrong")

    async def serve(tokenizer: Path | None = folder, **asked: Any) -> None:
        async with verifier_here(ServerSettings(**asked), tokenizer, wait=False):
            pass

    with pytest.raises(ConfigError, match="server_model: needs --server"):
        ServerSettings(server_model="m")
    with pytest.raises(Unavailable, match="is the server running"):
        await serve(server=f"http://127.0.0.1:{free_port()}")
    async with ScoringDouble(vocab=VOCAB, api_key="right", cards=CARDS) as double:
        url = double.url
        with pytest.raises(ConfigError, match=r"server_key_file.*--server-key-file"):
            await serve(server=url)
        with pytest.raises(ConfigError, match="server_key_file") as refused:
            await serve(server=url, server_key_file=key)
        assert "wrong" not in str(refused.value)
        key.write_text("right")
        with pytest.raises(ConfigError, match=r"server_model: .*'refrence'"):
            await serve(server=url, server_key_file=key, server_model="refrence")
        with pytest.raises(ConfigError, match="tokenizer: is missing, and /models/reference is not here"):
            await serve(None, server=url, server_key_file=key)
        with pytest.raises(ConfigError, match=r"tokenizer: .* holds no tokenizer.json"):
            await serve(tmp_path / "nowhere", server=url, server_key_file=key)
        (folder / "config.json").unlink()
        (folder / "generation_config.json").unlink()
        (folder / "tokenizer_config.json").unlink()
        with pytest.raises(ConfigError, match="does not say which token ends a text"):
            await serve(server=url, server_key_file=key)
        (folder / "tokenizer.json").write_text("{}")
        with pytest.raises(ConfigError, match="is no tokenizer"):
            await serve(server=url, server_key_file=key)


async def test_the_command_waits_for_its_server_and_ends_by_a_signal(tmp_path: Path, tokenizer_file: Path) -> None:
    folder, port = model_folder(tmp_path, tokenizer_file), free_port()
    command = Command(
        *("edge", "--server", f"http://127.0.0.1:{port}", "--tokenizer", str(folder)),
        *("--listen", "127.0.0.1:0", "--drafter", "ngram"),
        log=tmp_path / "log",
    )
    command.start()
    await asyncio.sleep(3.0)
    double = ScoringDouble(vocab=VOCAB, port=port, cards=CARDS)
    async with double:
        line = await asyncio.to_thread(command.line)
        assert line.startswith("edge daemon on http://127.0.0.1:")
        url = line.split()[-1]
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=5) as openai:
            text = await openai.completions.create(model="reference", prompt=PROMPT, max_tokens=8, temperature=0)
        assert text.usage is not None
        assert text.usage.completion_tokens <= 8
        assert await asyncio.to_thread(command.terminate) == 0
