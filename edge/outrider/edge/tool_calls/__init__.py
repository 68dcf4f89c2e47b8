"""Calls of functions in a model's text: the formats that models write them in, and grammars that hold them to one.

reading       the pieces of an answer, and the parser that the formats share, which takes a text in any pieces
json_text     incremental reading of the JSON in a call
formats       the parsers of Hermes (and Qwen), Llama 3 and Mistral, and which of them a chat template speaks
call_grammar  grammars of calls, by the functions' schemas
"""
