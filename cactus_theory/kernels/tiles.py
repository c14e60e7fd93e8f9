"""The tile of a kernel: how many tokens of a row a program takes, and how many warps share them."""

# tokens that a program takes of a row, by the vocabulary up to which it does; a multiple of 512,
# the tokens that share counters of noise
PART_BY_VOCABULARY = ((512, 512), (1024, 1024), (16384, 2048), (65536, 4096))
LONGEST_PART = 8192
# tokens of a part that a thread takes, and a warp
TOKENS_A_THREAD = 32
TOKENS_A_WARP = 1024
MOST_WARPS = 8
# parts of rows that a warp merges: two for each of its threads
PAIRS_A_WARP = 64


def part_for(vocab: int) -> int:
    """Return how many tokens of a row one program takes; it depends on the vocabulary alone."""
    for most, part in PART_BY_VOCABULARY:
        if vocab <= most:
            return part
    return LONGEST_PART


def warps_for(part: int) -> int:
    """Return how many warps share a part of a row."""
    return min(max(part // TOKENS_A_WARP, 1), MOST_WARPS)


def warps_merging(parts: int) -> int:
    """Return how many warps merge that many parts of a request's rows."""
    return min(max(parts // PAIRS_A_WARP, 1), MOST_WARPS)
