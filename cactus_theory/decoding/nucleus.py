"""Cut rows of scores to their nucleus, as ``TopPLogitsWarper`` does, without sorting them.

That sorts whole rows: 5 ms for 49,152 tokens on a CPU, where a pass of SmolLM2-135M takes 80. Here
the least probability that stays is found digit by digit, from sums over tokens of equal digits.
"""

import numpy as np

from cactus_theory.optimum.passes import Row, compiled

# a float32 of at most 1 has 30 bits: three digits of this many
DIGIT = 10


@compiled
def cut_to_nucleus(scores: Row, probs: Row, lost: float, value: float) -> None:
    """Write ``value`` over scores of the least likely tokens while their sum is at most ``lost``.

    The likeliest token stays. Of those that are equal in float32 the first go first. A row with NaN
    is left as it is.
    """
    bits = probs.astype(np.float32).view(np.int32)
    edge, below, ties = np.int32(0), 0.0, 0
    for digits in (2, 1, 0):
        shift = np.int32(DIGIT * digits)
        mass, counts = np.zeros(2**DIGIT), np.zeros(2**DIGIT, np.int64)
        for i in range(bits.size):
            if bits[i] >> np.int32(shift + DIGIT) == edge:
                digit = (bits[i] >> shift) & np.int32(2**DIGIT - 1)
                mass[digit] += probs[i]
                counts[digit] += 1
        digit, last = 0, counts.nonzero()[0].max() if counts.any() else 0
        while digit < last and below + mass[digit] <= lost:
            below += mass[digit]
            digit += 1
        edge, ties = np.int32((edge << np.int32(DIGIT)) + digit), counts[digit]
    for i in range(bits.size if not np.isnan(probs[0]) else 0):
        if bits[i] == edge and ties > 1 and below + probs[i] <= lost:
            below += probs[i]
            ties -= 1
            scores[i] = value
        elif bits[i] < edge:
            scores[i] = value
