"""Whole texts of tiny models, enumerated: what a lossy decode does to the law of sequences.

The pair of models is small enough (V ≤ 6 tokens, texts of T ≤ 8) for the probability of every
text to be added up exactly, whatever the policy and the verifier, with the draft lengths of the
decode loop. That gives what no sample can: the KL of the text from the target's law beside the
meter that bounds it.
"""

from .pair import Setting as Setting
from .pair import markov_pair as markov_pair
from .rounds import every_round as every_round
from .texts import enumerate_texts as enumerate_texts
from .texts import measured as measured
