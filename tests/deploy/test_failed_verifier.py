"""`outrider verifier` whose steps all fail: the process ends by itself, and says why."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.cloud import server
from outrider.cloud.slots import Outbox
from outrider.cloud.testing import save_tiny_target
from outrider.deploy import servers
from outrider.deploy.cli import parse
from outrider.proto.errors import Unavailable
from outrider.proto.types import Open, Sampling


class Ignoring(Outbox):
    def put(self, item: Any) -> None:
        pass

    def unread(self) -> int:
        return 0


class FailingServer(server.VerifierServer):
    async def start(self) -> str:
        address = await super().start()
        self._engine._runner._target.forward = lambda batch: 1 // 0  # type: ignore[assignment, method-assign]
        frame = Open(self.rules.model, self.tokenizer_sha256, (5, 6, 7), Sampling(), session="s", drafting=False)
        self._engine.post_open(0, frame, Ignoring())
        return address


def test_the_command_ends_by_itself_with_an_error_that_says_why(tmp_path, monkeypatch, capsys) -> None:
    folder = save_tiny_target(tmp_path)
    monkeypatch.setattr(server, "VerifierServer", FailingServer)
    with pytest.raises(Unavailable, match="no step succeeds"):
        servers.verifier(parse(["verifier", "--target", str(folder), "--target-threads", "1"]))
    assert capsys.readouterr().out.startswith("verifier verifier of ")
