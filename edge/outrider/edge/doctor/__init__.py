"""`outrider doctor`: is everything between this machine and the target as it should be, and if not, what to do.

finding       what one check found: outcome, words, remedy, figures
endpoint      a server that is looked at, and channels to it
visit         what the checks know so far
checkup       which checks there are, what each needs, and all of them in order
remedies      what to do about each error of the tree
names, ports, certificates, answers           on the way to a server
leases, tokenizers, admission, releases       what the two sides say to each other
drafters, clocks, round_trips, rates, texts   how fast, and how right
"""

from __future__ import annotations

from outrider.edge.doctor.checkup import Examined, examine
from outrider.edge.doctor.finding import Finding, Outcome

__all__ = ["Examined", "Finding", "Outcome", "examine"]
