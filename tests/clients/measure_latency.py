"""Measure the latency of a daemon that runs: a GET over a connection that stays, and the first token of a stream.

.venv/bin/python tests/clients/measure_latency.py http://127.0.0.1:8080
"""

from __future__ import annotations

import http.client
import json
import statistics
import sys
import time
from urllib.parse import urlsplit

REPEATED = 30
JSON = {"Content-Type": "application/json"}


def get_s(connection: http.client.HTTPConnection) -> float:
    """Return the seconds that GET /v1/models takes."""
    began = time.perf_counter()
    connection.request("GET", "/v1/models")
    connection.getresponse().read()
    return time.perf_counter() - began


def first_token_s(connection: http.client.HTTPConnection, model: str) -> float:
    """Return the seconds from the request to the first chunk with text."""
    body = {"model": model, "prompt": "def main(argv):", "max_tokens": 4, "temperature": 0, "stream": True}
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), JSON)
    answer = connection.getresponse()
    answer.readline()
    seconds = time.perf_counter() - began
    answer.read()
    return seconds


def main() -> None:
    """Print the medians."""
    connection = http.client.HTTPConnection(urlsplit(sys.argv[1]).netloc, timeout=60)
    connection.request("GET", "/v1/models")
    model = json.load(connection.getresponse())["data"][0]["id"]
    get = statistics.median(get_s(connection) for _ in range(REPEATED))
    first = statistics.median(first_token_s(connection, model) for _ in range(REPEATED))
    print(
        f"GET /v1/models: {1000 * get:.1f} ms; first token of a stream: {1000 * first:.1f} ms (medians of {REPEATED})"
    )


if __name__ == "__main__":
    main()
