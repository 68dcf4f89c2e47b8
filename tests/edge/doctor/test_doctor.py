"""The doctor's whole round on a real verifier and coordinator, well and unwell."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest
from other_tokenizer import byte_tokenizer, with_tokenizer

from outrider.drafters.packages import FAMILY, find_package
from outrider.edge import Client, EdgeConfig, examination
from outrider.edge.examination import Finding, Outcome, examine
from outrider.proto.plumbing.access import Key, new_secret, secret_sha256
from outrider.proto.plumbing.tls import ServerTls
from outrider.proto.testing import word_tokenizer, write_keys


@pytest.fixture
def config(tmp_path):
    """A config whose cache is empty, so that everything is fetched."""
    return lambda **fields: EdgeConfig(**{"cache": tmp_path / "cache", **fields})


def outcomes(examined: list[Finding]) -> dict[str, Outcome]:
    return {one.check: one.outcome for one in examined}


def finding(examined: list[Finding], check: str) -> Finding:
    return next(one for one in examined if one.check == check)


def test_a_healthy_cluster_has_no_complaint(cloud, config) -> None:
    reported: list[Finding] = []
    examined = asyncio.run(examine(config(coordinator=cloud.coordinator), reported.append))
    assert reported == examined
    found = outcomes(examined)
    # A busy machine may well be slow, so warnings about speed are no failures of this test.
    assert Outcome.FAILED not in found.values(), examined
    assert [check for check, outcome in found.items() if outcome is Outcome.SKIPPED] == [
        "coordinator TLS",
        "verifier TLS",
    ]
    assert "16 tokens, the same both ways" in finding(examined, "text").message
    assert "releases differ" not in finding(examined, "session opens").message


def test_a_verifier_alone_is_looked_at_without_what_only_a_coordinator_knows(cloud, config) -> None:
    examined = asyncio.run(examine(config(verifier=cloud.verifier, model="reference", drafter="general")))
    found = outcomes(examined)
    assert Outcome.FAILED not in found.values(), examined
    assert "lease" not in found
    assert found["text"] in (Outcome.OK, Outcome.WARNING)


def test_what_needs_a_failed_check_is_skipped_and_names_it(config) -> None:
    examined = asyncio.run(examine(config(coordinator="127.0.0.1:1")))
    found = outcomes(examined)
    assert [check for check, outcome in found.items() if outcome is Outcome.FAILED] == ["coordinator port"]
    assert finding(examined, "text").message == "coordinator port failed"
    assert finding(examined, "drafter").outcome is Outcome.SKIPPED


def test_a_verifier_is_no_coordinator_and_the_other_way_round(cloud, config) -> None:
    examined = asyncio.run(examine(config(coordinator=cloud.verifier)))
    assert "--verifier" in finding(examined, "coordinator answers").remedy
    examined = asyncio.run(examine(config(verifier=cloud.coordinator, model="reference", drafter="general")))
    assert "--coordinator" in finding(examined, "verifier answers").remedy


def test_an_unknown_model_fails_at_the_lease(cloud, config) -> None:
    lease = finding(asyncio.run(examine(config(coordinator=cloud.coordinator, model="nobody"))), "lease")
    assert lease.outcome is Outcome.FAILED
    assert "--model" in lease.remedy


def test_a_wrong_tokenizer_is_found_by_its_hash_or_by_the_verifier(cloud, config, tmp_path) -> None:
    wrong = tmp_path / "tokenizer.json"
    changed = json.loads(find_package("general").tokenizer_path.read_text(encoding="utf-8"))
    changed["normalizer"] = {"type": "Lowercase"}
    wrong.write_text(json.dumps(changed))
    examined = asyncio.run(examine(config(coordinator=cloud.coordinator, tokenizer=wrong)))
    assert finding(examined, "session opens").outcome is Outcome.FAILED
    assert "--tokenizer" in finding(examined, "session opens").remedy
    examined = asyncio.run(
        examine(config(verifier=cloud.verifier, model="reference", tokenizer=wrong, drafter="ngram"))
    )
    opening = finding(examined, "session opens")
    assert opening.outcome is Outcome.FAILED
    assert "tokenizer" in opening.message
    missing = asyncio.run(examine(config(verifier=cloud.verifier, model="reference")))
    assert "--tokenizer" in finding(missing, "session opens").message


def test_a_drafter_with_another_tokenizer_is_said_to_draft_by_text(cloud, config, tmp_path) -> None:
    foreign = with_tokenizer(tmp_path / "foreign", byte_tokenizer())
    drafter = finding(asyncio.run(examine(config(coordinator=cloud.coordinator, drafter=str(foreign)))), "drafter")
    assert drafter.outcome is Outcome.OK
    assert "drafts by text, since its tokenizer is another than the target's" in drafter.message
    words = with_tokenizer(tmp_path / "words", word_tokenizer(100))
    drafter = finding(asyncio.run(examine(config(coordinator=cloud.coordinator, drafter=str(words)))), "drafter")
    assert drafter.outcome is Outcome.FAILED
    assert "cannot draft by text" in drafter.message


def test_a_damaged_drafter_is_named_and_the_rest_is_still_looked_at(cloud, config, tmp_path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(FAMILY / "general", broken)
    (broken / "model.onnx").write_bytes((broken / "model.onnx").read_bytes()[:-1] + b"x")
    examined = asyncio.run(examine(config(coordinator=cloud.coordinator, drafter=str(broken))))
    drafter = finding(examined, "drafter")
    assert drafter.outcome is Outcome.FAILED
    assert "model.onnx" in drafter.message
    assert "--drafter ngram" in drafter.remedy
    assert finding(examined, "session opens").outcome is Outcome.OK
    assert finding(examined, "text").message == "drafter failed"


def test_without_a_drafter_there_is_nothing_to_load_and_the_text_still_comes(cloud, config) -> None:
    examined = asyncio.run(examine(config(coordinator=cloud.coordinator, drafter="none")))
    found = outcomes(examined)
    assert found["drafter"] is Outcome.SKIPPED
    assert found["text"] is Outcome.OK


def test_a_drafter_by_text_needs_the_targets_tokenizer_without_coordinator(
    cloud, config, tmp_path, tokenizer_file
) -> None:
    direct = {"verifier": cloud.verifier, "model": "reference"}
    foreign = str(with_tokenizer(tmp_path / "foreign", byte_tokenizer()))
    examined = asyncio.run(examine(config(**direct, drafter=foreign)))
    session = finding(examined, "session opens")
    assert "tokenizer" in session.message
    assert session.remedy.startswith("give --tokenizer the target's tokenizer.json")
    for drafter in (foreign, f"code,{foreign}"):
        given = tokenizer_file if drafter == foreign else None
        examined = asyncio.run(examine(config(**direct, drafter=drafter, tokenizer=given)))
        assert Outcome.FAILED not in outcomes(examined).values(), examined
        assert "by text" in finding(examined, "drafter").message


def test_a_verifier_that_is_full_says_so(cloud, config, tokenizer_file, monkeypatch) -> None:
    monkeypatch.setattr(examination, "TIMEOUT_S", 1.0)

    async def main() -> list[Finding]:
        edge = EdgeConfig(verifier=cloud.verifier, model="reference", tokenizer=tokenizer_file, drafter="none")
        async with Client(edge) as occupant:
            texts = [
                occupant.generate("Once upon a time", max_tokens=1900, ignore_eos=True) for _ in range(cloud.slots)
            ]
            for text in texts:
                await anext(text)
            try:
                return await examine(
                    config(verifier=cloud.verifier, model="reference", tokenizer=tokenizer_file, drafter="none")
                )
            finally:
                for text in texts:
                    await text.aclose()

    opening = finding(asyncio.run(main()), "session opens")
    assert opening.outcome is Outcome.FAILED
    assert "--max-sessions" in opening.remedy


def test_tls_an_api_key_and_a_relay_are_seen_through(cloud, config, authority, tmp_path) -> None:
    ours = authority("ours")
    cert, key = ours.sign(tmp_path)
    secret = new_secret()
    keys = write_keys(tmp_path / "keys.toml", Key("tester", secret_sha256(secret)))
    with cloud.coordinated(tls=ServerTls(cert, key), api_keys=keys, relay=True) as address:
        well = asyncio.run(examine(config(coordinator=address, tls_ca=ours.file, api_key=secret)))
        unknown = asyncio.run(examine(config(coordinator=address, tls_ca=ours.file, api_key="wrong")))
        plain = asyncio.run(examine(config(coordinator=address, api_key=secret)))
    assert Outcome.FAILED not in outcomes(well).values(), well
    assert finding(well, "coordinator TLS").outcome is Outcome.OK
    assert "relays" in finding(well, "lease").message
    assert "verifier port" not in outcomes(well)
    assert "the same both ways" in finding(well, "text").message
    assert finding(unknown, "lease").outcome is Outcome.FAILED
    assert "--api-key-file" in finding(unknown, "lease").remedy
    assert "--tls-ca" in finding(plain, "coordinator TLS").remedy
    assert secret not in repr((well, unknown, plain))


def test_a_check_that_breaks_is_a_failure_and_the_rest_is_still_reported(cloud, config, monkeypatch) -> None:
    async def broken(at) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(examination, "inspect_tls", broken)
    examined = asyncio.run(examine(config(verifier=cloud.verifier, model="reference", drafter="general")))
    assert finding(examined, "verifier TLS").outcome is Outcome.FAILED
    assert "a defect" in finding(examined, "verifier TLS").message
    assert finding(examined, "text").message == "verifier TLS failed"


def test_the_command_prints_remedies_or_json_and_its_status_tells(cloud, capsys, tmp_path) -> None:
    from outrider.deploy.cli import main

    cache = ["--cache", str(tmp_path)]
    assert main(["doctor", "--coordinator", cloud.coordinator, "--json", *cache]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["release"]
    assert {"check", "outcome", "message", "remedy"} == set(record["checks"][0])
    assert main(["doctor", "--coordinator", "no-such-host.invalid:1", *cache]) == 1
    said = capsys.readouterr().out
    assert "failed   coordinator port" in said
    assert "→" in said
    assert "--coordinator" in said
