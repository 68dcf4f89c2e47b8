"""Chats to prompts, by the target's own template, in a process that can be killed.

template          the template, rendered in Jinja's sandbox
rendering         the process that renders, as its parent sees it
template_process  that process itself
"""
