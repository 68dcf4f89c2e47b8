"""Anthropic's API: POST /v1/messages, translated into a chat and back.

errors  the error tree as Anthropic's statuses and error object
"""

MESSAGES = "/v1/messages"
COUNT_TOKENS = MESSAGES + "/count_tokens"
