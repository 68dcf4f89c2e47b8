"""Drafters with another tokenizer than the target's: any drafter for any target, by text.

vocabulary    a tokenizer as the bytes of its tokens; tokens of a growing text, of which only the last are encoded again
text_noise    the target's noise for a drafter's tokens, and the choice among them
text_drafter  `TextDrafter`: target tokens to text, to the drafter's tokens, and back

Sources: Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
Vocabularies" (arXiv 2502.05202), whose string-level exact match (SLEM) is the route by text, and whose token-level
intersection (TLI) is the noise of tokens that both vocabularies have; transformers' universal assisted generation,
which looks back at the seam; OmniDraft (Ramakrishnan et al. 2025, arXiv 2507.02659), whose map from sequences of
drafter tokens to one target token is here made from the two vocabularies, without learning.

Only target tokens leave: the verifier accepts a draft where it is the target's own keyed token, so the text is exact
whatever happens here.
"""

from __future__ import annotations

from outrider.drafters.by_text.text_drafter import TextDrafter
from outrider.drafters.by_text.vocabulary import Vocabulary

__all__ = ["TextDrafter", "Vocabulary"]
