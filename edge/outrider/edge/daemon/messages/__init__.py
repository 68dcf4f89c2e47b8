"""Anthropic's API, translated into chats and back.

schema       what a request may say
content      blocks of messages, as a chat's messages
translation  a request as a chat, and its answer as a message with its events
errors       the error tree as Anthropic's statuses and error object
routes       POST /v1/messages and /v1/messages/count_tokens
"""

MESSAGES = "/v1/messages"
COUNT_TOKENS = MESSAGES + "/count_tokens"
