"""`outrider chat`, a conversation in the terminal.

chat_command  the command: its lines, its answers, its statistics
turns         messages to turns of one conversation, by the target's chat template
chat_lines    lines that a person types, with a history, or that a pipe brings
slash         commands that begin with /
"""
