"""The edge daemon: OpenAI's HTTP API in front of one `Client`, on this machine.

server          sockets, TLS, signals, what is no HTTP
auth            what every request passes: keys, origins, ids, logs, counts
app             the routes
limiter         which requests run, and until when
schema          what requests may say, checked field by field
parsed_request  from a request's body to prompts in tokens and `Sampling`
chat_template   messages to a prompt, rendered in a sandbox
reply           the texts of one request while they are decoded, and the sending of their answer
answers         the two formats of an answer
speculation     what an answer says about the drafts
errors          the error tree as HTTP statuses and OpenAI's error object
cloud           whether the cloud is there, found out in the background
page            the page at /

Needs only the extra `[edge]`.
"""
