"""Calls of functions in a model's text: the formats that models write them in, and grammars that hold them to one.

parts         the pieces of an answer: text, and calls as they come
reading       the parser that the formats share, which takes a text in any pieces
json_text     incremental reading of the JSON in a call
hermes        <tool_call>{"name": …, "arguments": …}</tool_call>, which Qwen writes too
llama3        {"name": …, "parameters": …}
mistral       [TOOL_CALLS] [{…}], and [TOOL_CALLS]name[ARGS]{…}
formats       which of them a chat template speaks
call_grammar  grammars of calls, by the functions' schemas
"""
