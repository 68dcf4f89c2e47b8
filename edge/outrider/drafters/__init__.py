"""Drafters: whatever proposes tokens after a prefix.

protocol    what a drafter is: `Drafter`, `DraftState`
proposals   from a drafter's logits to one token, with the noise that the verifier will use
packages    drafters on disk: embedded or in a folder, checked against their manifest; downloads of what is served
search      which drafters a list of names stands for
shelf       several drafters, loaded within a limit of memory
onnx        an ONNX language model whose KV cache is one numpy buffer
ngram       prompt lookup, no model at all
retrieval   copying on from predictions, documents and the text itself, no model either
suffix_index  documents that are searched for the end of a text
"""

from __future__ import annotations

from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.packages import DrafterCache, DrafterPackage, embedded_packages, find_package, load_package
from outrider.drafters.proposals import ProposalRule
from outrider.drafters.protocol import Drafter, DraftState
from outrider.drafters.retrieval import RetrievalDrafter
from outrider.drafters.shelf import DrafterShelf
from outrider.drafters.suffix_index import SuffixIndex

__all__ = [
    "DraftState",
    "Drafter",
    "DrafterCache",
    "DrafterPackage",
    "DrafterShelf",
    "NgramDrafter",
    "ProposalRule",
    "RetrievalDrafter",
    "SuffixIndex",
    "embedded_packages",
    "find_package",
    "load_package",
]
