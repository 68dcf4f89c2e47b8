"""Codes of errors that somebody must act on, `OUT-…`; docs/errors.md and `outrider explain` have an entry for each.

A code is a part of its message, so it survives gRPC, HTTP and logs. It never changes its meaning and is never reused.
"""

from __future__ import annotations

import re

CODE = re.compile(r"\bOUT-\d{3}\b")

# The one thing to do, by code.
REMEDIES = {
    "OUT-101": "start `outrider coordinator` or `outrider up`, or mend --coordinator",
    "OUT-102": "start a verifier (`outrider verifier`), or mend its --advertise, at which edges must reach it",
    "OUT-103": "give --tls-ca for a server with TLS, and leave it out for one without",
    "OUT-104": "give --tls-ca the authority that made the server's certificate, or renew it with `outrider certs`",
    "OUT-105": "mend that file; `outrider certs DIR` makes a set",
    "OUT-106": "set up TLS with `outrider certs DIR`, or give --plaintext where the network is trusted",
    "OUT-107": "give --coordinator a coordinator's address, and --verifier a verifier's",
    "OUT-108": "bring both sides to one release, which `outrider --version` shows on each",
    "OUT-109": "give another --listen, or stop what has the port",
    "OUT-201": "give a key with --api-key-file; `outrider key NAME` makes one at the coordinator",
    "OUT-202": "use another key with --api-key-file, or have this one allowed more at the coordinator",
    "OUT-203": (
        "give --coordinator, which grants the leases; --lease-secret-file must be the same for `outrider coordinator` "
        "and `outrider verifier`"
    ),
    "OUT-204": "set both clocks by NTP (`timedatectl`); `outrider coordinator` says for how long a lease is good",
    "OUT-205": "wait, or have the key allowed more: `outrider key --help` lists its limits",
    "OUT-301": "start a verifier (`outrider verifier`), or see `outrider status --coordinator HOST:PORT`",
    "OUT-302": "try again later, start another verifier (`outrider verifier`), or raise its --max-sessions",
    "OUT-303": "ask for fewer tokens, or give `outrider verifier` more with --kv-tokens",
    "OUT-304": "shorten the prompt, or give `outrider verifier` a larger --context-length",
    "OUT-305": "send less at once, or raise --max-requests of `outrider edge`",
    "OUT-306": "give all `outrider verifier` of a target one --dtype, --engine and --context-length",
    "OUT-307": "read the verifier's log; where it does not end by itself, start `outrider verifier` again",
    "OUT-308": "`outrider status --coordinator HOST:PORT` lists what there is; name that with --model",
    "OUT-401": "name a target that there is with --target",
    "OUT-402": "fetch the model where there is a network, and name its folder with --target",
    "OUT-403": "take another model, or make it again with this release (`outrider export`); --drafter ngram needs none",
    "OUT-404": "lower --kv-tokens, or take a smaller --target or more memory",
    "OUT-405": "the files are damaged: fetch or `outrider export` them again, or delete the folder of --cache",
    "OUT-406": "give --tokenizer the target's tokenizer.json, or leave it out where --coordinator has the right one",
    "OUT-407": "name another drafter with --drafter, or none: `auto` takes what fits",
    "OUT-408": "give --tokenizer the target's tokenizer.json, or --coordinator, which has it",
    "OUT-409": "make room, or name another folder with --cache or XDG_CACHE_HOME",
    "OUT-501": "install that extra with `pip`, as the message says",
    "OUT-502": "start Ray there, or mend --ray-address",
    "OUT-503": "start the server, or mend the option that names it; docs/servers.md has the flags of each server",
    "OUT-901": "report it with the log of both sides: `outrider --log-level info`",
}


def coded(code: str, message: str) -> str:
    """Return a message that ends with its code, unless it has one already."""
    return message if code_in(message) or not code else f"{message} ({code})"


def code_in(text: str) -> str:
    """Return the first code in a text; empty: it has none."""
    found = CODE.search(text)
    return found.group() if found else ""
