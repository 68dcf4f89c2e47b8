"""API keys: who has one, where they come from, and what each may use."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.proto.errors import ConfigError, ResourceExhausted, Unauthenticated
from outrider.proto.plumbing import access
from outrider.proto.plumbing.access import SECRET_PREFIX, Bucket, Key, Keys, Limits, new_secret, secret_sha256


def key(name="alice", secret="the secret", **limits):
    return Key(name, secret_sha256(secret), **limits)


def written(path: Path, *keys: Key, mode: int = 0o600) -> Path:
    path.write_text("\n".join(one.toml() for one in keys))
    path.chmod(mode)
    return path


# --- keys ---


def test_the_secret_finds_its_key_among_several():
    keys = Keys((key("alice", "a"), key("bob", "b"), key("carol", "c")))
    assert [keys.check(secret).name for secret in "abc"] == ["alice", "bob", "carol"]


@pytest.mark.parametrize("presented", ["", "x", "the secret ", "The secret", "\udcff", "é", "x" * 10_000])
def test_anything_else_is_nobody_and_the_error_repeats_nothing_of_it(presented):
    with pytest.raises(Unauthenticated) as refusal:
        Keys((key(),)).check(presented)
    assert refusal.value.field == "api_key"
    assert len(presented) < 2 or presented not in str(refusal.value)


def test_every_key_is_compared_whichever_fits_and_only_by_digests_in_constant_time(monkeypatch):
    compared = []

    def compare(a, b):
        compared.append((a, b))
        return a == b

    monkeypatch.setattr(access.hmac, "compare_digest", compare)
    keys = Keys((key("alice", "a"), key("bob", "b"), key("carol", "c")))
    assert keys.check("a").name == "alice"
    assert len(compared) == 3
    assert all(len(a) == len(b) == 64 for a, b in compared)


def test_a_bearer_header_carries_the_secret_and_other_schemes_carry_nothing():
    keys = Keys((key(),))
    assert keys.check_header("Bearer the secret").name == "alice"
    assert keys.check_header("bearer  the secret ").name == "alice"
    for header in ("Basic the secret", "the secret", "", "Bearer"):
        with pytest.raises(Unauthenticated):
            keys.check_header(header)


def test_secrets_are_long_random_and_recognisable():
    made = {new_secret() for _ in range(50)}
    assert len(made) == 50
    assert all(secret.startswith(SECRET_PREFIX) and len(secret) >= 43 and secret.isascii() for secret in made)


def test_neither_key_nor_keys_show_a_secret():
    assert "the secret" not in repr(key()) + repr(Keys((key(),))) + key().toml()


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"name": "no spaces"}, "keys"),
        ({"name": ""}, "keys"),
        ({"sha256": "abc"}, "keys.alice.sha256"),
        ({"sha256": "F" * 64}, "keys.alice.sha256"),
        ({"sha256": 7}, "keys.alice.sha256"),
        ({"max_sessions": 0}, "keys.alice.max_sessions"),
        ({"max_sessions": True}, "keys.alice.max_sessions"),
        ({"tokens_per_minute": 1.5}, "keys.alice.tokens_per_minute"),
        ({"admin": "yes"}, "keys.alice.admin"),
        ({"learning": 1}, "keys.alice.learning"),
    ],
)
def test_a_wrong_field_of_a_key_is_refused_by_name(wrong, field):
    with pytest.raises(ConfigError) as refusal:
        Key(**{"name": "alice", "sha256": "a" * 64} | wrong)
    assert refusal.value.field == field


# --- the file ---


@settings(deadline=None, derandomize=True, max_examples=30)
@given(
    st.builds(
        Key,
        st.from_regex(r"[A-Za-z0-9_.-]{1,20}", fullmatch=True),
        st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
        st.none() | st.integers(1, 10**9),
        st.none() | st.integers(1, 10**9),
        st.booleans(),
        st.booleans(),
    )
)
def test_a_key_comes_back_from_its_table(tmp_path_factory, one):
    path = written(tmp_path_factory.getbasetemp() / "keys.toml", one)
    assert Keys.from_file(path)._keys == (one,)


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("", "api_keys", "outrider key"),
        ("keys = 3", "api_keys", "holds no"),
        ("[keys", "api_keys", "not TOML"),
        ("[other]\nx = 1", "api_keys", "'other'"),
        ("[keys]\nalice = 3", "keys.alice", "table"),
        ("[keys.alice]\nmax_sessions = 3", "keys.alice.sha256", "missing"),
        (f'[keys.alice]\nsha256 = "{"a" * 64}"\nmax_session = 3', "keys.alice.max_session", "max_sessions"),
        (f'[keys.a]\nsha256 = "{"a" * 64}"\n[keys.b]\nsha256 = "{"a" * 64}"', "keys.a.sha256", "another key"),
        ("\xff\xfe", "api_keys", "not TOML"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_field_and_remedy(tmp_path, text, field, words):
    path = tmp_path / "keys.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=words) as refusal:
        Keys.from_file(path)
    assert refusal.value.field == field


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.toml: No such file"):
        Keys.from_file(tmp_path / "nowhere.toml")


def test_a_file_that_others_may_write_is_refused_and_a_readable_one_warned_of(tmp_path, caplog):
    with pytest.raises(ConfigError, match="chmod 600"):
        Keys.from_file(written(tmp_path / "open.toml", key(), mode=0o666))
    Keys.from_file(written(tmp_path / "readable.toml", key(), mode=0o644))
    assert "chmod 600" in caplog.text
    caplog.clear()
    Keys.from_file(written(tmp_path / "closed.toml", key(), mode=0o600))
    assert not caplog.text


def touched(path: Path, *keys: Key) -> None:
    """Write a new version that differs in time from the last one even where the clock of files is coarse."""
    written(path, *keys)
    later = time.time() + os.stat(path).st_ino % 97 + 1
    os.utime(path, (later, later))


@pytest.mark.parametrize("spoilt", ["", "[keys", "[keys]\n", None])
def test_a_file_that_is_emptied_broken_or_gone_revokes_every_key_and_is_logged_once(tmp_path, caplog, spoilt):
    path = written(tmp_path / "keys.toml", key("alice", "a"))
    keys = Keys.from_file(path)
    alice = keys.check("a")
    if spoilt is None:
        path.unlink()
    else:
        path.write_text(spoilt)
    for _ in range(3):
        with pytest.raises(Unauthenticated, match="the file of keys is unusable"):
            keys.check("a")
    assert (keys.current(), keys.unusable, keys.still_has(alice)) == ((), True, False)
    assert caplog.text.count("API keys are all refused until that is mended") == 1
    path.touch(0o600)
    touched(path, key("alice", "a"), key("bob", "b"))
    assert keys.check("b").name == "bob"
    assert (keys.unusable, keys.still_has(alice)) == (False, True)


def test_a_file_that_comes_back_as_it_was_is_in_force_again(tmp_path):
    path = written(tmp_path / "keys.toml", key("alice", "a"))
    keys = Keys.from_file(path)
    aside = path.rename(tmp_path / "aside")
    with pytest.raises(Unauthenticated):
        keys.check("a")
    aside.rename(path)
    assert keys.check("a").name == "alice"


# --- limits ---


def test_no_limits_admit_everybody():
    limits, unlimited = Limits(), key()
    tickets = [limits.admit(unlimited, 0.0) for _ in range(100)]
    for ticket in tickets:
        ticket.spend(10**9, 0.0)
    limits.admit(unlimited, 0.0)
    assert limits.running("alice") == 101


def test_sessions_are_counted_by_key_and_a_closed_one_makes_room():
    limits, two = Limits(), key(max_sessions=2)
    first, _ = limits.admit(two, 0.0), limits.admit(two, 0.0)
    with pytest.raises(ResourceExhausted, match="2 sessions") as refusal:
        limits.admit(two, 0.0)
    assert refusal.value.retry_after_s > 0
    limits.admit(key("bob", max_sessions=1), 0.0)
    first.close()
    first.close()
    limits.admit(two, 0.0)
    assert limits.running("alice") == 2
    with pytest.raises(ResourceExhausted):
        limits.admit(two, 0.0)


def test_a_minutes_worth_comes_at_once_and_the_time_to_wait_is_exact():
    limits, sixty = Limits(), key(tokens_per_minute=60)
    ticket = limits.admit(sixty, 100.0)
    ticket.spend(60, 100.0)
    with pytest.raises(ResourceExhausted, match="60 tokens a minute") as refusal:
        limits.admit(sixty, 100.0)
    assert refusal.value.retry_after_s == pytest.approx(1.0)
    with pytest.raises(ResourceExhausted):
        limits.admit(sixty, 100.99)
    limits.admit(sixty, 101.01)


def test_a_running_text_is_never_cut_and_what_it_overdraws_delays_the_next():
    limits, sixty = Limits(), key(tokens_per_minute=60)
    ticket = limits.admit(sixty, 0.0)
    ticket.close()
    ticket.spend(180, 0.0)
    with pytest.raises(ResourceExhausted) as refusal:
        limits.admit(sixty, 0.0)
    assert refusal.value.retry_after_s == pytest.approx(121.0)


def test_a_new_rate_holds_from_the_next_admission():
    limits = Limits()
    limits.admit(key(tokens_per_minute=6000), 0.0)
    ticket = limits.admit(key(tokens_per_minute=60), 0.0)
    ticket.spend(61, 0.0)
    with pytest.raises(ResourceExhausted) as refusal:
        limits.admit(key(tokens_per_minute=60), 0.0)
    assert refusal.value.retry_after_s == pytest.approx(2.0)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.integers(1, 1000), st.lists(st.tuples(st.floats(0, 30), st.integers(0, 500)), min_size=1, max_size=30))
def test_spending_over_any_time_is_at_most_a_minutes_worth_the_rate_and_one_text(rate, texts):
    bucket, now_s, spent, largest = Bucket(rate, 0.0), 0.0, 0, 0
    for pause_s, tokens in texts:
        now_s += pause_s
        if bucket.wait_s(1, now_s) == 0:
            bucket.spend(tokens, now_s)
            spent, largest = spent + tokens, max(largest, tokens)
    assert spent <= rate + rate * now_s / 60 + largest + 1e-6


def test_a_clock_that_stands_or_goes_back_gives_nothing():
    bucket = Bucket(60, 10.0)
    bucket.spend(60, 10.0)
    assert bucket.level(10.0) == pytest.approx(0.0)
    assert bucket.level(5.0) == pytest.approx(0.0)
    assert bucket.level(11.0) == pytest.approx(1.0)
