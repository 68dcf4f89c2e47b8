"""Rules and drafters that Outrider does without, by what they would bring on a target's own texts."""
