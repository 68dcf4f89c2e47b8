"""Asks an edge daemon on this host for one text after the other, and writes when each piece of them came."""

from __future__ import annotations

import json
import sys
import time
from itertools import count, islice
from pathlib import Path
from typing import Any

import openai


def ask(client: openai.OpenAI, question: dict[str, Any]) -> dict[str, Any]:
    """Return the text of a question, the times of its pieces in Unix seconds, and what went wrong."""
    times, pieces, finish, error = [time.time()], list[str](), None, ""
    try:
        for chunk in client.completions.create(model="reference", stream=True, **question):
            times.append(time.time())
            pieces.append(chunk.choices[0].text)
            finish = chunk.choices[0].finish_reason or finish
    except openai.OpenAIError as failed:
        error = f"{type(failed).__name__}: {failed}"
    times.append(time.time())
    return {"text": "".join(pieces), "finish": finish, "error": error, "times": times}


def main() -> None:
    """Ask the questions of a file in turn from a number, so many (0: for ever), and write to a file.

    The last argument is how often a request is asked again that is refused for a while, with 503.
    """
    questions = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    first, number, output, retries = int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5])
    client = openai.OpenAI(base_url="http://127.0.0.1:8080/v1", api_key="none", max_retries=retries)
    with output.open("a", encoding="utf-8", buffering=1) as file:
        for index in islice(count(first), number or None):
            answer = ask(client, questions[index % len(questions)])
            file.write(json.dumps({"question": index % len(questions), **answer}) + "\n")
            if answer["error"]:
                time.sleep(0.5)


if __name__ == "__main__":
    main()
