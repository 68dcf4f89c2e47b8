"""langchain-openai: LangChain's ChatOpenAI."""

# /// script
# dependencies = ["langchain-openai==1.7.3"]
# ///

from __future__ import annotations

from cases import API_KEY, BASE_URL, MODEL, case, run
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

model = ChatOpenAI(model=MODEL, base_url=BASE_URL, api_key=API_KEY, max_tokens=8, max_retries=0)  # type: ignore


class Verdict(BaseModel):
    """An answer in a form."""

    ok: bool


@case("invoke")
def _invoke() -> None:
    assert model.invoke("What is 2 + 3?").usage_metadata["output_tokens"] >= 1


@case("stream")
def _stream() -> None:
    assert len(list(model.stream("What is 2 + 3?"))) > 1


@case("batch")
def _batch() -> None:
    assert len(model.batch(["a", "b", "c"])) == 3


@case("structured output by json_schema")
def _json_schema() -> None:
    long = model.model_copy(update={"max_tokens": 200})
    assert isinstance(long.with_structured_output(Verdict, method="json_schema").invoke("is 2 + 3 = 5?"), Verdict)


if __name__ == "__main__":
    run("langchain-openai")
