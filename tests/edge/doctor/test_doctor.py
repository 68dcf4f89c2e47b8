"""The doctor's whole round on a real verifier and coordinator, well and unwell."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from other_tokenizer import byte_tokenizer, with_tokenizer

from outrider.drafters.packages import FAMILY, find_package
from outrider.edge import Client, EdgeConfig, examination
from outrider.edge.examination import Endpoint, Finding, Outcome, examine, failed_by
from outrider.edge.link.security import Security
from outrider.proto import errors
from outrider.proto.plumbing.access import Key, new_secret, secret_sha256
from outrider.proto.plumbing.tls import ClientTls, ServerTls
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
    found = outcomes(asyncio.run(examine(config(coordinator=cloud.coordinator, drafter="none"))))
    assert (found["drafter"], found["text"]) == (Outcome.SKIPPED, Outcome.OK)
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
    assert "nothing listens" in finding(examined, "coordinator port").message
    assert "outrider coordinator" in finding(examined, "coordinator port").remedy
    assert "(OUT-101)" in finding(examined, "coordinator port").message
    assert finding(examined, "text").message == "coordinator port failed"
    assert finding(examined, "drafter").outcome is Outcome.SKIPPED


def test_a_verifier_is_no_coordinator_and_the_other_way_round(cloud, config) -> None:
    examined = asyncio.run(examine(config(coordinator=cloud.verifier)))
    assert "--verifier" in finding(examined, "coordinator answers").remedy
    assert "(OUT-107)" in finding(examined, "coordinator answers").message
    examined = asyncio.run(examine(config(verifier=cloud.coordinator, model="reference", drafter="general")))
    assert "--coordinator" in finding(examined, "verifier answers").remedy


def test_an_unknown_model_fails_at_the_lease(cloud, config) -> None:
    lease = finding(asyncio.run(examine(config(coordinator=cloud.coordinator, model="nobody"))), "lease")
    assert lease.outcome is Outcome.FAILED
    assert "--model" in lease.remedy
    assert "(OUT-308)" in lease.message


def test_a_wrong_tokenizer_is_found_by_its_hash_or_by_the_verifier(cloud, config, tmp_path) -> None:
    wrong = tmp_path / "tokenizer.json"
    changed = json.loads(find_package("general").tokenizer_path.read_text(encoding="utf-8"))
    changed["normalizer"] = {"type": "Lowercase"}
    wrong.write_text(json.dumps(changed))
    examined = asyncio.run(examine(config(coordinator=cloud.coordinator, tokenizer=wrong)))
    assert finding(examined, "session opens").outcome is Outcome.FAILED
    assert "--tokenizer" in finding(examined, "session opens").remedy
    assert "(OUT-406)" in finding(examined, "session opens").message
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
    assert "(OUT-302)" in opening.message


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
    assert "(OUT-201)" in finding(unknown, "lease").message
    assert "--tls-ca" in finding(plain, "coordinator TLS").remedy
    assert "(OUT-103)" in finding(plain, "coordinator TLS").message
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
    assert {"check", "code", "outcome", "message", "remedy"} == set(record["checks"][0])
    assert record["next"] == f"outrider chat --coordinator {cloud.coordinator} --cache {tmp_path}"
    assert main(["doctor", "--coordinator", "no-such-host.invalid:1", *cache]) == 1
    said = capsys.readouterr().out
    assert "failed   coordinator port" in said
    assert "no-such-host.invalid" in said.partition("failed   coordinator port")[2]
    assert "→" in said
    assert "--coordinator" in said


FOUND = {
    "well": examination.ok("it serves", check="lease"),
    "slow": examination.warning("it is slow", "run one nearer by", check="verifier answers"),
    "key": examination.failed("the key is unknown", "give --api-key-file", "OUT-201"),
    "text": examination.failed("two texts differ", "give --exact tiles"),
}


@pytest.mark.parametrize(
    ("found", "options", "last"),
    [
        (["well", "key", "text"], "", "give --api-key-file (`outrider explain OUT-201`)"),
        (["slow", "text", "key"], "", "give --exact tiles"),
        (["well", "slow"], "--plaintext --tls-ca 'my ca.pem' --drafter ngram", "outrider chat "),
        (["well"], "--api-key-file FILE --json", "outrider chat "),
    ],
)
def test_the_last_line_is_the_first_thing_to_mend_or_the_next_command(
    monkeypatch, capsys, found, options, last
) -> None:
    from outrider.deploy import doctor
    from outrider.deploy.cli import main, parse

    async def examined(*_):
        return [FOUND[name] for name in found]

    monkeypatch.setattr(doctor, "_examined", examined)
    given = ["doctor", "--coordinator", "127.0.0.1:50050", *shlex.split(options.replace("FILE", __file__))]
    failed = FOUND["key"] in asyncio.run(examined()) or FOUND["text"] in asyncio.run(examined())
    assert main(given) == failed
    said = capsys.readouterr().out
    shown = json.loads(said)["next"] if "--json" in given else said.splitlines()[-1].removeprefix("next: ")
    if failed:
        assert shown == last
        return
    assert shown.startswith(last)
    again, before = parse(shlex.split(shown)[1:]), parse(given)
    assert all(
        again.values[name] == value for name, value in before.values.items() if name in again.values and name != "json"
    )
    assert again(EdgeConfig).coordinator == "127.0.0.1:50050"


# --- each check alone, on servers that are well and on others that are not ---


def at(address: str, tls: ClientTls | None = None, service: str = "", role: str = "coordinator") -> Endpoint:
    name = tls.server_name if tls is not None else None
    return Endpoint(role, address, f"--{role}", service, Security(tls), name)


def test_a_warning_or_failure_without_a_remedy_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="it broke"):
        Finding(Outcome.FAILED, "it broke")


def test_every_error_has_a_remedy_that_names_an_option_or_a_command() -> None:
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.OutriderError)
    ]
    assert len(kinds) > 10
    for kind in kinds:
        remedy = failed_by(kind("went wrong")).remedy
        assert "--" in remedy or "`outrider" in remedy or "`pip" in remedy, kind
    assert "retry in 2 s" in failed_by(errors.ResourceExhausted("32 sessions run", retry_after_s=2.0)).remedy


# --- the way ---


async def test_a_service_that_drains_is_named(small_server) -> None:
    async with small_server(status=health_pb2.HealthCheckResponse.NOT_SERVING) as address:
        draining = await examination.time_answers(at(address))
    assert draining.outcome is Outcome.FAILED
    assert "NOT_SERVING" in draining.message


async def test_a_server_without_grpc_is_named() -> None:
    async def say_html(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(say_html, "127.0.0.1", 0) as server:
        found = await examination.time_answers(at(f"127.0.0.1:{server.sockets[0].getsockname()[1]}"))
    assert found.outcome is Outcome.FAILED
    assert "no gRPC" in found.message


# --- TLS ---


def credentials(cert: Path, key: Path, client_ca: Path | None = None) -> grpc.ServerCredentials:
    """Credentials with any certificate, also one that a server of ours would refuse to start with."""
    pair = [(key.read_bytes(), cert.read_bytes())]
    if client_ca is None:
        return grpc.ssl_server_credentials(pair)
    return grpc.ssl_server_credentials(pair, client_ca.read_bytes(), require_client_auth=True)


def inspected(small_server, shown: grpc.ServerCredentials | None, tls: ClientTls | None) -> Finding:
    async def main() -> Finding:
        async with small_server(credentials=shown) as address:
            return await examination.inspect_tls(at(address, tls))

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("days", "outcome", "message", "remedy"),
    [
        ((-1, 300), Outcome.OK, r"for localhost.* by CN=ours, (299|300) days left", ""),
        ((-20, -1), Outcome.FAILED, "is valid from.*this machine's clock says", "timedatectl"),
        ((1, 20), Outcome.FAILED, "is valid from.*this machine's clock says", "timedatectl"),
        ((-1, 3), Outcome.WARNING, "", "outrider certs"),
    ],
    ids=["good", "expired", "not yet valid", "soon expired"],
)
def test_a_certificate_is_looked_at_beside_the_clock(
    small_server, authority, tmp_path, days, outcome, message, remedy
) -> None:
    ours = authority("ours")
    found = inspected(small_server, credentials(*ours.sign(tmp_path, days=days)), ClientTls(ours.file))
    assert found.outcome is outcome, found
    assert re.search(message, found.message, re.DOTALL)
    assert remedy in found.remedy


def test_an_unknown_authority_and_a_wrong_name_are_distinguished(small_server, authority, tmp_path) -> None:
    ours, theirs = authority("ours"), authority("theirs")
    found = inspected(small_server, credentials(*ours.sign(tmp_path)), ClientTls(theirs.file))
    assert found.outcome is Outcome.FAILED
    assert "does not vouch" in found.message
    assert "--tls-ca" in found.remedy
    elsewhere = credentials(*ours.sign(tmp_path, names=("elsewhere.test",)))
    found = inspected(small_server, elsewhere, ClientTls(ours.file))
    assert found.outcome is Outcome.FAILED
    assert "elsewhere.test" in found.message
    assert "--tls-server-name" in found.remedy
    found = inspected(small_server, elsewhere, ClientTls(ours.file, server_name="elsewhere.test"))
    assert found.outcome is Outcome.OK


def test_a_server_that_wants_a_clients_certificate_gets_it_or_says_so(small_server, authority, tmp_path) -> None:
    ours = authority("ours")
    cert, key = ours.sign(tmp_path)
    mutual = credentials(cert, key, ours.file)
    found = inspected(small_server, mutual, ClientTls(ours.file))
    assert found.outcome is Outcome.FAILED
    assert "--tls-cert" in found.remedy
    assert inspected(small_server, mutual, ClientTls(ours.file, cert, key)).outcome is Outcome.OK


def test_tls_on_one_side_only_fails_and_plain_text_on_loopback_is_skipped(small_server, authority, tmp_path) -> None:
    ours = authority("ours")
    found = inspected(small_server, None, ClientTls(ours.file))
    assert found.outcome is Outcome.FAILED
    assert "does not speak TLS" in found.message
    found = inspected(small_server, credentials(*ours.sign(tmp_path)), None)
    assert found.outcome is Outcome.FAILED
    assert "--tls-ca" in found.remedy
    assert inspected(small_server, None, None).outcome is Outcome.SKIPPED


def test_a_file_that_holds_no_certificate_is_named(small_server, tmp_path) -> None:
    rubbish = tmp_path / "rubbish.pem"
    rubbish.write_text("rubbish")
    with pytest.raises(errors.ConfigError, match=r"rubbish\.pem"):
        inspected(small_server, None, ClientTls(rubbish))


# --- the link ---


def test_a_long_way_is_a_warning_with_its_length(small_server, monkeypatch) -> None:
    monkeypatch.setattr(examination, "CALLS", 3)

    async def measured(delay_s: float) -> Finding:
        async with small_server(delay_s=delay_s) as address:
            return await examination.time_answers(at(address))

    assert asyncio.run(measured(0.0)).outcome is not Outcome.FAILED
    long = asyncio.run(measured(0.3))
    assert long.outcome is Outcome.WARNING
    assert "so long that drafts gain little" in long.message
    assert "outrider bench --rtt 3" in long.remedy
