"""`outrider doctor`: checks of everything between this machine and the target, and what to do about what they find.

connection_check  findings; the way to a server: port, certificate, health
examination       all checks in order: ways, lease, tokenizer, session, drafter, round trip, a whole text
"""

from outrider.edge.doctor.connection_check import Finding, Outcome
from outrider.edge.doctor.examination import examine

__all__ = ["Finding", "Outcome", "examine"]
