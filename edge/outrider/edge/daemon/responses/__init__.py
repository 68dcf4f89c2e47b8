"""OpenAI's Responses API, translated into chats and back.

schema       what a request may say
items        items of input and output, as a chat's messages
translation  a request as a chat, and its answer as a response with its events
store        responses that were kept, for their successors
routes       kept responses by their ids
"""

RESPONSES = "/v1/responses"
RESPONSE = RESPONSES + "/{response_id}"
