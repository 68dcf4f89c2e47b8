"""Targets for tests of software that builds on Outrider's verifier; pytest is not needed."""

from __future__ import annotations

from outrider.cloud.testing.tiny_target import decode_by_hand, save_byte_tokenizer, save_tiny_target, tiny_llama

__all__ = ["decode_by_hand", "save_byte_tokenizer", "save_tiny_target", "tiny_llama"]
