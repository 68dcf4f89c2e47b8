"""`python -m research capacity`: how many sessions one verifier holds, on a virtual clock, by who drafts."""
