"""The edge daemon: OpenAI's HTTP API in front of one `Client`, on this machine.

schema         what requests may say, checked field by field
wanted         from a request to prompts in tokens and `Sampling`
chat_template  messages to a prompt, rendered in a sandbox
texts          several texts of one request at once
chat           answers of /v1/chat/completions
completions    answers of /v1/completions
speculation    what is told of the drafts beside the text
errors         the error tree as HTTP statuses and OpenAI's error object
guard          what every request passes: ids, origins, keys, logs, counts
cloud          whether the cloud is there, found out in the background
app            the routes
server         sockets, TLS, signals
page           the page at /

Needs only the extra `[edge]`.
"""
