"""Other engines, each in a process and an environment of its own.

`child.py`, `llama_peer.py`, `vllm_peer.py` and `gguf_file.py` run in the peer's environment, which need not have
Outrider: they import nothing of it, and no one imports them.
"""
