"""The decode loop for a GPU: a round is one function of tensors that never change their place.

The host uploads each text's last two tokens, its length and its coins; the device drafts K
tokens, runs the target over K + 1 positions and verifies; the host reads ids and counts, once
a round. Shapes depend on nothing that is drafted: every row drafts K tokens and runs to the end
of the round, whatever it may still take, and texts that have ended run along, unused.

Attention covers the cache up to a multiple of ``BUCKET`` positions that holds every text, under a
mask that the device makes from the lengths. So on CUDA a round is one graph per bucket,
captured when a text first gets there: a bucket of 256 reads at most 255 positions too many, 2 % of
the bytes of a pass of an 8B model over a short text. Without CUDA the same functions run as they
are, which is how they are tested.

Up to rounding it is the loop of :func:`cactus_theory.decoding.generate`: the same coins, tokens,
statistics and meter. Where the fused kernels verify, which is on CUDA where they can, their
random numbers are their own: the same laws and meter, other tokens.
"""

from cactus_theory.decoding.device.capture import Repeated
from cactus_theory.decoding.device.choose import BY_KERNELS, on_device
from cactus_theory.decoding.device.loop import BUCKET, DeviceDecode
from cactus_theory.decoding.device.round import StaticForward

__all__ = ["BUCKET", "BY_KERNELS", "DeviceDecode", "Repeated", "StaticForward", "on_device"]
